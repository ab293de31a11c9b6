"""A module of the model computed in a wider type: the same code, its weights upcast one module at a time.

`upcast_to(module, dtype)` makes `module` and everything in it take and give `dtype`. A module with large weights has
them upcast only during its forward, so that one module at a time is in float32, and of its experts only those that
have rows. Small weights are upcast throughout: a module around them may ask for their type before it calls them, as
an adapter's does. `packed_as` tests the kernels in float32: it packs packed linear layers again in that type, until
the end of the block.
Not a copy: the module itself is changed, and restored afterwards.

Invariants
    W1  after the block every module has its former weights and forward.

Cost: the weights of each module read and written once a forward; `packed_as` packs them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from quire.devices import PackedWeight
from quire.devices.cpu.packed_weights import NativeWeight
from quire.modules.module_patch import original_class
from quire.weights.codes import QuantizedPanels
from quire.weights.dense_weights import dense_weight
from quire.weights.experts import DenseExperts, expert_loop, is_experts
from quire.weights.linear import PackedModule
from quire.weights.packed_parameter import LazyDenseWeight, PackedParameter

__all__ = ["packed_as", "upcast_to", "with_forward"]

_SMALL = 1 << 22  # elements of one module: 16 MiB in float32


class _UpcastWeight:
    """A packed weight read in a wider type: a few rows at a time, upcast into the processor's caches."""

    _CHUNK_ELEMENTS = 1 << 18  # elements, 1 MiB in float32

    def __init__(self, packed: PackedWeight, dtype: torch.dtype) -> None:
        self._packed, self.dtype = packed, dtype
        self.num_outputs, self.num_inputs = packed.num_outputs, packed.num_inputs

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = x.new_empty((*x.shape[:-1], self.num_outputs))
        count = max(1, self._CHUNK_ELEMENTS // self.num_inputs)
        gives_rows = isinstance(self._packed, NativeWeight | QuantizedPanels)
        dense = None if gives_rows else self._packed.unpack()
        for start in range(0, self.num_outputs, count):
            rows = slice(start, min(start + count, self.num_outputs))
            weight = (
                self.gather_rows(torch.arange(rows.start, rows.stop))
                if dense is None
                else dense[rows].to(self.dtype)
            )
            out[..., rows] = F.linear(x, weight, None if bias is None else bias[rows])
        return out

    def unpack(self) -> torch.Tensor:
        return _unpack(self._packed, self.dtype)

    def gather_rows(self, ids: torch.Tensor) -> torch.Tensor:
        if isinstance(self._packed, QuantizedPanels):
            return self._packed.gather_rows(ids, self.dtype)
        return self._packed.gather_rows(ids).to(self.dtype)


def _unpack(packed: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """The weight in `dtype`; a quantized one without the rounding to the model's own type."""
    return packed.unpack(dtype) if isinstance(packed, QuantizedPanels) else packed.unpack().to(dtype)


@contextmanager
def upcast_to(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Within it `module` computes in `dtype`, by torch's own operators."""
    with _upcast_modules(module, dtype, lambda packed: _UpcastWeight(packed, dtype)):
        yield


@contextmanager
def packed_as(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Within it `module` computes in `dtype`, its packed linear layers by the extension's kernels."""
    packed_weights: dict[int, NativeWeight] = {}

    def pack(packed: PackedWeight) -> NativeWeight:
        if id(packed) not in packed_weights:
            packed_weights[id(packed)] = NativeWeight(_unpack(packed, dtype))
        return packed_weights[id(packed)]

    with _upcast_modules(module, dtype, pack):
        yield


@contextmanager
def _upcast_modules(
    module: nn.Module, dtype: torch.dtype, convert: Callable[[PackedWeight], PackedWeight]
) -> Iterator[None]:
    undo: list[Callable[[], None]] = []
    try:
        for part in module.modules():
            if isinstance(part, nn.Embedding):
                undo.append(_upcast_embedding(part, dtype))
            elif is_experts(part):
                loop = functools.partial(expert_loop(original_class(part)), part)
                widen_experts = functools.partial(DenseExperts, transposed=bool(part.is_transposed))
                undo.append(_upcast_experts(part, dtype, loop, widen_experts))
            elif isinstance(part, PackedModule) and part._packed is not None:
                wide = convert(part._packed)
                undo.append(_set_entry(part.__dict__, "_packed", wide))
                if isinstance(weight := part._parameters.get("weight"), PackedParameter):
                    stand_in = _upcast_packed(wide, weight, dtype, part._transposed)
                    undo.append(_set_entry(part._parameters, "weight", stand_in))
                if (bias := part._parameters.get("bias")) is not None:
                    wide_bias = nn.Parameter(bias.detach().to(dtype), requires_grad=False)
                    undo.append(_set_entry(part._parameters, "bias", wide_bias))
            elif sum(value.numel() for value in part.parameters(recurse=False)) <= _SMALL:
                undo.extend(_set_entry(*place) for place in _upcast_tensors(part, dtype))
            else:
                undo.append(_upcast_experts(part, dtype))
        yield
    finally:
        while undo:
            undo.pop()()


def _upcast_packed(
    packed: PackedWeight, weight: torch.Tensor, dtype: torch.dtype, transposed: bool
) -> PackedParameter:
    """The Parameter of a packed weight, for code that reads it without its module: upcast when it is read."""

    def unpack() -> torch.Tensor:
        dense = packed.unpack()
        return dense.t().contiguous() if transposed else dense

    return PackedParameter(
        LazyDenseWeight(packed=packed, unpack=unpack),
        torch.empty((), dtype=dtype, device=weight.device).expand(weight.shape),
    )


def _set_entry(owner: Any, name: str, value: Any) -> Callable[[], None]:
    before = owner[name]
    owner[name] = value

    def undo() -> None:
        owner[name] = before

    return undo


@contextmanager
def with_forward(part: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Within it `part` has this forward."""
    undo = _set_forward(part, forward)
    try:
        yield
    finally:
        undo()


def _set_forward(part: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Sets the forward of `part`; returns a function that undoes it."""
    before = part.__dict__.get("forward")
    part.__dict__["forward"] = forward

    def undo() -> None:
        if before is None:
            del part.__dict__["forward"]
        else:
            part.__dict__["forward"] = before

    return undo


def _upcast_embedding(part: nn.Module, dtype: torch.dtype) -> Callable[[], None]:
    """The embedding gives rows of `dtype`: the rows are upcast, not its table."""
    own = part.forward
    return _set_forward(part, lambda *args, **kwargs: own(*args, **kwargs).to(dtype))


def _upcast_experts(
    part: nn.Module,
    dtype: torch.dtype,
    own: Callable[..., Any] | None = None,
    widen_experts: Callable[[torch.Tensor, torch.dtype], Any] | None = None,
) -> Callable[[], None]:
    """`part` has its parameters and buffers in `dtype` during its forward, which `own` may replace."""
    own = part.forward if own is None else own

    def forward(*args: Any, **kwargs: Any) -> Any:
        undo: list[Callable[[], None]] = []
        try:
            undo.extend(_set_entry(*place) for place in _upcast_tensors(part, dtype, widen_experts))
            return own(*args, **kwargs)
        finally:
            while undo:
                undo.pop()()

    return _set_forward(part, forward)


def _upcast_tensors(
    part: nn.Module,
    dtype: torch.dtype,
    widen_experts: Callable[[torch.Tensor, torch.dtype], Any] | None = None,
) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """For each of `part`'s own parameters and buffers: its dictionary, its name, and its value in `dtype`."""
    for name, value in part._parameters.items():
        if value is None or not value.is_floating_point():
            continue
        if widen_experts is not None and value.dim() == 3:
            yield part._parameters, name, widen_experts(value, dtype)
        else:
            yield part._parameters, name, nn.Parameter(dense_weight(value).to(dtype), requires_grad=False)
    for name, value in part._buffers.items():
        # Rotary frequencies are float32 by design, in any type of rows.
        if value is not None and value.is_floating_point() and value.dtype is not torch.float32:
            yield part._buffers, name, value.to(dtype)
