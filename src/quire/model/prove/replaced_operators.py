"""Proof of forwards whose operators were replaced by row-invariant ones (`quire.model.row_invariant`).

There is nothing to choose, so F1 asks in float32 whether the module still computes what it computed; F2 asks in the
working type whether it loses more. Routers are compared by their logits, the first tensor of what they give; modules
with experts below them are left to the proof of the experts and of the router, since rounding may send a row elsewhere.

Cost: a forward of the model's own over a few dozen tokens, and four calls of one module of all that are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from quire.model.experts import PackedExperts
from quire.model.paged_cache import empty_model_cache
from quire.model.prove.equal_modules import kind_of
from quire.model.prove.error_bounds import decide, within_bounds
from quire.model.prove.model import ModelToProve
from quire.model.prove.recorded_calls import NUM_ROWS, text_tokens
from quire.model.prove.upcast import upcast_to, with_forward
from quire.model.row_invariant import serving

__all__ = ["first_of_each", "unproved"]

_Given = tuple[tuple[Any, ...], dict[str, Any]]


def first_of_each(modules: list[nn.Module]) -> list[nn.Module]:
    """One module of all that are alike."""
    first: dict[Hashable, nn.Module] = {}
    for module in modules:
        first.setdefault(kind_of(module), module)
    return list(first.values())


def unproved(prepared: ModelToProve, own: Mapping[nn.Module, Callable[..., Any]]) -> nn.Module | None:
    """The first of these modules whose forward computes something else than its own one did; None if all are right.

    own: the forward that each had before. Not asked is a module that the model's forward does not call with rows,
    or whose call cannot be made again alone (it reads what another layer has left): those the probe of the whole
    model has.
    """
    for module, call in _calls(prepared, list(own)).items():
        try:
            if not _computes_the_same(prepared, module, own[module], call):
                return module
        except Exception:  # its call reads more than its arguments, or leaves something behind
            continue
    return None


def _computes_the_same(
    prepared: ModelToProve, module: nn.Module, own: Callable[..., Any], call: _Given
) -> bool:
    args, kwargs = call
    working = prepared.loaded.dtype

    def answer(forward: Callable[..., Any], dtype: torch.dtype) -> torch.Tensor | None:
        wide = nullcontext() if dtype is working else upcast_to(module, dtype)
        with prepared.eager_attention(), serving(), with_forward(module, forward), wide:
            return _first_tensor(module.forward(*_in_type(args, dtype), **_in_type(kwargs, dtype)))

    want = answer(own, torch.float32)
    if want is None or not bool(want.any()):
        return True
    got = answer(module.forward, torch.float32)
    if got is None or decide({True: got}, want, lambda: answer(own, torch.float64)) is None:
        return False
    if any(isinstance(part, PackedExperts) for part in module.modules()):
        return True
    served, mine = answer(module.forward, working), answer(own, working)
    wider = answer(own, torch.float64 if working is torch.float32 else torch.float32)
    if served is None or mine is None or wider is None:
        return False
    rows = [tensor.reshape(-1, tensor.shape[-1]) for tensor in (served, mine, wider)]
    return within_bounds(rows[0], rows[1], rows[2], working)


def _calls(prepared: ModelToProve, modules: list[nn.Module]) -> dict[nn.Module, _Given]:
    """The arguments of one call of each module, in the model's own forward over a text."""
    calls: dict[nn.Module, _Given] = {}

    def take(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(module, (_kept(args), _kept(kwargs)))

    hooks = [module.register_forward_pre_hook(take, with_kwargs=True) for module in modules]
    try:
        tokens = text_tokens(prepared, min(NUM_ROWS, prepared.loaded.max_model_len))
        cache = empty_model_cache(prepared.loaded.model)
        prepared.model_logits(tokens, torch.arange(tokens.numel()), cache, eager=True)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _kept(value: Any) -> Any:
    """Arguments to be used again: tensors copied, a cache as the empty one it was."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, tuple | list):
        return type(value)(_kept(inner) for inner in value)
    if isinstance(value, dict):
        return {name: _kept(inner) for name, inner in value.items()}
    return DynamicCache() if isinstance(value, DynamicCache) else value


def _in_type(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype, copy=True) if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(_in_type(inner, dtype) for inner in value)
    if isinstance(value, dict):
        return {name: _in_type(inner, dtype) for name, inner in value.items()}
    return DynamicCache() if isinstance(value, DynamicCache) else value


def _first_tensor(answer: Any) -> torch.Tensor | None:
    """The first tensor of numbers in what a module gives."""
    if isinstance(answer, torch.Tensor):
        return answer if answer.is_floating_point() and answer.dim() else None
    parts = (
        answer.values() if isinstance(answer, dict) else answer if isinstance(answer, tuple | list) else ()
    )
    return next((found for part in parts if (found := _first_tensor(part)) is not None), None)
