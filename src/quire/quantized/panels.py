"""A quantized weight as linear layers and embeddings take it: its product, its rows, the whole of it dequantized.

Computed by the twin (`reference`), a byte for each code. Bits: those of the twin, whoever computes.

Cost: that of the twin.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from quire.errors import ArgumentError
from quire.quantized.reference import multiply
from quire.quantized.weight import Factor, QuantizedWeight

__all__ = ["CodedWeight"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BLOCK = 16  # the smallest group there are panels for


class CodedWeight:
    """A packed weight [num_outputs, num_inputs] that is read and computed with in `dtype`.

    label: the format's name. num_bytes: of its codes and what belongs to them.

    *raises:* ArgumentError: there is no such product, with the format's name.
    """

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        if dtype not in _DTYPES:
            names = ", ".join(str(each).removeprefix("torch.") for each in _DTYPES)
            raise ArgumentError(f"{weight.label}: expected a model of {names}, got {dtype}")
        inputs, group = weight.num_inputs, weight.group
        if group != inputs and group != _BLOCK and group % (2 * _BLOCK):
            raise ArgumentError(
                f"{weight.label}: expected a scale for each {_BLOCK} inputs, a multiple of {2 * _BLOCK}, or all "
                f"{inputs}, got {group}"
            )
        self.dtype = dtype
        self.label = weight.label
        self.num_outputs, self.num_inputs = weight.num_outputs, inputs
        self._weight = weight

    @property
    def num_bytes(self) -> int:
        tensors = [self._weight.codes, self._weight.zeros, self._weight.table, self._weight.order]
        for factor in (self._weight.scales, self._weight.minimums):
            tensors += [] if factor is None else [factor.fine, factor.coarse]
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [..., num_inputs] of `dtype`, bias [num_outputs] or None -> [..., num_outputs]."""
        return multiply(x, self._weight, bias)

    def unpack(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """[num_outputs, num_inputs], dequantized in float32 and rounded once to `dtype`, or to the weight's."""
        return self._weight.dequantize().to(dtype or self.dtype)

    def gather_rows(self, ids: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Rows of the weight for integer ids [...], as `unpack` has them: [..., num_inputs].

        *raises:* IndexError: an id is out of range.
        """
        flat = ids.reshape(-1).long()
        if flat.numel() and (int(flat.min()) < 0 or int(flat.max()) >= self.num_outputs):
            raise IndexError(
                f"expected ids in [0, {self.num_outputs}), got {int(flat.min())} to {int(flat.max())}"
            )
        rows = _picked(self._weight, flat).dequantize().to(dtype or self.dtype)
        return rows.reshape(*ids.shape, self.num_inputs)


def _picked(weight: QuantizedWeight, ids: torch.Tensor) -> QuantizedWeight:
    """The weight of the outputs `ids` alone."""

    def of(factor: Factor) -> Factor:
        return Factor(factor.fine[ids], None if factor.coarse is None else factor.coarse[ids])

    return replace(
        weight,
        codes=weight.codes[ids],
        scales=of(weight.scales),
        zeros=weight.zeros[ids] if isinstance(weight.zeros, torch.Tensor) else weight.zeros,
        minimums=None if weight.minimums is None else of(weight.minimums),
    )
