"""The yardstick: when one computation stands for another. Written down once, for everything that serves in a place.

Three questions, and the only bounds there are.

    decide       Which of these candidates is it? Asked in float32, of one module with its weights widened (F1).
    within_bounds   Does the kernel that serves lose more than the model's own forward does? Asked in the working type,
                 against the same computation in a wider one (F2).
    rows_agree   The same of a whole model's logits, row by row, where a router may go another way in one row (F2).

Bounds are relative to what is measured in the same call: to the size of each channel, to the rounding of the model's
own forward. No bound is a constant that the noise of a type fits into: two norms differ by 0.1 % where their weights
are large, a bfloat16 forward of a real model by 2 to 5 % from float32.
Not here: which modules are asked, and on what rows (`quire.model.prove.recorded_calls`, `quire.model.fused.fuse`).

Cost: a few passes over the tensors compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import torch

__all__ = ["NUM_ROWS", "decide", "distance", "parts_of", "rows_agree", "within_bounds"]

# F1: how near the right candidate is in float32, channel by channel, and how many times farther the next one has to be.
_CLOSE = 1e-5
_TIMES_FARTHER = 100.0
_CLOSE_LOGITS = 1e-4  # of a whole model in float32, where sums in another order add up over its layers
# What float32 loses by itself in a channel, times this, is allowed as well: sharp attention, sums that cancel.
_OWN_NOISE = 4.0
# A channel smaller than this part of the whole is measured by that part: what is all but zero has no size of its own.
_LEAST_CHANNEL = 1e-3
# F2: how much farther than the model's own forward.
_FACTOR = 1.5
# A row that a router sent another way: so many times the farthest row of the model's own forward, or the logits' half.
# In float32 no router goes another way, but where two experts are as good as equal.
_ROW_FACTOR, _ROW_MOST, _ROW_CLOSE = 8.0, 0.5, 1e-3

_ROW_PARTS = (65, 8, 1)  # the rows of a call, as many as kernels see at once
NUM_ROWS = sum(_ROW_PARTS)

_Name = TypeVar("_Name", bound=Hashable)


def distance(got: torch.Tensor, want: torch.Tensor, noise: torch.Tensor | None = None) -> float:
    """Largest |got - want| of a channel beyond `_OWN_NOISE` times its noise, in parts of the channel's size.

    Args:
        got, want: [..., channels], of one shape; size and difference of a channel are root mean squares.
        noise: [channels], what `want` itself is uncertain by.

    Returns: infinity where a number is missing (NaN) or shapes differ.
    """
    if got.shape != want.shape:
        return float("inf")
    got, want = got.reshape(-1, got.shape[-1]).double(), want.reshape(-1, want.shape[-1]).double()
    size = _rms(want, 0)
    size = size.clamp_min(_LEAST_CHANNEL * float(_rms(want))).clamp_min(torch.finfo(torch.float64).tiny)
    beyond = _rms(got - want, 0)
    if noise is not None:
        beyond = (beyond - _OWN_NOISE * noise.double()).clamp_min(0.0)
    largest = float((beyond / size).max())
    return largest if largest == largest else float("inf")


def decide(
    answers: Mapping[_Name, torch.Tensor],
    want: torch.Tensor | None,
    wider: Callable[[], torch.Tensor | None] | None = None,
) -> _Name | None:
    """The one candidate that computes `want`; None where none does, or where two might.

    Args:
        answers: what each candidate gives, float32; those of the same bits count as one, the first.
        want: what the module gives, float32, of its weights widened; None: it could not be asked.
        wider: gives the same in float64, which is asked where no candidate is near enough: how far `want` is from it,
            channel by channel, is its noise.
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

    found = by_distance(None)
    if found and found[0][0] > _CLOSE and wider is not None and (exact := wider()) is not None:
        found = by_distance(_rms((want.double() - exact.double()).reshape(-1, want.shape[-1]), 0))
    if not found or found[0][0] > _CLOSE:
        return None
    best, name = found[0]
    if len(found) > 1 and found[1][0] < _TIMES_FARTHER * max(best, _CLOSE / 10):
        return None
    return name


def within_bounds(
    serving: torch.Tensor,
    own: torch.Tensor,
    wider: torch.Tensor,
    dtype: torch.dtype,
    parts: Sequence[slice] = (slice(None),),
) -> bool:
    """Whether `serving` is no farther from `wider` than 1.5 times what `own` is, or one unit in the last place.

    In float32 the bound of F1 holds besides: there the kernel that serves is the one that F1 was decided by, and sums
    in another order differ by more than that factor.

    Args:
        serving, own: [rows, channels], what serves and what the model's own forward gives, computed in `dtype`.
        wider: the same computation in float32, or float64 where `dtype` is float32.
        parts: rows that are looked at by themselves, and held against as many rows of `own`, those in which it loses
            most: what a few rows lose depends on where their largest channels happen to lie between two numbers.
    """
    if serving.shape != wider.shape or own.shape != wider.shape:
        return False
    wide = wider.double()
    mine, theirs = (serving.double() - wide).square().mean(-1), (own.double() - wide).square().mean(-1)
    sizes = wide.square().mean(-1)
    least = _CLOSE if dtype is torch.float32 else torch.finfo(dtype).eps
    for part in parts:
        most = theirs.sort(descending=True).values[: len(mine[part])]
        allowed = max(_FACTOR**2 * float(most.mean()), least**2 * float(sizes[part].mean()))
        if not float(mine[part].mean()) <= allowed:  # NaN included
            return False
    return True


def parts_of(num_rows: int) -> list[slice]:
    """Rows in parts as kernels see them: the last one, 8 before it, 65 before them, and what is left."""
    stops = [num_rows]
    for count in reversed(_ROW_PARTS):
        stops.append(max(0, stops[-1] - count))
    bounds = [0, *reversed(stops)]
    return [slice(start, stop) for start, stop in itertools.pairwise(bounds) if start < stop]


def rows_agree(serving: torch.Tensor, own: torch.Tensor, wider: torch.Tensor) -> tuple[bool, float, float]:
    """`within_bounds` of logits [rows, vocabulary], by the row in the middle; and no row astray.

    A row's distance is that of its logits, their mean taken off, in parts of their size. The middle row decides: a
    router that rounding sends another way changes one row by much, and the model's own forward as often.

    Returns: whether they agree, a distance of `serving`, and what it was allowed to be: the middle row's, or the
    farthest row's where the middle one is near enough.
    """
    # A row at a time: a vocabulary in float64 is large.
    rows = [_distances(*row) for row in zip(serving, own, wider, strict=True)]
    mine, theirs = torch.stack(rows).unbind(1)
    mine = mine.nan_to_num(nan=float("inf"))
    least = _CLOSE_LOGITS if own.dtype is torch.float32 else torch.finfo(own.dtype).eps
    middle, allowed = float(mine.median()), max(_FACTOR * float(theirs.median()), least)
    if not middle <= allowed:
        return False, middle, allowed
    farthest, most = float(mine.max()), max(_ROW_FACTOR * float(theirs.max()), _ROW_MOST)
    if own.dtype is torch.float32:
        most = max(_ROW_FACTOR * float(theirs.max()), _ROW_CLOSE)
    return farthest <= most, farthest, most


def _distances(serving: torch.Tensor, own: torch.Tensor, wider: torch.Tensor) -> torch.Tensor:
    """[2]: of a row of `serving` and of `own` from `wider`, in parts of its size."""
    wide = wider.double()
    size = (wide - wide.mean()).norm().clamp_min(torch.finfo(torch.float64).tiny)
    return torch.stack([(row.double() - wide).norm() / size for row in (serving, own)])


def _rms(x: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    squares = x.double().square()
    return (squares.mean() if dim is None else squares.mean(dim)).sqrt()
