"""Measured seconds per copied byte and per computed token, to decide between the two. Not thread-safe."""

from __future__ import annotations

from quire.tiers.throughput import Throughput

__all__ = ["Throughputs"]

_SECONDS_PER_BYTE = 1 / 4e9  # before the first copy
_SECONDS_PER_TOKEN = 1e-3  # before the first prompt
_LEAST_TOKENS = (
    16  # of a step that tells the seconds of a token; those of fewer cost about as much as one token
)


class Throughputs:
    """The measurements of one engine."""

    def __init__(self) -> None:
        self._copying, self._computing = Throughput(), Throughput()
        self.computed_s = 0.0
        """Seconds of all steps that computed tokens of a prompt."""

    def add_copy(self, num_bytes: int, seconds: float) -> None:
        self._copying.add(seconds, num_bytes)

    def add_computation(self, num_tokens: int, seconds: float) -> None:
        """Adds a step that computed tokens of a prompt."""
        if num_tokens >= _LEAST_TOKENS:
            self._computing.add(seconds, num_tokens)
        self.computed_s += seconds

    def copy_s(self, num_bytes: int) -> float:
        """Expected seconds to copy `num_bytes`."""
        return num_bytes * (_SECONDS_PER_BYTE if (s := self._copying.seconds_each) is None else s)

    def compute_s(self, num_tokens: int) -> float:
        """Expected seconds to compute `num_tokens` of a prompt."""
        return num_tokens * (_SECONDS_PER_TOKEN if (s := self._computing.seconds_each) is None else s)
