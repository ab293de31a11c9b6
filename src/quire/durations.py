"""`Durations`: statistics of lengths of time: their number, mean and maximum, and the number below each of some bounds.

Cost: under 1 us for each, or for many of one length.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

__all__ = ["Durations"]


class Durations:
    """bounds: in seconds, ascending."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.count = 0
        self.sum_s = 0.0
        self.max_s = 0.0
        self._bounds = tuple(bounds)
        self._between = [0] * (len(bounds) + 1)  # the last count: above all bounds

    def add(self, seconds: float, count: int = 1) -> None:
        """Add `count` durations of this length."""
        self.count += count
        self.sum_s += seconds * count
        self.max_s = max(self.max_s, seconds)
        self._between[bisect_right(self._bounds, seconds)] += count

    def counts_below(self) -> dict[float, int]:
        """The number below each bound, cumulative."""
        return dict(zip(self._bounds, accumulate(self._between[:-1]), strict=True))

    @property
    def mean_s(self) -> float:
        return self.sum_s / self.count if self.count else 0.0
