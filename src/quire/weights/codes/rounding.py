"""Rounds weights of 16 or 32 bits to codes: each value to the nearest, each group's scale by least squared error.

Not calibrated: the inputs are unknown, so a checkpoint quantized with data at the same bits is usually better at 4.
Symmetric: a value is scale * (code - 2**(bits - 1)). A scale takes two bytes: float16, or bfloat16 if some scale would
be subnormal. The label names the group (`Rounding.group_of`).

Cost: a pass of some ten operators for each of the scales tried, over the float32 form of one part of the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from quire.errors import ArgumentError
from quire.spec.weight_formats import Rounding
from quire.torch_threads import one_torch_thread
from quire.weights.codes.weight import Factor, QuantizedWeight

__all__ = ["VERSION", "round_to_codes"]

VERSION = 1  # raised when the same weight gets other codes

_SCALE_FACTORS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # of the scale that fits the largest value
# The temporaries of so many values stay in the cache; an ended thread leaves as much of the heap.
_VALUES_AT_ONCE = 1 << 16
_SMALLEST_HALF = 2.0**-14  # float16's smallest normal number


def round_to_codes(weight: torch.Tensor, rounding: Rounding) -> QuantizedWeight:
    """[N, K] of any floating dtype and strides, as codes.

    *raises:* ArgumentError: it has a number that is not finite.
    """
    outputs, inputs = weight.shape
    group, middle = rounding.group_of(inputs), 1 << (rounding.bits - 1)
    codes = torch.empty(outputs, inputs, dtype=torch.uint8)
    scales = torch.empty(outputs, inputs // group, dtype=torch.float32)
    rows_at_once = max(1, _VALUES_AT_ONCE // inputs)
    parts = [slice(first, first + rows_at_once) for first in range(0, outputs, rows_at_once)]

    def grouped(part: slice) -> torch.Tensor:
        return weight[part].float().reshape(-1, inputs // group, group)

    def find_scales(part: slice) -> None:
        scales[part] = _scales(grouped(part), middle)

    _in_threads(find_scales, parts)
    if not bool(scales.isfinite().all()):
        raise ArgumentError("expected a weight of finite numbers, got NaN or infinity")
    used = scales.abs()[scales != 0]
    half = not used.numel() or (float(used.min()) >= _SMALLEST_HALF and float(used.max()) < 65504.0)
    saved_scales = scales.to(torch.float16 if half else torch.bfloat16)

    def round_part(part: slice) -> None:
        nearest = _nearest(grouped(part), saved_scales[part].float(), middle)
        codes[part] = (nearest + middle).to(torch.uint8).view(-1, inputs)

    _in_threads(round_part, parts)
    label = str(Rounding(rounding.bits, None if group == inputs else group))
    return QuantizedWeight(codes, rounding.bits, group, Factor(saved_scales), label, zeros=float(middle))


def _in_threads(work: Callable[[slice], None], parts: list[slice]) -> None:
    """Runs each part on one thread. Torch's own threads would wait for each other after every operator: minutes
    instead of seconds if other programs use the processors."""

    def run_part(part: slice) -> None:
        with torch.inference_mode(), one_torch_thread():
            work(part)

    num_threads = min(len(parts), torch.get_num_threads())
    if num_threads < 2:
        for part in parts:
            run_part(part)
        return
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(run_part, parts))


def _nearest(values: torch.Tensor, scales: torch.Tensor, middle: int) -> torch.Tensor:
    """The integers in [-middle, middle - 1] whose multiples of a scale [.., groups] are nearest."""
    inverse = torch.where(scales == 0, torch.zeros(()), 1.0 / scales)
    return (values * inverse[..., None]).round_().clamp_(-middle, middle - 1)


def _scales(values: torch.Tensor, middle: int) -> torch.Tensor:
    """The scale of each group [.., groups, group] with the least squared error, among those tried."""
    # The largest value gets the code without a counterpart, so the scale has the opposite sign.
    largest = values.gather(-1, values.abs().argmax(-1, keepdim=True)).squeeze(-1)
    best, least_error = torch.zeros_like(largest), torch.full_like(largest, torch.inf)
    for factor in _SCALE_FACTORS if middle < 128 else _SCALE_FACTORS[:1]:
        scales = largest * (-factor / middle)
        codes = _nearest(values, scales, middle)
        squares = codes.square().sum(-1)
        fitted = torch.where(squares > 0, (values * codes).sum(-1) / squares, scales)
        error = (values - fitted[..., None] * codes).square_().sum(-1)
        best, least_error = torch.where(error < least_error, fitted, best), torch.minimum(error, least_error)
    return torch.where(largest.isfinite(), best, torch.nan)
