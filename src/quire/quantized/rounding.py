"""Weights of 16 or 32 bits to codes: each value to the nearest, with the scale of least squared error for each group.

Not calibrated: nothing is known of the inputs that will come, so a checkpoint quantized with data at the same bits is
usually better at 4. Symmetric: a value is scale * (code - 2**(bits - 1)). A scale takes two bytes: float16, or bfloat16
where some scale would be subnormal. The label says the group that was taken (`Rounding.group_of`).

Cost: a pass of some ten operators for each of the scales tried, over the float32 form of one part of the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from quire.errors import ArgumentError
from quire.quantized.weight import Factor, QuantizedWeight
from quire.spec.weight_formats import Rounding
from quire.torch_threads import one_torch_thread

__all__ = ["VERSION", "round_to_codes"]

VERSION = 1  # raised when the same weight gets other codes

_SHRUNK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # of the scale that holds the largest value
# Their temporaries stay in the cache, and take so much of the heap that an ended thread leaves.
_VALUES_AT_ONCE = 1 << 16
_SMALLEST_HALF = 2.0**-14  # float16's smallest normal number


def round_to_codes(weight: torch.Tensor, rounding: Rounding) -> QuantizedWeight:
    """[N, K] of any floating dtype and strides, as codes.

    *raises:* ArgumentError: it holds a number that is not finite.
    """
    outputs, inputs = weight.shape
    group, middle = rounding.group_of(inputs), 1 << (rounding.bits - 1)
    codes = torch.empty(outputs, inputs, dtype=torch.uint8)
    scales = torch.empty(outputs, inputs // group, dtype=torch.float32)
    at_once = max(1, _VALUES_AT_ONCE // inputs)
    parts = [slice(first, first + at_once) for first in range(0, outputs, at_once)]

    def grouped(part: slice) -> torch.Tensor:
        return weight[part].float().reshape(-1, inputs // group, group)

    def find_scales(part: slice) -> None:
        scales[part] = _scales(grouped(part), middle)

    _in_threads(find_scales, parts)
    if not bool(scales.isfinite().all()):
        raise ArgumentError("expected a weight of finite numbers, got NaN or infinity")
    used = scales.abs()[scales != 0]
    half = not used.numel() or (float(used.min()) >= _SMALLEST_HALF and float(used.max()) < 65504.0)
    kept = scales.to(torch.float16 if half else torch.bfloat16)

    def round_part(part: slice) -> None:
        nearest = _nearest(grouped(part), kept[part].float(), middle)
        codes[part] = (nearest + middle).to(torch.uint8).view(-1, inputs)

    _in_threads(round_part, parts)
    label = str(Rounding(rounding.bits, None if group == inputs else group))
    return QuantizedWeight(codes, rounding.bits, group, Factor(kept), label, zeros=float(middle))


def _in_threads(work: Callable[[slice], None], parts: list[slice]) -> None:
    """Each part on one thread. Torch's own would wait for each other after every operator: minutes instead of seconds
    where other programs have the processors."""

    def alone(part: slice) -> None:
        with torch.inference_mode(), one_torch_thread():
            work(part)

    num_threads = min(len(parts), torch.get_num_threads())
    if num_threads < 2:
        for part in parts:
            alone(part)
        return
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(alone, parts))


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
