"""Parts of fused modules (packed linear layers, calls by rows), and the inspection of modules: the names their forward
uses, and rows to test them on.

Not a parser of models: a module whose forward uses a name that the fused block does not know is not fused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from quire import _native  # pyright: ignore[reportAttributeAccessIssue]
from quire.devices.cpu.packed_weights import NativeWeight
from quire.weights.codes import QuantizedPanels

__all__ = [
    "PackedLayer",
    "RowCall",
    "can_run_together",
    "forward_names",
    "native_weight",
    "packed_layer",
    "packed_layers",
    "random_rows",
]


class RowCall:
    """A native call that makes a row of `width` elements from each row of as many, all of `dtype`."""

    width: int
    dtype: torch.dtype
    _run: Callable[[torch.Tensor, torch.Tensor], None]

    def serves(self, x: Any) -> bool:
        # Contiguity is not tested: a slice of wider rows is contiguous if it has one row, and bits must not depend on
        # that.
        return x.dtype is self.dtype and x.shape[-1] == self.width and not x.requires_grad

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The module's output for x [..., width]."""
        x = x.contiguous()
        out = torch.empty_like(x)
        self._run(x, out)
        return out


class PackedLayer:
    """A packed linear layer for the kernels: the native weight, dense or quantized, its bias, its two widths."""

    def __init__(self, weight: NativeWeight | QuantizedPanels, bias: torch.Tensor | None) -> None:
        self.native: _native.PackedWeight = weight.native
        self.bias = bias
        self.dtype = weight.dtype
        self.num_outputs, self.num_inputs = weight.num_outputs, weight.num_inputs

    @property
    def product(self) -> tuple[_native.PackedWeight, torch.Tensor | None]:
        return self.native, self.bias


def native_weight(module: nn.Module) -> NativeWeight | QuantizedPanels | None:
    """The weight of `module` that the extension has packed, for inputs in their own order; None if it has none."""
    weight = module.__dict__.get("_packed")
    if isinstance(weight, QuantizedPanels):
        return weight if weight.native is not None and weight.is_ordered else None
    return weight if isinstance(weight, NativeWeight) else None


def can_run_together(layers: Sequence[PackedLayer]) -> bool:
    """Whether one native call can multiply the same rows by all of them: dense weights, or codes of one kernel."""
    return all(layer.native.goes_with(layers[0].native) for layer in layers)


def packed_layer(module: nn.Module) -> PackedLayer | None:
    """`module` as a linear layer packed by the extension; None if it is something else."""
    weight = native_weight(module)
    if weight is None or isinstance(module, nn.Embedding):
        return None
    return PackedLayer(weight, module._parameters.get("bias"))


def packed_layers(module: nn.Module) -> dict[str, PackedLayer]:
    """The children of `module` that are packed linear layers, in their order."""
    layers = {name: packed_layer(child) for name, child in module.named_children()}
    return {name: layer for name, layer in layers.items() if layer is not None}


def forward_names(module: nn.Module) -> frozenset[str]:
    """Every attribute and global that the forward of the module's class uses."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return frozenset(code.co_names) if code is not None else frozenset({"?"})


def random_rows(width: int, epsilon: float = 0.0, count: int = 16) -> torch.Tensor:
    """float32 [1, count, width], the same at every call: rows that are not centred and differ in size.

    epsilon: if given, every fourth row has about this variance, where a norm's epsilon matters.
    """
    rows = torch.randn(1, count, width, generator=torch.Generator().manual_seed(width))
    sizes = torch.tensor([0.5, 1.0, 2.0, 3.0]).repeat(-(-count // 4))[:count]
    if epsilon:
        sizes[1::4] = epsilon**0.5
    return (rows + 0.25) * sizes[:, None]
