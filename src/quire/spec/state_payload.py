"""Where the bytes of a state lie in a payload: the form in which the state of a sequence leaves its slot.

    for each state layer, in the order of layers
        for each of its fields, in the spec's order
            the field, float32, little endian

A payload is of one size, however many tokens the state is of. It stands beside `payload.PayloadLayout`, which is that
of keys and values, and goes the same ways: swapped out sequences, tiers, snapshots' segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.spec.kv_spec import KVSpec

__all__ = ["StatePayloadLayout"]


@dataclass(frozen=True)
class StatePayloadLayout:
    """What the states of one model have in common. shapes: (layer, field, its shape), what tells models apart."""

    shapes: list[Any]
    bytes_per_state: int
    dtype: str = "float32"

    @classmethod
    def of(cls, spec: KVSpec) -> StatePayloadLayout:
        shapes = [
            [state.layer, field.name, list(field.shape)] for state in spec.states for field in state.fields
        ]
        return cls(shapes, spec.bytes_per_state)

    def num_bytes(self, num_tokens: int) -> int:
        """Of the state behind these tokens."""
        return self.bytes_per_state
