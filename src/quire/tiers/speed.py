"""How fast a tier has been lately: seconds of a round trip, seconds per byte loaded.

Both are exponentially weighted means, the latest measurement weighing a fifth; of the time per byte rather than of the
bandwidth, as times are what add up. Not thread-safe: its owner holds a lock.
"""

from __future__ import annotations

__all__ = ["Speed"]

_WEIGHT = 0.2


class Speed:
    def __init__(self) -> None:
        self._round_trip: float | None = None
        self._per_byte: float | None = None

    def add_round_trip(self, seconds: float) -> None:
        self._round_trip = _mean(self._round_trip, seconds)

    def add_load(self, num_bytes: int, seconds: float) -> None:
        if num_bytes > 0:
            self._per_byte = _mean(self._per_byte, seconds / num_bytes)

    @property
    def latency_s(self) -> float:
        """Of a round trip; 0 while nothing was measured."""
        return self._round_trip or 0.0

    @property
    def bytes_per_s(self) -> float:
        """Of loads, checks and delivery included; 0 while nothing was measured."""
        return 1 / self._per_byte if self._per_byte else 0.0

    def seconds(self, num_bytes: int) -> float | None:
        """Expected for a load of so many bytes; None while no load was measured."""
        return None if self._per_byte is None else self.latency_s + self._per_byte * num_bytes


def _mean(mean: float | None, latest: float) -> float:
    return latest if mean is None else (1 - _WEIGHT) * mean + _WEIGHT * latest
