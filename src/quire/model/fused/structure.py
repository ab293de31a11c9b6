"""How modules are looked at: their packed linear layers, the names their forward uses, and how near two answers are.

Not a parser of models: a module whose forward names anything beyond what a fused one understands is left alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import nn

from quire import _native  # pyright: ignore[reportAttributeAccessIssue]
from quire.model.linear import NativeWeight

__all__ = ["PackedLayer", "agrees", "forward_names", "packed_layer", "packed_layers", "random_rows"]

# Largest relative distance |fused - original| / |original| that rounding explains: the original rounds after each
# of its operators, the fused one once at the end of each.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 0.05}


class PackedLayer:
    """A packed linear layer as the kernels take it: the native weight, the address of its bias, its two widths."""

    def __init__(self, weight: NativeWeight, bias: torch.Tensor | None) -> None:
        self.native = weight.native
        self.bias = 0 if bias is None else bias.data_ptr()
        self.dtype = weight.dtype
        self.num_outputs, self.num_inputs = weight.num_outputs, weight.num_inputs
        self._kept = (weight, bias)

    @property
    def product(self) -> tuple[_native.PackedWeight, int]:
        return self.native, self.bias


def packed_layer(module: nn.Module) -> PackedLayer | None:
    """`module` as a linear layer packed by the extension; None if it is none."""
    weight = module.__dict__.get("_packed")
    if not isinstance(weight, NativeWeight) or isinstance(module, nn.Embedding):
        return None
    return PackedLayer(weight, module._parameters.get("bias"))


def packed_layers(module: nn.Module) -> dict[str, PackedLayer]:
    """The children of `module` that are packed linear layers, in their order."""
    layers = {name: packed_layer(child) for name, child in module.named_children()}
    return {name: layer for name, layer in layers.items() if layer is not None}


def forward_names(module: nn.Module) -> frozenset[str]:
    """Every attribute and global that the forward of the module's class names."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return frozenset(code.co_names) if code is not None else frozenset({"?"})


def random_rows(width: int, dtype: torch.dtype) -> torch.Tensor:
    """Five rows [1, 5, width], neither centred nor of one size, the same at every call."""
    rows = torch.randn(1, 5, width, generator=torch.Generator().manual_seed(width))
    return (rows * torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0])[:, None] + 0.25).to(dtype)


def agrees(got: torch.Tensor, want: torch.Tensor, beside: Sequence[torch.Tensor] = ()) -> bool:
    """Whether `got` is `want` but for rounding.

    beside: the sums that both were taken out of, a residual's: computed by the same operators otherwise, they may
    differ by a rounding of what was added and one of the sum, no more.
    """
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    tolerance = _TOLERANCE[want.dtype]
    if beside:
        tolerance = max(tolerance, torch.finfo(beside[0].dtype).eps / 2)
    allowed = tolerance * want.float().norm()
    for tensor in beside:
        allowed = allowed + torch.finfo(tensor.dtype).eps / 2 * tensor.float().norm()
    return bool((got.float() - want.float()).norm() <= allowed)  # False for NaN
