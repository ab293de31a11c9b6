"""The checks that both devices make before they touch memory: one clear error, and nothing changed.

Not the checks of the plan or the options, which are made once, when they are built.

Cost: a few us of shape comparisons, and one pass over the slot mapping.
"""

from __future__ import annotations

import torch

from quire.attention.attention_options import AttentionOptions
from quire.attention.plan import AttentionPlan
from quire.errors import ArgumentError
from quire.memory.view import KVView

__all__ = ["check_run", "check_write"]


def check_write(view: KVView, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """k [T, Hkv, Dk], v [T, Hkv, Dv] and int64 slots [T] that exist in the view."""
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
    if num_tokens:
        num_slots = view.num_blocks * view.block_size
        low, high = (int(bound) for bound in torch.aminmax(slot_mapping))
        if low < 0 or high >= num_slots:
            raise ArgumentError(f"expected slots of 0 to {num_slots - 1}, got {low} to {high}")


def check_run(
    view: KVView,
    query: torch.Tensor,
    plan: AttentionPlan,
    options: AttentionOptions,
    out: torch.Tensor | None,
) -> None:
    """query [T, Hq, Dk] and out [T, Hq, Dv] that fit the view, the plan and the options."""
    if query.dim() != 3 or query.shape[0] != plan.num_tokens or query.shape[2] != view.k_head_dim:
        raise ArgumentError(
            f"expected query [{plan.num_tokens}, num_q_heads, {view.k_head_dim}], got {tuple(query.shape)}"
        )
    num_q_heads = query.shape[1]
    if num_q_heads == 0 or num_q_heads % view.num_kv_heads:
        raise ArgumentError(
            f"expected query heads in a multiple of the {view.num_kv_heads} KV heads, got {num_q_heads}"
        )
    if view.k_offset is not None and (options.softcap or options.sinks is not None):
        raise ArgumentError(
            "expected unmodified keys for a layer with a soft cap or sinks, whose scores the offset would change, got "
            "keys with an offset"
        )
    if plan.block_size != view.block_size:
        raise ArgumentError(f"expected a plan of block size {view.block_size}, got {plan.block_size}")
    for name, tensor in (("sinks", options.sinks), ("slopes", options.slopes)):
        if tensor is not None and tensor.numel() != num_q_heads:
            raise ArgumentError(f"expected {num_q_heads} {name}, one per query head, got {tensor.numel()}")
    if out is not None and (
        out.shape != (plan.num_tokens, num_q_heads, view.v_head_dim) or out.dtype != query.dtype
    ):
        raise ArgumentError(
            f"expected out {query.dtype} [{plan.num_tokens}, {num_q_heads}, {view.v_head_dim}], "
            f"got {out.dtype} {tuple(out.shape)}"
        )
