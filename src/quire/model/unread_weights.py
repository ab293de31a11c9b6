"""Weights that a model is made without: stand-ins without memory, whose modules then get the codes of a file.

A loader gives transformers a stand-in for each quantized weight that a module can compute from (`quantized`); the model
once made, `read_into` reads one weight after the other. So nothing of it is ever widened whole.

Not here: files and formats. Experts given as 3-D parameters, and weights that transformers merges or splits as it
loads, get no stand-in: whoever loads widens them.

Invariant
    U1  after `read_into` no stand-in is left in the model.

Cost: one weight unpacked at a time, a byte for each value.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from quire.errors import ArgumentError, LoadError
from quire.model.linear import is_transposed
from quire.model.quantized import hold_quantized
from quire.quantized import QuantizedWeight

__all__ = ["UnreadWeights", "may_hold"]


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
        self._unread: dict[str, tuple[int, Callable[[], QuantizedWeight]]] = {}

    def stand_in(
        self, name: str, shape: torch.Size, dtype: torch.dtype, read: Callable[[], QuantizedWeight]
    ) -> torch.Tensor:
        """For the parameter `name` of the model that is about to be made. read: gives its weight, later."""
        self._unread[name] = shape.numel(), read
        return torch.full((), torch.nan, dtype=dtype).expand(shape)

    def read_into(self, model: nn.Module) -> None:
        """Have the modules of `model` compute from the weights; those that cannot get them dense.

        *raises:* LoadError: a stand-in is not where it should be, or its weight cannot be read.
        """
        holders: dict[int, list[nn.Module]] = {}
        for module in model.modules():
            if (weight := module._parameters.get("weight")) is not None:
                holders.setdefault(id(weight), []).append(module)
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
            weight, dtype = read(), parameter.dtype
            try:
                hold_quantized(modules, weight, dtype)
            except ArgumentError:  # no product of this format, or a module that is no plain one
                dense = weight.dequantize()
                parameter.data = (dense.t() if is_transposed(modules[0]) else dense).to(dtype).contiguous()
            del weight
        self._unread.clear()
