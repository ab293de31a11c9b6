"""A weight as codes: what every reader of a checkpoint gives, and what the quantized linears pack and multiply by.

One value is `scale * (code - zero)`, `scale * code - minimum`, or `scale * table[code]`. Scales, zeros and minimums are
those of a group of inputs of one output. Here a code takes a byte, whatever its bits: this form lives only between the
reader and the packer, one weight at a time. Not a file format, and not what a product is computed from.

Invariants
    Q1  `dequantize()` is the format's own dequantization, in float32, bit for bit: scales are held so that no bit of
        theirs is lost (`Factor`).
    Q2  A weight is checked when it is made; one that exists has shapes that fit each other and codes below 2**bits.

Cost: a byte for each value. `dequantize` makes float32 of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from quire.errors import ArgumentError

__all__ = ["Factor", "QuantizedWeight", "joined"]


@dataclass(frozen=True)
class Factor:
    """One number for each group, maybe as the product of two: `fine` times the `coarse` one of its super-block.

    fine: [N, groups], any dtype (int8 or uint8 where the format has small integers). coarse: [N, groups / m] float16,
    bfloat16 or float32, or None. The product is exact in float32 in each format that is read.
    """

    fine: torch.Tensor
    coarse: torch.Tensor | None = None

    def values(self) -> torch.Tensor:
        """[N, groups] float32."""
        fine = self.fine.float()
        if self.coarse is None:
            return fine
        return fine * self.coarse.float().repeat_interleave(fine.shape[1] // self.coarse.shape[1], dim=1)

    def rows(self, part: slice | torch.Tensor) -> Factor:
        """That of some outputs: of a slice on the same memory, of their numbers [n] a copy."""
        return Factor(self.fine[part], None if self.coarse is None else self.coarse[part])


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight of N outputs and K inputs.

    codes: [N, K] uint8, each below 2**bits. bits: 2 to 8.
    group: inputs that share a scale; divides K; K itself: one scale for each output.
    scales: a Factor of [N, K / group].
    zeros: [N, K / group] uint8 or float32, or one float for all: in units of codes. None: 0, or there is a table.
    minimums: a Factor of [N, K / group] that is taken off; never beside `zeros` or `table`.
    table: [2**bits] float32, what each code stands for, or None: itself.
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
            raise ArgumentError(f"{self.label}: expected one of zeros, minimums and table, got more")
        if self.table is not None and self.table.shape != (1 << self.bits,):
            raise ArgumentError(
                f"table of {self.label}: expected [{1 << self.bits}], got {tuple(self.table.shape)}"
            )
        if self.order is not None and self.order.shape != (inputs,):
            raise ArgumentError(f"order of {self.label}: expected [{inputs}], got {tuple(self.order.shape)}")
        if self.bits < 8 and codes.numel() and int(codes.max()) >> self.bits:
            raise ArgumentError(
                f"codes of {self.label}: expected below {1 << self.bits}, got {int(codes.max())}"
            )

    @property
    def num_outputs(self) -> int:
        return self.codes.shape[0]

    @property
    def num_inputs(self) -> int:
        return self.codes.shape[1]

    def rows(self, start: int, stop: int) -> QuantizedWeight:
        """The weight of outputs [start, stop) alone, on the same memory: of one of several modules stored together."""
        return self._of(slice(start, stop))

    def pick(self, outputs: torch.Tensor) -> QuantizedWeight:
        """The weight of these outputs [n] int64, in this order."""
        return self._of(outputs)

    def _of(self, part: slice | torch.Tensor) -> QuantizedWeight:
        return replace(
            self,
            codes=self.codes[part],
            scales=self.scales.rows(part),
            zeros=self.zeros[part] if isinstance(self.zeros, torch.Tensor) else self.zeros,
            minimums=None if self.minimums is None else self.minimums.rows(part),
        )

    def values(self) -> torch.Tensor:
        """[N, K] float32 in the order of the codes: what is scaled (code - zero, the table's entry, or the code)."""
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


def joined(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """One weight of the outputs of several in turn, which have the same inputs and one format.

    *raises:* ArgumentError: they are coded in different ways.
    """
    first = weights[0]
    if len(weights) == 1:
        return first
    if any(_way(weight) != _way(first) or not _same_tensors(weight, first) for weight in weights[1:]):
        labels = ", ".join(dict.fromkeys(weight.label for weight in weights))
        raise ArgumentError(f"expected weights that are coded in one way to hold them as one, got {labels}")
    zeros = [weight.zeros for weight in weights if isinstance(weight.zeros, torch.Tensor)]
    minimums = [weight.minimums for weight in weights if weight.minimums is not None]
    return replace(
        first,
        codes=torch.cat([weight.codes for weight in weights]),
        scales=_joined([weight.scales for weight in weights]),
        zeros=torch.cat(zeros) if zeros else first.zeros,
        minimums=_joined(minimums) if minimums else None,
    )


def _joined(factors: Sequence[Factor]) -> Factor:
    coarse = [factor.coarse for factor in factors if factor.coarse is not None]
    return Factor(torch.cat([factor.fine for factor in factors]), torch.cat(coarse) if coarse else None)


def _way(weight: QuantizedWeight) -> tuple[object, ...]:
    """What one weight has once for all its outputs, tensors left out, and which parts it has."""
    zeros = weight.zeros.dtype if isinstance(weight.zeros, torch.Tensor) else weight.zeros
    ratios = [
        None
        if factor is None
        else (factor.fine.dtype, 0 if factor.coarse is None else factor.coarse.shape[1])
        for factor in (weight.scales, weight.minimums)
    ]
    return (weight.bits, weight.group, weight.num_inputs, zeros, *ratios)


def _same_tensors(one: QuantizedWeight, other: QuantizedWeight) -> bool:
    def same(mine: torch.Tensor | None, theirs: torch.Tensor | None) -> bool:
        if mine is None or theirs is None:
            return mine is theirs
        # Bits: a table of 8-bit floats has entries that are no numbers.
        return mine.dtype is theirs.dtype and torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))

    return same(one.table, other.table) and same(one.order, other.order)
