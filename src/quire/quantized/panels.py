"""A quantized weight as linear layers and embeddings take it: its product, its rows, the whole of it dequantized.

The extension holds it in panels of codes (native/kernels/quantized.hpp); without the extension the twin (`reference`)
computes, a byte for each code. Bits: those of the twin, whoever computes.

Cost: of few rows one read of the panels, 0.5 to 1 byte a value; of many one widening of them for some hundred rows.
"""

from __future__ import annotations

from typing import Any

import torch

from quire.backends import native_module
from quire.errors import ArgumentError
from quire.quantized.reference import multiply
from quire.quantized.weight import Factor, QuantizedWeight
from quire.spec.weight_formats import Rounding

__all__ = ["CodedWeight", "rounded_num_bytes"]

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_SMALLEST_GROUP = 16
_PANEL = 16  # outputs of a panel
_NUMBERS = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.uint8,
    torch.int8,
)  # that panels hold as they are


class CodedWeight:
    """A packed weight [num_outputs, num_inputs] that is read and computed with in `dtype`.

    isa: a variant of the extension's kernels, for tests; None is the one in use. label: the format's name. num_bytes:
    of its codes and what belongs to them. native: the extension's form; None where the twin computes.

    *raises:* ArgumentError: there is no such product, with the format's name.
    """

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype, isa: str | None = None) -> None:
        if dtype not in _DTYPES:
            names = ", ".join(_DTYPES.values())
            raise ArgumentError(f"{weight.label}: expected a model of {names}, got {dtype}")
        inputs, group = weight.num_inputs, weight.group
        if group not in (inputs, _SMALLEST_GROUP) and group % (2 * _SMALLEST_GROUP):
            raise ArgumentError(
                f"{weight.label}: expected a scale for each {_SMALLEST_GROUP} inputs, a multiple of "
                f"{2 * _SMALLEST_GROUP}, or all {inputs}, got {group}"
            )
        self.dtype = dtype
        self.label = weight.label
        self.num_outputs, self.num_inputs = weight.num_outputs, inputs
        self._order = weight.order
        self._weight: QuantizedWeight | None = None
        self.native: Any = _packed(weight, _DTYPES[dtype], isa)
        if self.native is None:
            self._weight = weight

    @property
    def num_bytes(self) -> int:
        if self._weight is None:
            return self.native.num_bytes + (0 if self._order is None else self._order.nbytes)
        tensors = [self._weight.codes, self._weight.zeros, self._weight.table, self._order]
        for factor in (self._weight.scales, self._weight.minimums):
            tensors += [] if factor is None else [factor.fine, factor.coarse]
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))

    @property
    def is_ordered(self) -> bool:
        """Whether inputs are taken as they come, not in an order of the weight's own."""
        return self._order is None

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [..., num_inputs] of `dtype`, bias [num_outputs] or None -> [..., num_outputs]."""
        if self._weight is not None:
            return multiply(x, self._weight, bias)
        x = x.contiguous() if self._order is None else x[..., self._order]
        out = x.new_empty((*x.shape[:-1], self.num_outputs))
        self.native.multiply(x, bias, out)
        return out

    def unpack(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """[num_outputs, num_inputs], dequantized in float32 and rounded once to `dtype`, or to the weight's."""
        return self.gather_rows(torch.arange(self.num_outputs), dtype)

    def gather_rows(self, ids: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Rows of the weight for integer ids [...], as `unpack` has them: [..., num_inputs].

        *raises:* IndexError: an id is out of range.
        """
        dtype = dtype or self.dtype
        ids = ids.to(torch.int64).contiguous()
        if self._weight is not None:
            flat = ids.reshape(-1)
            if flat.numel() and (int(flat.min()) < 0 or int(flat.max()) >= self.num_outputs):
                low, high = int(flat.min()), int(flat.max())
                raise IndexError(f"expected ids in [0, {self.num_outputs}), got {low} to {high}")
            rows = self._weight.pick(flat).dequantize().to(dtype)
            return rows.reshape(*ids.shape, self.num_inputs)
        wide = torch.float32 if dtype is torch.float64 else dtype
        out = torch.empty((*ids.shape, self.num_inputs), dtype=wide)
        self.native.gather_rows_in(ids, out)
        if self._order is not None:
            out = out[..., self._order.argsort()]
        return out.to(dtype)


def rounded_num_bytes(num_outputs: int, num_inputs: int, rounding: Rounding) -> int:
    """`num_bytes` of a weight that is rounded so (`round_to_codes`), without making it."""
    groups = num_inputs // rounding.group_of(num_inputs)
    if native_module() is None:
        return num_outputs * (num_inputs + 2 * groups)
    padded_groups = -(-num_inputs // 32) * 2 if num_inputs // groups == _SMALLEST_GROUP else groups
    scales = -(-padded_groups * _PANEL * 2 // 64) * 64
    return -(-num_outputs // _PANEL) * (scales + -(-num_inputs // 32) * 32 * _PANEL * rounding.bits // 8)


def _packed(weight: QuantizedWeight, dtype: str, isa: str | None) -> Any:
    """The extension's form; None where there is no extension."""
    module: Any = native_module()
    if module is None:
        return None
    zeros = weight.zeros
    by_group = _held(zeros, (torch.uint8, torch.float32)) if isinstance(zeros, torch.Tensor) else None
    return module.PackedWeight.of_codes(
        weight.codes.contiguous(),
        weight.bits,
        weight.group,
        _factor(weight.scales),
        None if weight.minimums is None else _factor(weight.minimums),
        by_group,
        float(zeros) if isinstance(zeros, int | float) else 0.0,
        None if weight.table is None else weight.table.float().contiguous(),
        dtype,
        isa,
    )


def _factor(factor: Factor) -> tuple[torch.Tensor, torch.Tensor | None, bool]:
    fine = _shortened(_held(factor.fine, _NUMBERS))
    coarse = None if factor.coarse is None else _shortened(_held(factor.coarse, _NUMBERS[:3]))
    return fine.view(torch.uint8) if fine.dtype is torch.int8 else fine, coarse, fine.dtype is torch.int8


def _held(values: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
    return (values if values.dtype in dtypes else values.float()).contiguous()


def _shortened(values: torch.Tensor) -> torch.Tensor:
    """In two bytes where that loses nothing."""
    if values.dtype is torch.float32:
        for dtype in (torch.float16, torch.bfloat16):
            if torch.equal((short := values.to(dtype)).float(), values):
                return short
    return values
