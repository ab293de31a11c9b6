"""Keys and values of a layer's rows as codes: a back end writes them, and `decoded` returns them as numbers.

`view` is a `KVView` in which a row of the batch is one block, so that slot `r * row_tokens + p` is token p of row r.
Decoded rows are a copy that lives only while the caller's attention reads it. A product with the Hadamard matrix
rotates keys back; a row's codes and scale have so few bits that all its sums are exact, in any order. Not the
definition of codes (`quire.attention.codecs`), nor of rows (`layer_rows`).

Cost: writing costs what the back end's does; decoding takes some passes over the rows in float32, a few tokens at a
time, which with a long past is more than torch's attention takes.
"""

from __future__ import annotations

from functools import cache

import torch

from quire.attention.codecs import codec_of, rotate, rotation_size
from quire.devices import Device
from quire.memory.view import KVView

__all__ = ["decoded", "write_codes"]

_PIECE = 1 << 16  # numbers that are decoded together, in float32


def write_codes(backend: Device, view: KVView, k: torch.Tensor, v: torch.Tensor, at: int) -> None:
    """Write k and v [rows, heads, T, width] as codes, from token `at` of each row on."""
    num_rows, _, num_new, _ = k.shape
    first = torch.arange(num_rows)[:, None] * view.block_size + at
    slots = (first + torch.arange(num_new)).flatten()
    backend.write(view, k.transpose(1, 2).flatten(0, 1), v.transpose(1, 2).flatten(0, 1), slots)


def decoded(view: KVView, which: int, first: int, stop: int) -> torch.Tensor:
    """Keys (0) or values (1) of tokens [first, stop): [rows, heads, stop - first, width] of the model's dtype, as
    before rotation and coding, up to the codes' loss."""
    pool, scales, name = (
        (view.k, view.k_scale, view.k_format) if which == 0 else (view.v, view.v_scale, view.v_format)
    )
    if scales is None:
        return pool[:, :, first:stop].contiguous()
    codec = codec_of(name)
    num_rows, num_heads = pool.shape[:2]
    width = (view.k_head_dim, view.v_head_dim)[which]
    out = torch.empty((num_rows, num_heads, stop - first, width), dtype=view.dtype)
    step = max(1, _PIECE // (num_rows * num_heads * width))
    for begin in range(first, stop, step):
        end = min(begin + step, stop)
        rows = codec.decode(pool[:, :, begin:end], scales[:, :, begin:end])
        if which == 0:
            if codec.rotates_keys:
                size = rotation_size(width)
                rows = (rows.reshape(-1, size) @ _inverse_rotation(size)).view(rows.shape)
            if view.k_offset is not None:
                rows = rows + view.k_offset[:, None]
        out[:, :, begin - first : end - first] = rows
    return out


@cache
def _inverse_rotation(size: int) -> torch.Tensor:
    """[size, size], the inverse rotation: the matrix times itself is the identity times its size."""
    with torch.inference_mode(False):
        return rotate(torch.eye(size)) / size
