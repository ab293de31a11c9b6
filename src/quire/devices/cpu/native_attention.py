"""Attention in C++ (native/kernels): the same contract as `reference_attention`, at the speed of the memory.

Not here: the arithmetic, and the division of a call among threads.

Tensors are passed without copies: the extension reads their addresses, shapes and strides, and refuses unfit ones.
Objects that stay the same between calls - a view, a batch, a layer's options - are converted once; each stores its
handle.

Cost: about 3 us a call in addition to the work, and 2 us to allocate `out`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from quire import _native
from quire.attention import AttentionOptions
from quire.attention.attention_checks import check_run, check_write
from quire.errors import ArgumentError
from quire.memory.view import KVView
from quire.step import AttentionBatch

__all__ = [
    "Traffic",
    "batch_handle",
    "handles",
    "run",
    "traffic",
    "unshared",
    "write",
]

_HANDLE = "_native_handle"


def handles(view: KVView, batch: AttentionBatch, options: AttentionOptions) -> tuple[Any, Any, Any]:
    """The kernels' handles of the three, for a caller that has checked that they fit together."""
    return (
        view.__dict__.get(_HANDLE) or _view_handle(view),
        batch_handle(batch),
        options.__dict__.get(_HANDLE) or _options_handle(options),
    )


def batch_handle(batch: AttentionBatch) -> Any:
    """The kernels' handle of the batch."""
    return batch.native_handle or _new_batch_handle(batch)


def write(view: KVView, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write new keys and values to their slots, rounded to the storage's dtype, and then encoded if it has codes.

    Args:
        k: [T, num_kv_heads, k_head_dim]; v: [T, num_kv_heads, v_head_dim].
        slot_mapping: int64 [T], distinct.
    """
    handle = view.__dict__.get(_HANDLE) or _view_handle(view)
    if k.dtype is not view.dtype or v.dtype is not view.dtype:
        k, v = k.to(view.dtype), v.to(view.dtype)
    if k.stride()[-1:] != (1,) or v.stride()[-1:] != (1,):
        k, v = k.contiguous(), v.contiguous()
    slots = slot_mapping.contiguous()
    try:
        _native.attention_write(handle, k, v, slots, torch.get_num_threads())
    except ValueError as error:
        check_write(view, k, v, slot_mapping)
        raise ArgumentError(str(error)) from None


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
        query: [T, num_q_heads, k_head_dim] of the view's dtype, row i of sequence s at position
            context_lengths[s] - q_len + i.
        out: [T, num_q_heads, v_head_dim] of query's dtype, to write into; allocated by default.

    Returns:
        [T, num_q_heads, v_head_dim] in the dtype of `query`.
    """
    handle, native_batch, settings = handles(view, batch, options)
    shape = query.shape
    heads, k_width, v_width = view.__dict__["_native_shape"]
    if (
        len(shape) != 3
        or shape[0] != batch.num_tokens
        or shape[2] != k_width
        or shape[1] == 0
        or shape[1] % heads
        or batch.block_size != view.block_size
        or (out is not None and (out.shape != (shape[0], shape[1], v_width) or out.dtype is not query.dtype))
        or (options.sinks is not None and options.sinks.numel() != shape[1])
        or (options.slopes is not None and options.slopes.numel() != shape[1])
    ):
        check_run(view, query, batch, options, out)
    if query.dtype is not view.dtype:
        raise ArgumentError(
            f"expected a query of the dtype of the keys and values, {view.dtype}, got {query.dtype}"
        )
    num_tokens, num_q_heads, _ = shape
    target = out
    if target is None:
        target = torch.empty((num_tokens, num_q_heads, v_width), dtype=query.dtype)
    if query.stride()[2] != 1:
        query = query.contiguous()
    if target.stride()[2] != 1:
        raise ArgumentError(f"expected out with a dense last dimension, got strides {target.stride()}")
    try:
        _native.attention_run(handle, query, target, native_batch, settings)
    except ValueError as error:
        raise ArgumentError(str(error)) from None
    return target


class Traffic(NamedTuple):
    """The reads of a call: bytes of keys and values, the same without sharing, and the number of shared runs."""

    kv_bytes: int
    unshared_kv_bytes: int
    num_shared_runs: int


def traffic(view: KVView, num_q_heads: int, batch: AttentionBatch, options: AttentionOptions) -> Traffic:
    """The reads of `run` with these arguments, without computing."""
    handle, native_batch, settings = handles(view, batch, options)
    try:
        return Traffic(*native_batch.traffic(handle, num_q_heads, settings))
    except ValueError as error:
        raise ArgumentError(str(error)) from None


def unshared(batch: AttentionBatch) -> AttentionBatch:
    """The batch without shared reads: each sequence reads its tokens alone. Same bits, more bytes; for benchmarks."""
    alone = replace(batch)
    _new_batch_handle(alone, share_prefixes=False)
    return alone


def _store_handle(owner: object, handle: Any) -> Any:
    object.__setattr__(owner, _HANDLE, handle)
    return handle


def _view_handle(view: KVView) -> Any:
    k, v = view.k, view.v
    if k.device.type != "cpu":
        raise ArgumentError(f"expected keys and values on the CPU, got {k.device}")
    try:
        if view.k_scale is None:
            handle = _native.PagedView(k, v)
        else:
            codes = k.view(torch.uint8), v.view(torch.uint8)
            handle = _native.PagedView(
                *(*codes, view.k_scale, view.v_scale, str(view.dtype).removeprefix("torch.")),
                k_offset=None if view.k_offset is None else view.k_offset.contiguous(),
            )
    except ValueError as error:
        raise ArgumentError(str(error)) from None
    object.__setattr__(view, "_native_shape", (view.num_kv_heads, view.k_head_dim, view.v_head_dim))
    return _store_handle(view, handle)


def _new_batch_handle(batch: AttentionBatch, *, share_prefixes: bool = True) -> Any:
    batch.native_handle = _native.AttentionBatch(
        batch.query_start, batch.context_lengths, batch.block_tables, batch.num_threads, share_prefixes
    )
    return batch.native_handle


def _options_handle(options: AttentionOptions) -> Any:
    if options.window and options.chunk:
        raise ArgumentError(
            f"expected a window or a chunk for backend 'native', got a window of {options.window} tokens that moves in "
            f"steps of {options.chunk}; use backend='python'"
        )
    settings = _native.AttentionOptions(
        options.scale, options.window, options.chunk, options.softcap, options.sinks, options.slopes
    )
    return _store_handle(options, settings)
