"""Weights that a model is made without: stand-ins without memory, whose modules then get the codes of a file.

A loader gives transformers a stand-in for each quantized weight that a module can compute from (`quantized`); the model
once made, `read_into` reads one weight after the other. So nothing of it is ever widened whole.

`held_forms` says the same of a model without memory, for a plan.

Not here: files and formats. Experts given as 3-D parameters, and weights that transformers merges or splits as it
loads, get no stand-in: whoever loads widens them.

Invariant
    U1  after `read_into` no stand-in is left in the model.

Cost: one part of a weight unpacked at a time, a byte for each value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from quire.errors import ArgumentError, LoadError
from quire.model.linear import is_transposed
from quire.model.quantized import hold_coded, require_plain
from quire.quantized import CodedWeight, CodeForm, QuantizedWeight, require_product

__all__ = ["UnreadWeights", "held_forms", "may_hold"]


def may_hold(model: nn.Module, name: str, num_outputs: int, num_inputs: int) -> bool:
    """Whether the parameter `name` of `model` is one that its module can have as codes, of this shape."""
    module_name, _, last = name.rpartition(".")
    try:
        module = model.get_submodule(module_name)
    except AttributeError:
        return False
    if last != "weight" or not (type(module) in (nn.Linear, nn.Embedding) or is_transposed(module)):
        return isinstance(module, nn.Embedding) and module.weight.shape == (num_outputs, num_inputs)
    shape = (num_inputs, num_outputs) if is_transposed(module) else (num_outputs, num_inputs)
    return module.weight.shape == shape


class UnreadWeights:
    """See the module's text."""

    def __init__(self) -> None:
        self._unread: dict[str, tuple[int, Callable[[], Iterable[QuantizedWeight]]]] = {}

    def stand_in(
        self, name: str, shape: torch.Size, dtype: torch.dtype, read: Callable[[], Iterable[QuantizedWeight]]
    ) -> torch.Tensor:
        """For the parameter `name` of the model that is about to be made. read: gives its weight, later, in parts as
        `CodedWeight.of_parts` takes them."""
        self._unread[name] = shape.numel(), read
        return torch.full((), torch.nan, dtype=dtype).expand(shape)

    def read_into(self, model: nn.Module) -> None:
        """Have the modules of `model` compute from the weights; those that cannot get them dense.

        *raises:* LoadError: a stand-in is not where it should be, or its weight cannot be read.
        """
        holders = _holders(model)
        # The largest first: while its codes are unpacked there is the least beside them.
        for name, (_, read) in sorted(self._unread.items(), key=lambda entry: -entry[1][0]):
            try:
                parameter = model.get_parameter(name)
            except AttributeError:
                continue  # the model has no use for it
            modules = holders.pop(id(parameter), None)
            if modules is None:
                continue  # tied to one that has been read
            if not bool(parameter.detach().flatten()[0].isnan()):
                raise LoadError(
                    f"expected to read {name} from its codes, transformers has made another weight of it"
                )
            dtype = parameter.dtype
            num_outputs = parameter.shape[1 if is_transposed(modules[0]) else 0]
            try:
                hold_coded(modules, CodedWeight.of_parts(read(), num_outputs, dtype))
            except ArgumentError:  # no product of this format, or a module that is no plain one
                dense = torch.cat([part.dequantize().to(dtype) for part in read()])
                parameter.data = (dense.t() if is_transposed(modules[0]) else dense).contiguous()
        self._unread.clear()


def held_forms(model: nn.Module, forms: Mapping[str, CodeForm]) -> dict[str, CodeForm]:
    """Of the weights of those forms, by the names of parameters of `model`, which `read_into` would leave as codes.

    Each once. The model may lie on "meta".
    """
    holders = _holders(model)
    found: dict[str, CodeForm] = {}
    for name, form in forms.items():
        try:
            parameter = model.get_parameter(name)
        except AttributeError:
            continue
        modules = holders.pop(id(parameter), [])
        try:
            for module in modules:
                require_plain(module, form.label)
                num_inputs = parameter.shape[0 if is_transposed(module) else 1]
                require_product(form.label, form.group, num_inputs, parameter.dtype)
        except ArgumentError:
            continue  # it will be widened
        if modules:
            found[name] = form
    return found


def _holders(model: nn.Module) -> dict[int, list[nn.Module]]:
    """The modules that have each parameter as their weight, by its id."""
    found: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        if (weight := module._parameters.get("weight")) is not None:
            found.setdefault(id(weight), []).append(module)
    return found
