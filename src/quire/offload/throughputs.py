"""What copying a byte and computing a token have cost lately, for decisions between the two. Not thread-safe."""

from __future__ import annotations

from quire.tiers.throughput import Throughput

__all__ = ["Throughputs"]

_SECONDS_PER_BYTE = 1 / 4e9  # until a copy was measured
_SECONDS_PER_TOKEN = 1e-3  # until a prompt was computed


class Throughputs:
    """Of one engine."""

    def __init__(self) -> None:
        self._copying, self._computing = Throughput(), Throughput()

    def copied(self, num_bytes: int, seconds: float) -> None:
        self._copying.add(seconds, num_bytes)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step with a prompt in it: what it computed and how long it took."""
        self._computing.add(seconds, num_tokens)

    def copy_s(self, num_bytes: int) -> float:
        """Seconds that copying so many bytes is expected to take."""
        return num_bytes * (_SECONDS_PER_BYTE if (s := self._copying.seconds_each) is None else s)

    def compute_s(self, num_tokens: int) -> float:
        """Seconds that computing so many tokens of a prompt is expected to take."""
        return num_tokens * (_SECONDS_PER_TOKEN if (s := self._computing.seconds_each) is None else s)
