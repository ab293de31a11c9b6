"""Weights of 16 or 32 bits to codes: each value to the nearest, with the scale of least squared error for each group.

Not calibrated: nothing is known of the inputs that will come, so a checkpoint quantized with data at the same bits is
usually better at 4. Symmetric: a value is scale * (code - 2**(bits - 1)).

    int8       one scale for each output
    int8:64    groups of 64 inputs
    int4       groups of 128 inputs; int4:32 and so on others

A group that does not divide a weight's inputs becomes the largest of 128, 64, 32 and 16 below it that does; the label
says which. A scale takes two bytes: float16, or bfloat16 where some scale would be subnormal.

Cost: a pass of some ten operators for each of the scales tried, over the float32 form of one part of the weight.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from quire.errors import ArgumentError
from quire.quantized.weight import Factor, QuantizedWeight

__all__ = ["Rounding", "parse_rounding", "round_to_codes"]

_GROUPS = (128, 64, 32, 16)
_SHRUNK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # of the scale that holds the largest value
_VALUES_AT_ONCE = 1 << 22
_SMALLEST_HALF = 2.0**-14  # float16's smallest normal number


@dataclass(frozen=True)
class Rounding:
    """How to round: to `bits` (4 or 8), with a scale for each `group` inputs; None: for all inputs of an output."""

    bits: int
    group: int | None

    def group_of(self, num_inputs: int) -> int:
        """The group for a weight of so many inputs."""
        if self.group is None:
            return num_inputs
        return next(
            (g for g in (self.group, *_GROUPS) if g <= self.group and num_inputs % g == 0), num_inputs
        )


def parse_rounding(text: str) -> Rounding:
    """ "int8", "int4", or either with ":group".

    *raises:* ArgumentError: it is something else.
    """
    found = re.fullmatch(r"int(4|8)(?::(\d+))?", text)
    if found is None or (found[2] is not None and int(found[2]) not in _GROUPS):
        groups = ", ".join(str(group) for group in sorted(_GROUPS))
        raise ArgumentError(
            f"expected weights of int8, int4, or either with a group of {groups} (int4:64), got {text!r}"
        )
    bits = int(found[1])
    if found[2] is not None:
        return Rounding(bits, int(found[2]))
    return Rounding(bits, 128 if bits == 4 else None)


def round_to_codes(weight: torch.Tensor, rounding: Rounding) -> QuantizedWeight:
    """[N, K] of any floating dtype and strides, as codes.

    *raises:* ArgumentError: it holds a number that is not finite.
    """
    outputs, inputs = weight.shape
    group, middle = rounding.group_of(inputs), 1 << (rounding.bits - 1)
    codes = torch.empty(outputs, inputs, dtype=torch.uint8)
    scales = torch.empty(outputs, inputs // group, dtype=torch.float32)
    parts = range(0, outputs, at_once := max(1, _VALUES_AT_ONCE // inputs))
    for first in parts:
        part = slice(first, first + at_once)
        scales[part] = _scales(weight[part].float().reshape(-1, inputs // group, group), middle)
    if not bool(scales.isfinite().all()):
        raise ArgumentError("expected a weight of finite numbers, got NaN or infinity")
    used = scales.abs()[scales != 0]
    half = not used.numel() or (float(used.min()) >= _SMALLEST_HALF and float(used.max()) < 65504.0)
    kept = scales.to(torch.float16 if half else torch.bfloat16)
    for first in parts:
        part = slice(first, first + at_once)
        values = weight[part].float().reshape(-1, inputs // group, group)
        codes[part] = (_nearest(values, kept[part].float(), middle) + middle).to(torch.uint8).view(-1, inputs)
    text = f"int{rounding.bits}" if group == inputs else f"int{rounding.bits}:{group}"
    return QuantizedWeight(codes, rounding.bits, group, Factor(kept), text, zeros=float(middle))


def _nearest(values: torch.Tensor, scales: torch.Tensor, middle: int) -> torch.Tensor:
    """The whole numbers of [-middle, middle - 1] whose multiples of a scale [.., groups] are nearest."""
    inverse = torch.where(scales == 0, torch.zeros(()), 1.0 / scales)
    return (values * inverse[..., None]).round_().clamp_(-middle, middle - 1)


def _scales(values: torch.Tensor, middle: int) -> torch.Tensor:
    """The scale of each group [.., groups, group] that leaves the least squared error, of those tried."""
    # The largest value takes the code that has no partner, so the scale has its sign turned.
    largest = values.gather(-1, values.abs().argmax(-1, keepdim=True)).squeeze(-1)
    best, least = torch.zeros_like(largest), torch.full_like(largest, torch.inf)
    for shrunk in _SHRUNK if middle < 128 else _SHRUNK[:1]:
        scales = largest * (-shrunk / middle)
        whole = _nearest(values, scales, middle)
        squares = whole.square().sum(-1)
        fitted = torch.where(squares > 0, (values * whole).sum(-1) / squares, scales)
        error = (values - fitted[..., None] * whole).square_().sum(-1)
        best, least = torch.where(error < least, fitted, best), torch.minimum(error, least)
    return torch.where(largest.isfinite(), best, torch.nan)
