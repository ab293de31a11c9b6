"""Quantized experts of a mixture, given as 3-D parameters: one quantized weight for each expert.

`install_quantized_experts` is to a projection of an experts module what `quantized.install_quantized` is to a linear
layer: same parameter name, which reads as the dequantized weights rounded once to the model's dtype; a write to it
makes it dense. `restore_unproved` runs one module of each group of equal modules to compare it with its own forward on
the dequantized weights (`experts.has_equal_outputs`); if they differ, the weights of those modules become dense.

Not here: products (`quire.weights.codes`), the packed forward and its proof (`experts`), files.

Invariants
    X1  an expert is one quantized weight of all outputs of its projection, in the order of the parameter's.
    X2  nothing is changed before the codes of all experts are packed.

Cost: the codes of the experts packed so far, and the caller's memory for one expert.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import partial
from typing import cast

import torch
from torch import nn

from quire.errors import ArgumentError
from quire.memory.heap import give_back_freed
from quire.modules.equal_modules import kind_of
from quire.modules.module_patch import restore_class
from quire.weights.codes import CodeForm, QuantizedPanels, QuantizedWeight
from quire.weights.experts import (
    expert_panels,
    has_equal_outputs,
    projections_of,
    switch_to_packed,
    unpack_experts,
)
from quire.weights.packed_parameter import LazyDenseWeight, PackedParameter

__all__ = ["ExpertForms", "QuantizedExperts", "install_quantized_experts", "restore_unproved"]


class QuantizedExperts(list[QuantizedPanels]):
    """The quantized weight of each expert."""

    @property
    def label(self) -> str:
        """The format's name, or the names of all formats."""
        return ", ".join(dict.fromkeys(weight.label for weight in self))

    @property
    def device(self) -> torch.device:
        """As of `QuantizedPanels`."""
        return self[0].device

    def free(self) -> None:
        """As of `QuantizedPanels`."""
        for weight in self:
            weight.free()

    @property
    def num_bytes(self) -> int:
        return sum(weight.num_bytes for weight in self)

    @property
    def is_saved(self) -> bool:
        """As of `QuantizedPanels`, for all experts."""
        return all(weight.is_saved for weight in self)


class ExpertForms(tuple[CodeForm, ...]):
    """The form of each expert's codes, for a plan."""

    @property
    def label(self) -> str:
        """As of `QuantizedExperts`."""
        return ", ".join(dict.fromkeys(form.label for form in self))

    def num_bytes(self, num_outputs: int, num_inputs: int, backend: str | None = None) -> int:
        """The `QuantizedExperts.num_bytes` of experts of that shape."""
        return sum(form.num_bytes(num_outputs, num_inputs, backend) for form in self)


def install_quantized_experts(
    module: nn.Module, name: str, weights: Iterable[QuantizedWeight | QuantizedPanels], dtype: torch.dtype
) -> None:
    """Have an experts module compute its projection `name` from `weights`, one for each expert, in place.

    Its dense parameter, which may be on "meta", is dropped. dtype: of the module's inputs and outputs, for which a
    weight that is packed already must be packed.

    *raises:* ArgumentError: the module has no such projection, the weights have other shapes, or there is no product of
    their format. Nothing is changed then.
    """
    names = projections_of(module)
    if names is None or name not in names:
        raise ArgumentError(
            f"expected a projection of experts that are one 3-D parameter, got {name} of {type(module).__name__}"
        )
    shape, transposed = module._parameters[name].shape, bool(module.is_transposed)  # pyright: ignore
    num_outputs, num_inputs = (shape[2], shape[1]) if transposed else (shape[1], shape[2])
    packed = QuantizedExperts()
    for weight in weights:
        if (weight.num_outputs, weight.num_inputs) != (num_outputs, num_inputs):
            raise ArgumentError(
                f"{weight.label}: expected experts of {num_outputs} outputs and {num_inputs} inputs, got "
                f"{weight.num_outputs} and {weight.num_inputs} - in {name}"
            )
        packed.append(weight if isinstance(weight, QuantizedPanels) else QuantizedPanels(weight, dtype))
    if len(packed) != shape[0]:
        raise ArgumentError(f"expected {shape[0]} experts, got {len(packed)} - in {name}")
    lazy_weight = LazyDenseWeight(packed=packed, unpack=partial(unpack_experts, packed, transposed))
    module._parameters[name] = packed_parameter(lazy_weight, shape, dtype, packed.device)
    switch_to_packed(module, names)
    give_back_freed()  # the unpacked codes lay between memory that stays


def packed_parameter(
    lazy_weight: LazyDenseWeight, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> nn.Parameter:
    """A Parameter on `device` without memory that stands for `lazy_weight`, and requires no gradient."""
    like = torch.empty((), dtype=dtype, device=device).expand(shape)  # no memory
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
    if not PackedParameter.replace_parameter(parameter, lazy_weight, like):
        raise AssertionError("expected torch to swap a parameter without other references")
    return parameter


def restore_unproved(model: nn.Module) -> list[str]:
    """Makes projections dense again if their module's outputs differ from its own forward; returns their names."""
    proved: dict[Hashable, bool] = {}
    restored: list[str] = []
    for module_name, module in model.named_modules():
        names = projections_of(module)
        quantized = [name for name in names or () if expert_panels(module._parameters[name]) is not None]
        if names is None or not quantized:
            continue
        _join_codes(module, cast(torch.Tensor, module._parameters[quantized[0]]).device)
        kind = kind_of(module, *(_label(module, name) for name in names))
        if kind not in proved:
            proved[kind] = has_equal_outputs(module, names)
        if proved[kind]:
            continue
        restore_class(module)
        for name in quantized:
            parameter = module._parameters[name]
            assert isinstance(parameter, PackedParameter)
            parameter.restore()
            restored.append(f"{module_name}.{name}")
    return restored


def _join_codes(module: nn.Module, device: torch.device) -> None:
    """Move the module's dense tensors to `device`, where its codes are, before it runs there."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device != device:
            tensor.data = tensor.data.to(device)


def _label(module: nn.Module, name: str) -> str | None:
    panels = expert_panels(module._parameters[name])
    return panels.label if isinstance(panels, QuantizedExperts) else None
