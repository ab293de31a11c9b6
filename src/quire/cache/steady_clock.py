"""Seconds that only go forward, whatever the clock they are taken from does."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["SteadyClock"]


class SteadyClock:
    """Seconds since it was made. Where the clock behind it goes back, it stands still for that one call and goes on
    from there: nothing that waits for a time waits longer, or ends before, by more than that."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last = clock()
        self._now = 0.0

    def __call__(self) -> float:
        last, self._last = self._last, self._clock()
        self._now += max(0.0, self._last - last)
        return self._now
