"""Recent seconds per piece: of a copied byte, a computed token, a tier's round trip.

An exponentially weighted mean of seconds per piece; the latest measurement weighs a fifth. Times, not rates, because
times add up. It reads no clock: equal measurements give equal decisions. Not thread-safe.
"""

from __future__ import annotations

__all__ = ["Throughput"]

_WEIGHT = 0.2


class Throughput:
    """seconds_each: seconds per piece; None before the first measurement."""

    def __init__(self) -> None:
        self.seconds_each: float | None = None

    def add(self, seconds: float, count: int = 1) -> None:
        """Adds a measurement: `count` pieces took `seconds` together. A count of 0 is ignored."""
        if count > 0:
            latest, mean = seconds / count, self.seconds_each
            self.seconds_each = latest if mean is None else (1 - _WEIGHT) * mean + _WEIGHT * latest
