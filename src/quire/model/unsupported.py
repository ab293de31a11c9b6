"""What Quire lacks for a model, in the model's own terms: for refusals.

Read from the model's modules and their code, after a refusal only: nothing is refused for what is said here.

Cost: a look at every module's class.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

import torch

__all__ = ["attends_itself", "counts_padding", "what_is_missing", "why_not_called"]

# What forwards call a past that is no cache of K and V.
_OTHER_PASTS = ("mems", "state", "past_buckets_states", "cache_params")


def what_is_missing(model: torch.nn.Module) -> str | None:
    """Why the model does not run on paged memory, where that can be told from its modules."""
    if _has_alibi(model):
        return "its positions are biases on attention's scores (ALiBi), of a kind that Quire's attention does not add"
    for module in model.modules():
        if attends_itself(type(module)):
            return (
                f"its {type(module).__name__} computes attention itself: its layers do not call transformers' "
                "attention interface"
            )
    return None


def why_not_called(model: torch.nn.Module, missing: Collection[str], parameters: Collection[str]) -> str:
    """Why the model's forward takes none of `missing`, of position_ids and cache. parameters: what it takes."""
    name = type(model).__name__
    if "cache" in missing:
        kept = [past for past in _OTHER_PASTS if past in parameters]
        what = (
            f"it keeps its past as {kept[0]}, not as K and V"
            if kept
            else "it computes all tokens in every step"
        )
        return f"{name} takes no cache: {what}"
    if _has_alibi(model):
        return f"{name} takes no position_ids: its positions are biases on attention's scores (ALiBi)"
    return f"{name} takes no position_ids: it counts positions itself, of one sequence"


def attends_itself(cls: type) -> bool:
    """Whether the class's forward stores K and V in a cache, and does not attend through transformers' interface."""
    names = _names(cls)
    return "update" in names and "get_interface" not in names


def counts_padding(cls: type) -> bool:
    """Whether the class's forward takes positions from the cache's length (Llama 4's temperature), so that padding
    counts."""
    return "get_seq_length" in _names(cls)


def _has_alibi(model: torch.nn.Module) -> bool:
    configs: list[Any] = [getattr(model, "config", None)]
    configs += [getattr(configs[0], "attn_config", None)]
    said = [getattr(config, "alibi", None) for config in configs]
    if any(value is not None for value in said):
        return any(said)
    return any("build_alibi_tensor" in _names(type(module), "forward") for module in model.modules())


def _names(cls: type, method: str = "forward") -> frozenset[str]:
    """Every attribute and global that the method names."""
    code = getattr(inspect.unwrap(getattr(cls, method)), "__code__", None)
    return frozenset(code.co_names) if code is not None else frozenset()
