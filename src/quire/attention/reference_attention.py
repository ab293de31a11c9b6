"""Attention in torch: simple, slow and correct. The device `python` attends by it; the reference for every kernel.

It gathers a sequence's tokens and computes a masked softmax(Q K^T) V in float32.

It reads only slots that a query of the present piece may see; other slots may have NaN or another sequence's tokens.

Cost: a call gathers every visible token in float32, and needs at most `_PIECE` x context scores a head.
"""

from __future__ import annotations

import torch

from quire.attention.attention_checks import check_run, check_write
from quire.attention.attention_options import AttentionOptions
from quire.attention.codecs import codec_of, rotate, rotate_query
from quire.errors import ArgumentError
from quire.memory.view import KVView
from quire.step import AttentionBatch

__all__ = ["run", "write"]

_PIECE = 256  # query rows computed together: bounds the score matrix


def write(view: KVView, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write new keys and values to their slots, rounded to the storage's dtype, and then encoded if it has codes.

    Args:
        k: [T, num_kv_heads, k_head_dim]; v: [T, num_kv_heads, v_head_dim].
        slot_mapping: int64 [T], distinct.
    """
    check_write(view, k, v, slot_mapping)
    blocks, offsets = slot_mapping // view.block_size, slot_mapping % view.block_size
    k, v = k.to(view.dtype), v.to(view.dtype)
    if view.k_scale is not None and view.v_scale is not None:
        k_codec, v_codec = codec_of(view.k_format), codec_of(view.v_format)
        k = k.float() if view.k_offset is None else k.float() - view.k_offset
        k, k_scale = k_codec.encode(rotate(k) if k_codec.rotates_keys else k)
        v, v_scale = v_codec.encode(v.float())
        view.k_scale[blocks, :, offsets] = k_scale
        view.v_scale[blocks, :, offsets] = v_scale
    view.k[blocks, :, offsets] = k
    view.v[blocks, :, offsets] = v


def run(
    view: KVView,
    query: torch.Tensor,
    batch: AttentionBatch,
    options: AttentionOptions,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of every query row over its sequence's tokens in the view.

    Args:
        query: [T, num_q_heads, k_head_dim], row i of sequence s at position context_lengths[s] - q_len + i.
        out: [T, num_q_heads, v_head_dim] of query's dtype, to write into; allocated by default.

    Returns:
        [T, num_q_heads, v_head_dim] in the dtype of `query`.
    """
    check_run(view, query, batch, options, out)
    if out is None:
        out = query.new_empty(batch.num_tokens, query.shape[1], view.v_head_dim)
    rotates = view.k_scale is not None and codec_of(view.k_format).rotates_keys
    starts, contexts = batch.query_start.tolist(), batch.context_lengths.tolist()
    for sequence, context in enumerate(contexts):
        end = starts[sequence + 1]
        for first in range(starts[sequence], end, _PIECE):
            last = min(first + _PIECE, end)
            # Positions of rows [first, last): row end - 1 has position context - 1.
            position = context - (end - first)
            stop = position + last - first
            begin = options.first_visible(position)
            k, v = _gather(view, batch.block_tables[sequence], begin, stop)
            rows = query[first:last].float()
            rows = rotate_query(rows) if rotates else rows
            out[first:last] = _attend(rows, k, v, begin, position, options)
    return out


def _gather(view: KVView, table: torch.Tensor, begin: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of positions [begin, stop) as float32 [num_kv_heads, stop - begin, head_dim]; keys still rotated
    if the codec rotates them."""
    size = view.block_size
    blocks = table[begin // size : -(-stop // size)].long()
    if blocks.device.type == "cpu":  # to read another device's is to wait for it
        low, high = (int(bound) for bound in torch.aminmax(blocks))
        if low < 0 or high >= view.num_blocks:
            raise ArgumentError(
                f"expected blocks of 0 to {view.num_blocks - 1} for positions {begin} to {stop - 1}, "
                f"got {blocks.tolist()}"
            )
    positions = torch.arange(begin, stop, device=view.k.device)
    of_position = blocks.to(view.k.device)[positions // size - begin // size]
    offsets = positions % size

    def rows(pool: torch.Tensor, scales: torch.Tensor | None, name: str) -> torch.Tensor:
        picked = pool[of_position, :, offsets].transpose(0, 1)
        if scales is None:
            return picked.float()
        return codec_of(name).decode(picked, scales[of_position, :, offsets].transpose(0, 1))

    return rows(view.k, view.k_scale, view.k_format), rows(view.v, view.v_scale, view.v_format)


def _attend(
    query: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    begin: int,
    position: int,
    options: AttentionOptions,
) -> torch.Tensor:
    """Rows at `position`, `position` + 1, ... over keys at `begin`, `begin` + 1, ...; all float32.

    query [R, Hq, Dk], k [Hkv, C, Dk], v [Hkv, C, Dv] -> [R, Hq, Dv].
    """
    num_rows = query.shape[0]
    num_kv_heads, context, _ = k.shape
    grouped = query.transpose(0, 1).unflatten(0, (num_kv_heads, -1))  # [Hkv, group, R, Dk]
    scores = grouped @ k.transpose(1, 2).unsqueeze(1) * options.scale  # [Hkv, group, R, C]
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)

    rows = torch.arange(position, position + num_rows, device=query.device)[:, None]
    keys = torch.arange(begin, begin + context, device=query.device)[None, :]
    if options.slopes is not None:
        scores += options.slopes.to(query.device).view(num_kv_heads, -1, 1, 1) * (keys - rows).float()
    visible = keys <= rows
    if options.window or options.chunk:
        first = (rows - (options.window or 1) + 1).clamp(min=0)
        visible &= keys >= first - first % (options.chunk or 1)
    scores = scores.masked_fill(~visible, -torch.inf)

    if options.sinks is not None:
        sinks = options.sinks.view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1)[..., :context]
    return (weights @ v.unsqueeze(1)).flatten(0, 1).transpose(0, 1)  # [R, Hq, Dv]
