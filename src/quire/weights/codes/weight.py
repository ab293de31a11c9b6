"""A quantized weight: the output of every reader of a checkpoint, and the input of the packer of quantized linears.

A value is `scale * (code - zero)`, `scale * code - minimum`, or `scale * table[code]`. Scales, zeros and minimums
belong to a group of inputs of one output. Here a code takes a byte, whatever its bits: this form exists only between
the reader and the packer, one weight at a time. Not a file format, and no product is computed from it.

Invariants
    Q1  `dequantize()` is the format's own dequantization, in float32, bit for bit: scales lose no bit (`Factor`).
    Q2  The constructor checks: an existing weight has shapes that fit each other and codes below 2**bits.

Cost: a byte for each value. `dequantize` makes float32 of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from quire.errors import ArgumentError

__all__ = ["Factor", "QuantizedWeight", "join_weights"]


@dataclass(frozen=True)
class Factor:
    """One number for each group, or the product of two: `fine` times the `coarse` number of its super-block.

    fine: [N, groups], any dtype (int8 or uint8 if the format has small integers). coarse: [N, groups / m] float16,
    bfloat16 or float32, or None. The product is exact in float32 in each supported format.
    """

    fine: torch.Tensor
    coarse: torch.Tensor | None = None

    def values(self) -> torch.Tensor:
        """[N, groups] float32."""
        fine = self.fine.float()
        if self.coarse is None:
            return fine
        return fine * self.coarse.float().repeat_interleave(fine.shape[1] // self.coarse.shape[1], dim=1)

    def to(self, device: torch.device) -> Factor:
        """The factor with its tensors on `device`."""
        return Factor(self.fine.to(device), None if self.coarse is None else self.coarse.to(device))

    def select_outputs(self, part: slice | torch.Tensor) -> Factor:
        """The factor of some outputs: a view for a slice, a copy for their numbers [n]."""
        return Factor(self.fine[part], None if self.coarse is None else self.coarse[part])


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight of N outputs and K inputs.

    codes: [N, K] uint8, each below 2**bits. bits: 2 to 8.
    group: inputs that share a scale; divides K; K itself: one scale for each output.
    scales: a Factor of [N, K / group].
    zeros: [N, K / group] uint8 or float32, or one float for all: in units of codes. None: 0, or there is a table.
    minimums: a Factor of [N, K / group] that is subtracted; never with `zeros` or `table`.
    table: [2**bits] float32, the value of each code, or None: the code itself.
    order: [K] int64, or None: column j of `codes` multiplies input order[j] (GPTQ's groups by activation order).
    label: the format's own name ("Q4_K", "int4:64"), for messages and tables.
    """

    codes: torch.Tensor
    bits: int
    group: int
    scales: Factor
    label: str
    zeros: torch.Tensor | float | None = None
    minimums: Factor | None = None
    table: torch.Tensor | None = None
    order: torch.Tensor | None = None

    def __post_init__(self) -> None:
        codes, group = self.codes, self.group
        if codes.dtype != torch.uint8 or codes.dim() != 2:
            raise ArgumentError(
                f"codes of {self.label}: expected [N, K] uint8, got {tuple(codes.shape)} {codes.dtype}"
            )
        if not 2 <= self.bits <= 8:
            raise ArgumentError(f"bits of {self.label}: expected 2 to 8, got {self.bits}")
        outputs, inputs = codes.shape
        if group < 1 or inputs % group:
            raise ArgumentError(f"group of {self.label}: expected a divisor of {inputs} inputs, got {group}")
        expected = (outputs, inputs // group)
        for name, factor in (("scales", self.scales), ("minimums", self.minimums)):
            if factor is not None and factor.fine.shape != expected:
                raise ArgumentError(
                    f"{name} of {self.label}: expected {expected}, got {tuple(factor.fine.shape)}"
                )
        if isinstance(self.zeros, torch.Tensor) and self.zeros.shape != expected:
            raise ArgumentError(f"zeros of {self.label}: expected {expected}, got {tuple(self.zeros.shape)}")
        if sum(part is not None for part in (self.zeros, self.minimums, self.table)) > 1:
            raise ArgumentError(f"{self.label}: expected one of zeros, minimums and table, got several")
        if self.table is not None and self.table.shape != (1 << self.bits,):
            raise ArgumentError(
                f"table of {self.label}: expected [{1 << self.bits}], got {tuple(self.table.shape)}"
            )
        if self.order is not None and self.order.shape != (inputs,):
            raise ArgumentError(f"order of {self.label}: expected [{inputs}], got {tuple(self.order.shape)}")
        # On another device they were checked before, in host memory: there it would wait for the device.
        if self.bits < 8 and codes.is_cpu and codes.numel() and int(codes.max()) >> self.bits:
            raise ArgumentError(
                f"codes of {self.label}: expected below {1 << self.bits}, got {int(codes.max())}"
            )

    @property
    def num_outputs(self) -> int:
        return self.codes.shape[0]

    @property
    def num_inputs(self) -> int:
        return self.codes.shape[1]

    def to(self, device: torch.device) -> QuantizedWeight:
        """The weight with its tensors on `device`."""
        zeros, table, order = self.zeros, self.table, self.order
        return replace(
            self,
            codes=self.codes.to(device),
            scales=self.scales.to(device),
            zeros=zeros.to(device) if isinstance(zeros, torch.Tensor) else zeros,
            minimums=None if self.minimums is None else self.minimums.to(device),
            table=None if table is None else table.to(device),
            order=None if order is None else order.to(device),
        )

    def slice_outputs(self, start: int, stop: int) -> QuantizedWeight:
        """The weight of outputs [start, stop), a view: for one of several modules saved together."""
        return self._select(slice(start, stop))

    def select_outputs(self, outputs: torch.Tensor) -> QuantizedWeight:
        """The weight of these outputs [n] int64, in this order."""
        return self._select(outputs)

    def _select(self, part: slice | torch.Tensor) -> QuantizedWeight:
        return replace(
            self,
            codes=self.codes[part],
            scales=self.scales.select_outputs(part),
            zeros=self.zeros[part] if isinstance(self.zeros, torch.Tensor) else self.zeros,
            minimums=None if self.minimums is None else self.minimums.select_outputs(part),
        )

    def values(self) -> torch.Tensor:
        """[N, K] float32 in the order of the codes, before scaling: code - zero, the table's entry, or the code."""
        values = self.codes.float() if self.table is None else self.table.float()[self.codes.int()]
        if isinstance(self.zeros, torch.Tensor):
            grouped = values.view(self.num_outputs, -1, self.group)
            return (grouped - self.zeros.float().unsqueeze(-1)).view_as(values)
        return values if self.zeros is None else values - self.zeros

    def dequantize(self) -> torch.Tensor:
        """[N, K] float32, columns in the order of the inputs."""
        outputs, inputs = self.codes.shape
        values = self.values().view(outputs, -1, self.group)
        values = self.scales.values().unsqueeze(-1) * values
        if self.minimums is not None:
            values = values - self.minimums.values().unsqueeze(-1)
        values = values.reshape(outputs, inputs)
        if self.order is None:
            return values
        unordered = torch.empty_like(values)
        unordered[:, self.order] = values
        return unordered


def join_weights(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """One weight of the concatenated outputs of several, which have the same inputs and one format.

    *raises:* ArgumentError: they are quantized in different ways.
    """
    first = weights[0]
    if len(weights) == 1:
        return first
    if any(
        _coding(weight) != _coding(first) or not _has_same_tensors(weight, first) for weight in weights[1:]
    ):
        labels = ", ".join(dict.fromkeys(weight.label for weight in weights))
        raise ArgumentError(f"expected weights quantized in one way to pack them as one, got {labels}")
    zeros = [weight.zeros for weight in weights if isinstance(weight.zeros, torch.Tensor)]
    minimums = [weight.minimums for weight in weights if weight.minimums is not None]
    return replace(
        first,
        codes=torch.cat([weight.codes for weight in weights]),
        scales=_join_factors([weight.scales for weight in weights]),
        zeros=torch.cat(zeros) if zeros else first.zeros,
        minimums=_join_factors(minimums) if minimums else None,
    )


def _join_factors(factors: Sequence[Factor]) -> Factor:
    coarse = [factor.coarse for factor in factors if factor.coarse is not None]
    return Factor(torch.cat([factor.fine for factor in factors]), torch.cat(coarse) if coarse else None)


def _coding(weight: QuantizedWeight) -> tuple[object, ...]:
    """The properties, without tensors, that all outputs of a weight share, and the parts that it has."""
    zeros = weight.zeros.dtype if isinstance(weight.zeros, torch.Tensor) else weight.zeros
    ratios = [
        None
        if factor is None
        else (factor.fine.dtype, 0 if factor.coarse is None else factor.coarse.shape[1])
        for factor in (weight.scales, weight.minimums)
    ]
    return (weight.bits, weight.group, weight.num_inputs, zeros, *ratios)


def _has_same_tensors(first: QuantizedWeight, other: QuantizedWeight) -> bool:
    def is_same(tensor: torch.Tensor | None, reference: torch.Tensor | None) -> bool:
        if tensor is None or reference is None:
            return tensor is reference
        # Bit for bit: a table of 8-bit floats has NaN entries.
        return tensor.dtype is reference.dtype and torch.equal(
            tensor.view(torch.uint8), reference.view(torch.uint8)
        )

    return is_same(first.table, other.table) and is_same(first.order, other.order)
