"""Where a mixer of state layers finds the step and its states: the engine's cache object is a `StateSource`.

The forward that `install` puts over a mixer asks it. Any other cache leaves the mixer its own forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeGuard

import torch

from quire.step import RecurrenceStep

__all__ = ["StateSource", "state_source"]


class StateSource(Protocol):
    """The view that mixers of state layers have of the cache in the engine's forward."""

    @property
    def state_step(self) -> RecurrenceStep | None:
        """The step of the forward that runs now; None between two: no mixer may be called then."""
        ...

    def state_of(self, layer_index: int) -> Mapping[str, torch.Tensor]:
        """The states of a layer by the names of its fields, each float32 [num_slots, *shape of the field].

        Each slot is contiguous. The mixer reads and writes the slots of the step in place, and writes those of its
        checkpoints. The slot of a sequence that begins holds zeros.
        """
        ...


def state_source(cache: object) -> StateSource | None:
    """`cache` if it has states for the engine's mixers; None for a cache of transformers, and for none."""
    return cache if _is_state_source(cache) else None


def _is_state_source(cache: object) -> TypeGuard[StateSource]:
    return callable(getattr(cache, "state_of", None)) and hasattr(cache, "state_step")
