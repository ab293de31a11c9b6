"""Which modules are alike: the same code over parts of the same shapes, with the same constants.

What a module computes, apart from its weights, follows from these, so the choice that F1 makes for one of them (norm
counted from 0 or 1, gate before up, how the rotary embedding turns) holds for all that are alike. Its constants are
part of what is compared: two norms that differ in epsilon are not alike.
Not the number of its layer: what depends on that (a window, a cap) shows in a constant or in `beside`.

Cost: a few microseconds for each attribute of each module.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from quire.model.module_patch import original_class

__all__ = ["kind_of"]

_NOT_COUNTED = frozenset({"layer_idx", "training", "forward"})


def kind_of(module: nn.Module, *beside: Hashable) -> Hashable:
    """Equal for modules that are alike. beside: what else has to be equal."""
    return (_kind(module), *beside)


def _kind(module: nn.Module) -> Hashable:
    own = tuple(
        (name, _constant(value))
        for name, value in sorted(module.__dict__.items())
        if not name.startswith("_") and name not in _NOT_COUNTED
    )
    tensors = tuple(
        (name, None if value is None else (tuple(value.shape), value.dtype))
        for name, value in (*module._parameters.items(), *module._buffers.items())
    )
    children = tuple(
        (name, None if child is None else _kind(child)) for name, child in module._modules.items()
    )
    packed: Any = module.__dict__.get("_packed")
    shape = (packed.num_outputs, packed.num_inputs, packed.dtype) if hasattr(packed, "num_outputs") else None
    return (original_class(module), module.__dict__.get("forward"), own, tensors, children, shape)


def _constant(value: Any) -> Hashable:
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | type):
        return value
    if isinstance(value, list | tuple | set | frozenset):
        return (type(value), *map(_constant, value))
    if isinstance(value, dict):
        return tuple((str(key), _constant(inner)) for key, inner in value.items())
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.dtype)
    if isinstance(value, functools.partial):
        return (_constant(value.func), _constant(value.args), _constant(value.keywords))
    if isinstance(value, types.MethodType):
        return (_constant(value.__func__), type(value.__self__))
    if isinstance(value, types.FunctionType) and not value.__closure__ and not value.__defaults__:
        return value.__code__
    return id(value)  # a config, a function of torch's: the very same one
