"""Error bounds: when a replacement counts as equal to the original. The bounds of all proofs are defined here only.

    decide         F1: which candidate computes what the module computes, in float32, its weights upcast
    within_bounds  F2: whether the serving kernel loses no more than the model's own forward does in the working type,
                   both compared with a reference computation in a wider type
    rows_agree     F2 for the logits of a whole model, row by row, since rounding may reroute single rows

Bounds are relative to values measured in the same call: the size of each channel, the rounding of the model's own
forward. A constant bound wide enough for the noise of a type would hide errors: two norms differ by 0.1 % where their
weights are large, a bfloat16 forward of a real model by 2 to 5 % from float32.
Not here: the choice of modules and rows (`quire.model.prove.recorded_calls`, `quire.model.fused.fuse`).

Cost: a few passes over the tensors compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import torch

__all__ = ["NUM_ROWS", "decide", "distance", "row_parts", "rows_agree", "within_bounds"]

# F1: largest distance of the right candidate in float32, by channel, and how many times farther the next one must be.
_MAX_DISTANCE = 1e-5
_MIN_RATIO_TO_NEXT = 100.0
_MAX_LOGITS_DISTANCE = 1e-4  # the same for the logits of a whole model, whose layers sum in another order
# This multiple of float32's own error in a channel is also allowed: sharp attention, sums that cancel.
_NOISE_FACTOR = 4.0
# A channel smaller than this share of the whole is measured by that share: a channel near zero has no size of its own.
_MIN_CHANNEL_SHARE = 1e-3
# F2: largest allowed error, in multiples of the error of the model's own forward.
_MAX_ERROR_RATIO = 1.5
# F2 for a row that rounding may reroute: this multiple of the worst row of the model's own forward, or half of the
# logits. In float32 only two experts of nearly equal score can be swapped.
_MAX_ROW_ERROR_RATIO, _MAX_ROW_DISTANCE, _MAX_ROW_DISTANCE_F32 = 8.0, 0.5, 1e-3

_PART_ROWS = (65, 8, 1)  # rows of the calls that a proof makes: the row counts that kernels distinguish
NUM_ROWS = sum(_PART_ROWS)

_Name = TypeVar("_Name", bound=Hashable)


def distance(got: torch.Tensor, want: torch.Tensor, noise: torch.Tensor | None = None) -> float:
    """Largest |got - want| of a channel beyond `_NOISE_FACTOR` times its noise, relative to the channel's size.

    Args:
        got, want: [..., channels], of one shape; size and difference of a channel are root mean squares.
        noise: [channels], the uncertainty of `want` itself.

    Returns: infinity where a number is missing (NaN) or shapes differ.
    """
    if got.shape != want.shape:
        return float("inf")
    got, want = got.reshape(-1, got.shape[-1]).double(), want.reshape(-1, want.shape[-1]).double()
    size = _rms(want, 0)
    size = size.clamp_min(_MIN_CHANNEL_SHARE * float(_rms(want))).clamp_min(torch.finfo(torch.float64).tiny)
    beyond = _rms(got - want, 0)
    if noise is not None:
        beyond = (beyond - _NOISE_FACTOR * noise.double()).clamp_min(0.0)
    largest = float((beyond / size).max())
    return largest if largest == largest else float("inf")


def decide(
    answers: Mapping[_Name, torch.Tensor],
    want: torch.Tensor | None,
    wider: Callable[[], torch.Tensor | None] | None = None,
) -> _Name | None:
    """The one candidate that computes `want`; None if no candidate does, or if two might.

    Args:
        answers: output of each candidate, float32; candidates with the same bits count as the first of them.
        want: output of the module, float32, its weights upcast; None if the module could not be called.
        wider: computes the same in float64. Called if no candidate is near enough: the distance of `want` from it,
            by channel, is the noise.
    """
    if want is None or not bool(torch.isfinite(want).all()) or not bool(want.any()):
        return None
    different: dict[_Name, torch.Tensor] = {}
    for name, answer in answers.items():
        if not any(torch.equal(answer, other) for other in different.values()):
            different[name] = answer

    def by_distance(noise: torch.Tensor | None) -> list[tuple[float, _Name]]:
        return sorted(
            ((distance(answer, want, noise), name) for name, answer in different.items()), key=lambda e: e[0]
        )

    ranked = by_distance(None)
    if ranked and ranked[0][0] > _MAX_DISTANCE and wider is not None and (exact := wider()) is not None:
        ranked = by_distance(_rms((want.double() - exact.double()).reshape(-1, want.shape[-1]), 0))
    if not ranked or ranked[0][0] > _MAX_DISTANCE:
        return None
    best, name = ranked[0]
    if len(ranked) > 1 and ranked[1][0] < _MIN_RATIO_TO_NEXT * max(best, _MAX_DISTANCE / 10):
        return None
    return name


def within_bounds(
    serving: torch.Tensor,
    original: torch.Tensor,
    wider: torch.Tensor,
    dtype: torch.dtype,
    parts: Sequence[slice] = (slice(None),),
) -> bool:
    """Whether the error of `serving` is at most 1.5 times that of `original`, or one unit in the last place.

    In float32 F1's bound is allowed as well: there F1 compared this same kernel, and sums in another order differ by
    more than 1.5.

    Args:
        serving, original: [rows, channels], outputs of the replacement and of the model's own forward, in `dtype`.
        wider: the same computation in float32, or in float64 if `dtype` is float32.
        parts: groups of rows, each tested alone against the same number of the worst rows of `original`: the error of
            a few rows depends on where their largest channels lie between two representable numbers.
    """
    if serving.shape != wider.shape or original.shape != wider.shape:
        return False
    wide = wider.double()
    errors, original_errors = (
        (serving.double() - wide).square().mean(-1),
        (original.double() - wide).square().mean(-1),
    )
    sizes = wide.square().mean(-1)
    floor = _MAX_DISTANCE if dtype is torch.float32 else torch.finfo(dtype).eps
    for part in parts:
        worst = original_errors.sort(descending=True).values[: len(errors[part])]
        allowed = max(_MAX_ERROR_RATIO**2 * float(worst.mean()), floor**2 * float(sizes[part].mean()))
        if not float(errors[part].mean()) <= allowed:  # NaN included
            return False
    return True


def row_parts(num_rows: int) -> list[slice]:
    """Rows in parts of the sizes that kernels distinguish: the last row, 8 before it, 65 before those, and the rest."""
    stops = [num_rows]
    for count in reversed(_PART_ROWS):
        stops.append(max(0, stops[-1] - count))
    bounds = [0, *reversed(stops)]
    return [slice(start, stop) for start, stop in itertools.pairwise(bounds) if start < stop]


def rows_agree(
    serving: torch.Tensor, original: torch.Tensor, wider: torch.Tensor
) -> tuple[bool, float, float]:
    """`within_bounds` for logits [rows, vocabulary], decided by the median row; no row may be far off.

    The distance of a row is that of its logits minus their mean, relative to their size. The median decides because
    a row that rounding reroutes changes by much, in the model's own forward as often as here.

    Returns: whether they agree, a distance of `serving`, and its bound: of the median row, or of the worst row if the
    median is within its bound.
    """
    # Row by row: a whole vocabulary in float64 is large.
    rows = [_distances(*row) for row in zip(serving, original, wider, strict=True)]
    errors, original_errors = torch.stack(rows).unbind(1)
    errors = errors.nan_to_num(nan=float("inf"))
    floor = _MAX_LOGITS_DISTANCE if original.dtype is torch.float32 else torch.finfo(original.dtype).eps
    middle, allowed = float(errors.median()), max(_MAX_ERROR_RATIO * float(original_errors.median()), floor)
    if not middle <= allowed:
        return False, middle, allowed
    farthest, limit = (
        float(errors.max()),
        max(_MAX_ROW_ERROR_RATIO * float(original_errors.max()), _MAX_ROW_DISTANCE),
    )
    if original.dtype is torch.float32:
        limit = max(_MAX_ROW_ERROR_RATIO * float(original_errors.max()), _MAX_ROW_DISTANCE_F32)
    return farthest <= limit, farthest, limit


def _distances(serving: torch.Tensor, original: torch.Tensor, wider: torch.Tensor) -> torch.Tensor:
    """[2]: relative distances of a row of `serving` and of `original` from `wider`."""
    wide = wider.double()
    size = (wide - wide.mean()).norm().clamp_min(torch.finfo(torch.float64).tiny)
    return torch.stack([(row.double() - wide).norm() / size for row in (serving, original)])


def _rms(x: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    squares = x.double().square()
    return (squares.mean() if dim is None else squares.mean(dim)).sqrt()
