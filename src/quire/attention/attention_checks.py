"""Checks of both devices before they touch memory: one clear error, and no change.

The arrays of a batch are checked once, by `attention_batch`, for callers other than the engine; the engine
makes its steps from the cache's plans. Options are checked once, when they are built.

Cost: a few us of shape comparisons, and one pass over the slot mapping; `attention_batch` about 20 us.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from quire.attention.attention_options import AttentionOptions
from quire.errors import ArgumentError
from quire.memory.view import KVView
from quire.step import AttentionBatch

__all__ = ["attention_batch", "check_new_rows", "check_run", "check_write"]


def attention_batch(
    query_start: Any,
    context_lengths: Any,
    block_tables: Any,
    block_size: int,
    num_threads: int | None = None,
) -> AttentionBatch:
    """A varlen batch for callers of attention by itself; decodes (one row) and prefills mix freely.

    int32 arrays are not copied.

    Args:
        query_start: int32 [n + 1], first row of each sequence, and the number of rows.
        context_lengths: int32 [n], tokens of each sequence, with those of this step.
        block_tables: int32 [n, widest].
        block_size: tokens of a block.
        num_threads: the most threads of a kernel; by default torch's number.

    Raises:
        ArgumentError: shapes that do not agree, or a table too short for its sequence.
    """
    starts = _int32(query_start)
    contexts = _int32(context_lengths)
    tables = _int32(block_tables)
    threads = torch.get_num_threads() if num_threads is None else num_threads
    n = contexts.size
    if starts.shape != (n + 1,) or contexts.shape != (n,) or tables.ndim != 2 or tables.shape[0] != n:
        raise ArgumentError(
            "expected query_start [n + 1], context_lengths [n] and block_tables [n, widest], "
            f"got {tuple(starts.shape)}, {tuple(contexts.shape)} and {tuple(tables.shape)}"
        )
    if n == 0 or block_size < 1 or threads < 1:
        raise ArgumentError(
            f"expected at least one sequence, block size and thread, got {n}, {block_size} and {threads}"
        )
    lengths = starts[1:] - starts[:-1]
    shortest, widest = int(lengths.min()), int(contexts.max())
    if int(starts[0]) != 0 or shortest < 1 or (contexts < lengths).any():
        raise ArgumentError(
            "expected query_start to rise from 0 by 1 to context_length rows per sequence, "
            f"got {starts.tolist()} with context lengths {contexts.tolist()}"
        )
    if tables.shape[1] * block_size < widest:
        raise ArgumentError(
            f"expected block tables of {-(-widest // block_size)} blocks of {block_size} tokens for a context of "
            f"{widest}, got {tables.shape[1]}"
        )
    return AttentionBatch(
        query_start=torch.from_numpy(starts),
        context_lengths=torch.from_numpy(contexts),
        block_tables=torch.from_numpy(tables),
        block_size=block_size,
        num_threads=threads,
        num_sequences=n,
        num_tokens=int(starts[-1]),
    )


def _int32(values: Any) -> np.ndarray:
    """A contiguous numpy array: small operations cost a tenth of torch's."""
    return np.ascontiguousarray(values.cpu() if isinstance(values, torch.Tensor) else values, dtype=np.int32)


def check_write(view: KVView, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Checks k [T, Hkv, Dk], v [T, Hkv, Dv] and int64 slots [T] of the view. *raises:* ArgumentError.

    The values of slots on a device, which a caller made on this machine, are not checked: to read them is to wait.
    """
    check_new_rows(view, k, v, slot_mapping)
    if slot_mapping.numel() and slot_mapping.device.type == "cpu":
        num_slots = view.num_blocks * view.block_size
        low, high = (int(bound) for bound in torch.aminmax(slot_mapping))
        if low < 0 or high >= num_slots:
            raise ArgumentError(f"expected slots of 0 to {num_slots - 1}, got {low} to {high}")


def check_new_rows(view: KVView, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Checks shapes and dtypes alone, as `check_write` does: it reads no tensor. *raises:* ArgumentError."""
    num_tokens = slot_mapping.numel()
    heads = view.num_kv_heads
    if k.shape != (num_tokens, heads, view.k_head_dim) or v.shape != (num_tokens, heads, view.v_head_dim):
        raise ArgumentError(
            f"expected k [{num_tokens}, {heads}, {view.k_head_dim}] and v [{num_tokens}, {heads}, "
            f"{view.v_head_dim}] for {num_tokens} slots, got {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if slot_mapping.dtype != torch.int64 or slot_mapping.dim() != 1:
        raise ArgumentError(
            f"expected slots as int64 [{num_tokens}], got {slot_mapping.dtype} {tuple(slot_mapping.shape)}"
        )


def check_run(
    view: KVView,
    query: torch.Tensor,
    batch: AttentionBatch,
    options: AttentionOptions,
    out: torch.Tensor | None,
) -> None:
    """Checks query [T, Hq, Dk] and out [T, Hq, Dv] for view, batch and options. *raises:* ArgumentError."""
    if query.dim() != 3 or query.shape[0] != batch.num_tokens or query.shape[2] != view.k_head_dim:
        raise ArgumentError(
            f"expected query [{batch.num_tokens}, num_q_heads, {view.k_head_dim}], got {tuple(query.shape)}"
        )
    num_q_heads = query.shape[1]
    if num_q_heads == 0 or num_q_heads % view.num_kv_heads:
        raise ArgumentError(
            f"expected query heads in a multiple of the {view.num_kv_heads} KV heads, got {num_q_heads}"
        )
    if view.k_offset is not None and (options.softcap or options.sinks is not None):
        raise ArgumentError(
            "expected unmodified keys for a layer with a soft cap or sinks, because the offset changes their scores, "
            "got keys with an offset"
        )
    if batch.block_size != view.block_size:
        raise ArgumentError(f"expected a batch of block size {view.block_size}, got {batch.block_size}")
    for name, tensor in (("sinks", options.sinks), ("slopes", options.slopes)):
        if tensor is not None and tensor.numel() != num_q_heads:
            raise ArgumentError(f"expected {num_q_heads} {name}, one per query head, got {tensor.numel()}")
    if out is not None and (
        out.shape != (batch.num_tokens, num_q_heads, view.v_head_dim) or out.dtype != query.dtype
    ):
        raise ArgumentError(
            f"expected out {query.dtype} [{batch.num_tokens}, {num_q_heads}, {view.v_head_dim}], "
            f"got {out.dtype} {tuple(out.shape)}"
        )
