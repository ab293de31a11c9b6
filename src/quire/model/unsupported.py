"""Describes the unsupported feature of a model, in the model's own terms: for refusals.

Read from the model's modules and their code, after a refusal only: the descriptions never decide a refusal.

Cost: a look at every module's class.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

import torch

__all__ = ["attends_itself", "counts_padding", "forward_mismatch", "unsupported_feature"]

# The names that forwards use for a past other than K and V.
_OTHER_PASTS = ("mems", "state", "past_buckets_states", "cache_params")


def unsupported_feature(model: torch.nn.Module) -> str | None:
    """Why the model does not run on paged memory, if its modules show it."""
    if _has_alibi(model):
        return "its positions are biases on attention's scores (ALiBi), in a form that Quire's attention does not add"
    for module in model.modules():
        if attends_itself(type(module)):
            return (
                f"its {type(module).__name__} computes attention itself: its layers do not call transformers' "
                "attention interface"
            )
    return None


def forward_mismatch(model: torch.nn.Module, missing: Collection[str], parameters: Collection[str]) -> str:
    """Why the model's forward lacks the arguments `missing`, of position_ids and cache. parameters: the arguments it
    has."""
    name = type(model).__name__
    if "cache" in missing:
        pasts = [past for past in _OTHER_PASTS if past in parameters]
        if pasts:
            return f"{name} takes no cache: it keeps its past as {pasts[0]}, not as K and V"
        return f"{name} takes no cache: it computes all tokens in every step"
    if _has_alibi(model):
        return f"{name} takes no position_ids: its positions are biases on attention's scores (ALiBi)"
    return f"{name} takes no position_ids: it counts positions itself, of one sequence"


def attends_itself(cls: type) -> bool:
    """Whether the class's forward stores K and V in a cache without attending through transformers' interface."""
    names = _names(cls)
    return "update" in names and "get_interface" not in names


def counts_padding(cls: type) -> bool:
    """Whether the class's forward takes positions from the cache's length (Llama 4's temperature), so that padding
    counts."""
    return "get_seq_length" in _names(cls)


def _has_alibi(model: torch.nn.Module) -> bool:
    configs: list[Any] = [getattr(model, "config", None)]
    configs += [getattr(configs[0], "attn_config", None)]
    flags = [getattr(config, "alibi", None) for config in configs]
    if any(flag is not None for flag in flags):
        return any(flags)
    return any("build_alibi_tensor" in _names(type(module), "forward") for module in model.modules())


def _names(cls: type, method: str = "forward") -> frozenset[str]:
    """Every attribute and global that the method names."""
    code = getattr(inspect.unwrap(getattr(cls, method)), "__code__", None)
    return frozenset(code.co_names) if code is not None else frozenset()
