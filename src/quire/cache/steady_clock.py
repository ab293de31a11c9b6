"""Seconds that never go back, even if the underlying clock does."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["SteadyClock"]


class SteadyClock:
    """Seconds since it was made. If the underlying clock goes back, this one stands still for that call and goes on
    from there: a deadline shifts by at most that jump."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last = clock()
        self._now = 0.0

    def __call__(self) -> float:
        last, self._last = self._last, self._clock()
        self._now += max(0.0, self._last - last)
        return self._now
