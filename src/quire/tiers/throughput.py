"""How long something has taken lately: a copy by the byte, a prompt by the token, a tier's round trip.

An exponentially weighted mean of seconds per piece, the latest measurement weighing a fifth; of times rather than of
rates, as times are what add up. The clock is who measures: equal measurements, equal decisions. Not thread-safe.
"""

from __future__ import annotations

__all__ = ["Throughput"]

_WEIGHT = 0.2


class Throughput:
    """seconds_each: of one piece; None while nothing was measured."""

    def __init__(self) -> None:
        self.seconds_each: float | None = None

    def add(self, seconds: float, count: int = 1) -> None:
        """So many pieces have taken so long together; of none, nothing is learned."""
        if count > 0:
            latest, mean = seconds / count, self.seconds_each
            self.seconds_each = latest if mean is None else (1 - _WEIGHT) * mean + _WEIGHT * latest
