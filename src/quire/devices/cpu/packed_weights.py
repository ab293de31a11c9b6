"""The weight of a linear layer, packed once for this processor: `PackedWeight` by the extension and by oneDNN.

Cost of `multiply`: that of the product plus about 3 us. Packing reads and writes the weight once.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch

from quire.backends import native_module
from quire.errors import BackendError

__all__ = ["DTYPE_NAMES", "NativeWeight", "OneDnnWeight", "onednn_serves"]

# The dtypes of the kernels, by the kernels' names.
DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class NativeWeight:
    """Packed by the extension, as `native`. `isa` names a variant of its kernels; None: the one in use."""

    def __init__(self, weight: torch.Tensor, isa: str | None = None) -> None:
        self.dtype = weight.dtype
        self.num_outputs, self.num_inputs = weight.shape
        module = native_module()
        if module is None:
            raise BackendError('expected quire._native for packing "native", got none: it is not built here')
        self.native = module.PackedWeight(weight, isa)
        self._multiply = self.native.multiply

    @classmethod
    def from_packed(cls, weight: torch.Tensor, packed: Any) -> NativeWeight:
        """A weight from packed bytes that the variant in use has written; only shape and dtype of `weight` are read.

        packed: uint8, at a multiple of 64; the object references it.
        """
        self = cls.__new__(cls)
        self.dtype = weight.dtype
        self.num_outputs, self.num_inputs = weight.shape
        self.move(packed)
        return self

    @property
    def metadata(self) -> list[str]:
        """Empty: shape and dtype suffice to read the packed bytes (`saved_weights`)."""
        return []

    def move(self, packed: Any) -> None:
        """Read these packed bytes from now on. To be called before any caller has taken `native`."""
        module = cast(Any, native_module())
        self.native = module.PackedWeight.at(
            packed, self.num_outputs, self.num_inputs, DTYPE_NAMES[self.dtype], None
        )
        self._multiply = self.native.multiply

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if not x.is_contiguous():
            x = x.contiguous()
        out = x.new_empty((*x.shape[:-1], self.num_outputs))
        self._multiply(x, bias, out)
        return out

    def unpack(self) -> torch.Tensor:
        out = torch.empty(self.num_outputs, self.num_inputs, dtype=self.dtype)
        self.native.unpack(out)
        return out

    def gather_rows(self, ids: torch.Tensor) -> torch.Tensor:
        ids = ids.to(torch.int64).contiguous()
        out = torch.empty((*ids.shape, self.num_inputs), dtype=self.dtype)
        self.native.gather_rows(ids, out)
        return out


class OneDnnWeight:
    """Packed by oneDNN through private operators of torch."""

    _BATCH_HINT = 32

    def __init__(self, weight: torch.Tensor) -> None:
        self.dtype = weight.dtype
        self.num_outputs, self.num_inputs = weight.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), self._BATCH_HINT)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")

    def unpack(self) -> torch.Tensor:
        return self._packed.to_dense()

    def gather_rows(self, ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("oneDNN's packed form gives no rows; a tied weight stays dense")


@functools.cache
def onednn_serves(dtype: torch.dtype) -> bool:
    """Whether the private operators exist, run `dtype` here, and give the weight back."""
    weight = torch.linspace(-1.0, 1.0, 24 * 16).reshape(24, 16).to(dtype)
    x = torch.linspace(1.0, -1.0, 3 * 16).reshape(3, 16).to(dtype)
    try:
        packed = OneDnnWeight(weight)
        close = torch.allclose(packed.multiply(x, None).float(), x.float() @ weight.float().T, atol=0.1)
        return close and torch.equal(packed.unpack(), weight)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
