"""`StepCosts`: measured seconds of a step by its rows, without rows of prompts.

Steps of about as many rows (a power of two) are one point: a mean of their rows and one of their seconds. The newest
steps weigh most, and quick ones more than slow ones: other programs on the machine make a step slower, none quicker.
Between points the cost is a line, and behind the last one it goes on with the last line's slope. So a kernel that
costs the same for 2 to 8 rows and twice as much for 9 has that shape here too. A point that no step refreshes keeps its
value: a wrong one is corrected by the first step that trusts it.

Cost: O(points) for each call, at most 20.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["StepCosts"]

_NEWEST = 0.1  # weight of a new step
_SLOWER = 0.2  # of that, if it is slower than the mean


class StepCosts:
    """See the module's text."""

    def __init__(self) -> None:
        self._points: dict[int, tuple[float, float]] = {}  # by the power of two: (rows, seconds), means

    def add(self, num_rows: int, seconds: float) -> None:
        """Records a step."""
        key = (4 * num_rows // 3).bit_length()  # 1, 2, 3 to 5, 6 to 11, 12 to 23, ...
        rows, mean_s = self._points.get(key, (num_rows, seconds))
        weight = _NEWEST * (_SLOWER if seconds > mean_s else 1.0)
        seconds = min(seconds, 2 * mean_s)
        self._points[key] = (rows + _NEWEST * (num_rows - rows), mean_s + weight * (seconds - mean_s))

    @property
    def num_points(self) -> int:
        return len(self._points)

    def seconds(self, num_rows: NDArray[np.int64]) -> NDArray[np.float64] | None:
        """The expected seconds of steps of `num_rows` rows; None before two points are known."""
        if len(self._points) < 2:
            return None
        rows, means_s = np.array(sorted(self._points.values())).T
        slope = max(0.0, (means_s[-1] - means_s[-2]) / (rows[-1] - rows[-2]))
        return np.interp(num_rows, rows, means_s) + slope * np.maximum(0.0, num_rows - rows[-1])
