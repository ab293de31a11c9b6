"""What copying a byte and computing a token have cost lately, for decisions between the two.

Exponentially weighted means of seconds per byte and per token, the latest measurement weighing a fifth. The clock is
who measures: equal measurements, equal decisions. Not thread-safe.
"""

from __future__ import annotations

__all__ = ["Speeds"]

_WEIGHT = 0.2
_SECONDS_PER_BYTE = 1 / 4e9  # until a copy was measured
_SECONDS_PER_TOKEN = 1e-3  # until a prompt was computed


class Speeds:
    def __init__(self) -> None:
        self._per_byte: float | None = None
        self._per_token: float | None = None

    def copied(self, num_bytes: int, seconds: float) -> None:
        if num_bytes:
            self._per_byte = _mean(self._per_byte, seconds / num_bytes)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step with a prompt in it: what it computed and how long it took."""
        if num_tokens:
            self._per_token = _mean(self._per_token, seconds / num_tokens)

    def copy_s(self, num_bytes: int) -> float:
        """Seconds that copying so many bytes is expected to take."""
        return num_bytes * (_SECONDS_PER_BYTE if self._per_byte is None else self._per_byte)

    def compute_s(self, num_tokens: int) -> float:
        """Seconds that computing so many tokens of a prompt is expected to take."""
        return num_tokens * (_SECONDS_PER_TOKEN if self._per_token is None else self._per_token)


def _mean(mean: float | None, latest: float) -> float:
    return latest if mean is None else (1 - _WEIGHT) * mean + _WEIGHT * latest
