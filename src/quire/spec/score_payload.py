"""The layout of scores in a payload: one float32 a token, little endian, finite; 0 for a text's first token.

Used by tiers and snapshots, see `payload.PayloadLayout`, the layout of keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["BYTES_PER_SCORE", "ScorePayloadLayout"]

BYTES_PER_SCORE = 4


@dataclass(frozen=True)
class ScorePayloadLayout:
    """The layout of every model's scores. shapes: what a value's header says instead of layers."""

    shapes: list[Any] = field(default_factory=lambda: ["scores", 1])
    dtype: str = "float32"

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes of the scores of these tokens."""
        return BYTES_PER_SCORE * num_tokens
