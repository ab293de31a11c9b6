"""`StepCosts`: measured seconds of a step by its rows, without rows of prompts.

Steps of about as many rows (a power of two) are one point: a mean of their rows and one of their seconds. The newest
steps weigh most, and quick ones more than slow ones: other programs on the machine make a step slower, none quicker.
Between points the cost is a line, and behind the last one it goes on with the last line's slope. So a kernel that
costs the same for 2 to 8 rows and twice as much for 9 has that shape here too. More rows never cost less.

A point that no step refreshes keeps its value. The first steps that trust one that is too low correct it: behind `_OLD`
others, a slow step counts as much as a quick one, and more than usual. One that is too high prevents such a step: each
`doubt` lets it count for a little less, until a step measures it again.

Cost: O(points) for each call, at most 20.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["StepCosts"]

_NEWEST = 0.1  # weight of a new step
_SLOWER = 0.2  # of that, if it is slower than the mean
_OLD, _AFTER_OLD = 16, 0.25  # steps since the last one of a point, and the weight of a new one then
_DOUBT = 0.01  # of the cost of more rows


class StepCosts:
    """See the module's text."""

    def __init__(self) -> None:
        self._points: dict[int, tuple[float, float]] = {}  # by the power of two: (rows, seconds), means
        self._last: dict[int, int] = {}  # of each point: the number of its newest step
        self._num_steps = 0
        self._doubted: dict[
            int, float
        ] = {}  # of points doubted since their last step: the seconds that count

    def add(self, num_rows: int, seconds: float) -> None:
        """Records a step."""
        key = _key_of(num_rows)
        rows, mean_s = self._points.get(key, (num_rows, seconds))
        if self._doubted.pop(key, None) is not None:
            mean_s = min(mean_s, seconds)
        self._num_steps += 1
        if self._num_steps - self._last.get(key, self._num_steps) > _OLD:
            weight = _AFTER_OLD
        else:
            weight = _NEWEST * (_SLOWER if seconds > mean_s else 1.0)
        self._last[key] = self._num_steps
        seconds = min(seconds, 2 * mean_s)
        self._points[key] = (rows + _NEWEST * (num_rows - rows), mean_s + weight * (seconds - mean_s))

    @property
    def num_points(self) -> int:
        return len(self._points)

    def doubt(self, num_rows: int) -> None:
        """More rows than `num_rows` were too expensive: their cost counts for a little less, at least for that of
        `num_rows`."""
        lowest = self._points.get(_key_of(num_rows))
        if lowest is None:
            return
        for key, (rows, mean_s) in self._points.items():
            counted_s = self._doubted.get(key, mean_s)
            if rows > lowest[0] and counted_s > lowest[1]:
                self._doubted[key] = counted_s - _DOUBT * (counted_s - lowest[1])

    def seconds(self, num_rows: NDArray[np.int64]) -> NDArray[np.float64] | None:
        """The expected seconds of steps of `num_rows` rows; None before two points are known."""
        if len(self._points) < 2:
            return None
        points = ((rows, self._doubted.get(key, mean_s)) for key, (rows, mean_s) in self._points.items())
        rows, means_s = np.array(sorted(points)).T
        means_s = np.maximum.accumulate(means_s)
        slope = max(0.0, (means_s[-1] - means_s[-2]) / (rows[-1] - rows[-2]))
        return np.interp(num_rows, rows, means_s) + slope * np.maximum(0.0, num_rows - rows[-1])


def _key_of(num_rows: int) -> int:
    return (4 * num_rows // 3).bit_length()  # 1, 2, 3 to 5, 6 to 11, 12 to 23, ...
