"""Equality of modules: the same code over parts of the same shapes, with the same constants.

Apart from its weights, these decide what a module computes. So F1's choice for one module (norm counted from 0 or 1,
gate before up, direction of the rotary embedding) holds for all equal ones. Constants are compared: two norms that
differ in epsilon are not equal.
The number of the layer is not compared: an effect of it (a window, a cap) shows in a constant or in `conditions`.

Cost: a few microseconds for each attribute of each module.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from quire.modules.module_patch import original_class

__all__ = ["kind_of"]

_IGNORED_ATTRIBUTES = frozenset({"layer_idx", "training", "forward"})


def kind_of(module: nn.Module, *conditions: Hashable) -> Hashable:
    """A key that is equal for equal modules. conditions: further values that must be equal."""
    return (_kind(module), *conditions)


def _kind(module: nn.Module) -> Hashable:
    attributes = tuple(
        (name, _constant(value))
        for name, value in sorted(module.__dict__.items())
        if not name.startswith("_") and name not in _IGNORED_ATTRIBUTES
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
    return (original_class(module), module.__dict__.get("forward"), attributes, tensors, children, shape)


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
    return id(value)  # a config or a function of torch: compared by identity
