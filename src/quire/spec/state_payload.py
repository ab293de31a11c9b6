"""The layout of a state's bytes in a payload: the form in which the state of a sequence leaves its slot.

    for each state layer, in the order of layers
        for each of its fields, in the spec's order
            the field, float32, little endian

A payload has one size for any number of tokens. It has the same uses as `payload.PayloadLayout`, that of keys and
values: swapped out sequences, tiers, snapshots' segments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.spec.kv_spec import KVSpec

__all__ = ["StatePayloadLayout"]


@dataclass(frozen=True)
class StatePayloadLayout:
    """The layout shared by all states of one model. shapes: (layer, field, its shape), the identity of the model."""

    shapes: list[Any]
    bytes_per_state: int
    dtype: str = "float32"

    @classmethod
    def from_spec(cls, spec: KVSpec) -> StatePayloadLayout:
        shapes = [
            [state.layer, field.name, list(field.shape)] for state in spec.states for field in state.fields
        ]
        return cls(shapes, spec.bytes_per_state)

    def first_difference(self, payload: np.ndarray, other: np.ndarray) -> int | None:
        """The first layer in which two states differ, each uint8 [bytes_per_state]; None if they are equal."""
        differs = np.flatnonzero(payload != other)
        if not len(differs):
            return None
        stop = 0
        for layer, _, shape in self.shapes:
            stop += 4 * math.prod(shape)
            if differs[0] < stop:
                return int(layer)
        raise AssertionError("a state has no bytes behind its last field")

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes of the state after these tokens."""
        return self.bytes_per_state
