"""What a state layer needs beside its rows: the step's sequences and slots, the rows' positions, and its states.

The engine's cache object is a `StateSource`: the forward that `install` puts over a mixer finds both there. Any other
cache leaves the mixer its own forward.

Cost: none; it only holds what others made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from quire.errors import ArgumentError
from quire.recurrence import RecurrenceStep

__all__ = ["StateSource", "StateStep", "state_source"]


@dataclass(frozen=True, eq=False)
class StateStep:
    """One step as all state layers see it.

    Args:
        recurrence: which rows belong to which sequence, its slot, and the checkpoints.
        positions: int64 [num_rows], the position of each row in its text. A row at position 0 begins a text: its
            sequence's slot holds zeros then (some recurrences treat that row in a way of its own).
    """

    recurrence: RecurrenceStep
    positions: torch.Tensor

    def __post_init__(self) -> None:
        expected = (self.recurrence.num_rows,)
        if self.positions.shape != expected or self.positions.dtype != torch.int64:
            raise ArgumentError(
                f"expected positions as int64 {list(expected)}, got {self.positions.dtype} {list(self.positions.shape)}"
            )


class StateSource(Protocol):
    """What the cache of the engine's forward answers to the mixers of state layers."""

    @property
    def state_step(self) -> StateStep | None:
        """The step of the forward that runs now; None between two: no mixer may be called then."""
        ...

    def state_of(self, layer_index: int) -> Mapping[str, torch.Tensor]:
        """The states of a layer by the names of its fields, each float32 [num_slots, *shape of the field].

        Each slot is contiguous. The mixer reads and writes the slots of the step in place, and writes those of its
        checkpoints. The slot of a sequence that begins holds zeros.
        """
        ...


def state_source(cache: Any) -> StateSource | None:
    """`cache` if it has states for the engine's mixers; None for a cache of transformers, and for none."""
    return cache if callable(getattr(cache, "state_of", None)) and hasattr(cache, "state_step") else None
