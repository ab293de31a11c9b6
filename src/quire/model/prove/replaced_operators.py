"""Proof of forwards whose operators were replaced by row-invariant ones (`quire.model.row_invariant`).

There is one candidate, so F1 tests in float32 whether the module still computes the same; F2 tests in the working type
whether it loses more. Routers are compared by their logits, the first tensor of their output. Modules with experts
below them are left to the proofs of the experts and of the router, since rounding may reroute a row.

Cost: a forward of the model's own over a few dozen tokens, and four calls of one module of all equal ones.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from quire.model.paged_cache import empty_model_cache
from quire.model.prove.model import ModelToProve
from quire.model.prove.recorded_calls import NUM_ROWS, text_tokens
from quire.model.prove.upcast import upcast_to, with_forward
from quire.model.row_invariant import serving
from quire.modules.equal_modules import kind_of
from quire.modules.error_bounds import decide, within_bounds
from quire.weights.experts import PackedExperts

__all__ = ["first_unproved", "one_of_each_kind"]

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def one_of_each_kind(modules: list[nn.Module]) -> list[nn.Module]:
    """The first module of each set of equal ones."""
    first: dict[Hashable, nn.Module] = {}
    for module in modules:
        first.setdefault(kind_of(module), module)
    return list(first.values())


def first_unproved(
    prepared: ModelToProve, originals: Mapping[nn.Module, Callable[..., Any]]
) -> nn.Module | None:
    """The first of these modules whose forward now computes something else; None if all are right.

    originals: forward of each module before. A module is skipped if the model's forward does not call it with rows, or
    if its call cannot be repeated alone (it reads state of another layer): the probe of the whole model covers it.
    """
    for module, call in _calls(prepared, list(originals)).items():
        try:
            if not _computes_the_same(prepared, module, originals[module], call):
                return module
        except Exception:  # its call reads more than its arguments, or has side effects
            continue
    return None


def _computes_the_same(
    prepared: ModelToProve, module: nn.Module, original: Callable[..., Any], call: _Arguments
) -> bool:
    args, kwargs = call
    working = prepared.loaded.dtype

    def answer(forward: Callable[..., Any], dtype: torch.dtype) -> torch.Tensor | None:
        wide = nullcontext() if dtype is working else upcast_to(module, dtype)
        with prepared.eager_attention(), serving(), with_forward(module, forward), wide:
            return _first_tensor(
                module.forward(*_cast_arguments(args, dtype), **_cast_arguments(kwargs, dtype))
            )

    want = answer(original, torch.float32)
    if want is None or not bool(want.any()):
        return True
    got = answer(module.forward, torch.float32)
    if got is None or decide({True: got}, want, lambda: answer(original, torch.float64)) is None:
        return False
    if any(isinstance(part, PackedExperts) for part in module.modules()):
        return True
    served, expected = answer(module.forward, working), answer(original, working)
    wider = answer(original, torch.float64 if working is torch.float32 else torch.float32)
    if served is None or expected is None or wider is None:
        return False
    rows = [tensor.reshape(-1, tensor.shape[-1]) for tensor in (served, expected, wider)]
    return within_bounds(rows[0], rows[1], rows[2], working)


def _calls(prepared: ModelToProve, modules: list[nn.Module]) -> dict[nn.Module, _Arguments]:
    """The arguments of one call of each module, in the model's own forward over a text."""
    calls: dict[nn.Module, _Arguments] = {}

    def record_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(module, (_copy_arguments(args), _copy_arguments(kwargs)))

    hooks = [module.register_forward_pre_hook(record_arguments, with_kwargs=True) for module in modules]
    try:
        tokens = text_tokens(prepared, min(NUM_ROWS, prepared.loaded.max_model_len))
        cache = empty_model_cache(prepared.loaded.model)
        prepared.model_logits(tokens, torch.arange(tokens.numel()), cache, eager=True)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _copy_arguments(value: Any) -> Any:
    """Arguments to be used again: tensors copied, each cache replaced by an empty one."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, tuple | list):
        return type(value)(_copy_arguments(inner) for inner in value)
    if isinstance(value, dict):
        return {name: _copy_arguments(inner) for name, inner in value.items()}
    return DynamicCache() if isinstance(value, DynamicCache) else value


def _cast_arguments(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype, copy=True) if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(_cast_arguments(inner, dtype) for inner in value)
    if isinstance(value, dict):
        return {name: _cast_arguments(inner, dtype) for name, inner in value.items()}
    return DynamicCache() if isinstance(value, DynamicCache) else value


def _first_tensor(answer: Any) -> torch.Tensor | None:
    """The first floating-point tensor in a module's output."""
    if isinstance(answer, torch.Tensor):
        return answer if answer.is_floating_point() and answer.dim() else None
    parts = (
        answer.values() if isinstance(answer, dict) else answer if isinstance(answer, tuple | list) else ()
    )
    return next((tensor for part in parts if (tensor := _first_tensor(part)) is not None), None)
