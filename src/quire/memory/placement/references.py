"""`References`: who needs each unit of a heap: holds, positions that lead there, holds that end with a step.

No memory is touched here. A unit is free while nothing refers to it.

Invariants
    N1  a unit's references are its holds and the positions it is mapped at.
    N2  of its holds at least those that were promised to a step are there: `check_held` refuses what goes beyond.

Cost: O(units given).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.errors import ArgumentError

__all__ = ["References"]


class References:
    """Of units 0 .. num_units - 1; arrays that cost memory only where units are used."""

    def __init__(self, num_units: int) -> None:
        self.num_units = num_units
        self.holds = np.zeros(num_units, np.int32)
        self.counts = np.zeros(num_units, np.int32)
        self._promised = np.zeros(num_units, np.int32)  # holds that end with a step

    def add_holds(self, units: np.ndarray, by: int) -> None:
        """`by` more holds of each unit, one for each time that it is given."""
        np.add.at(self.holds, units, by)
        np.add.at(self.counts, units, by)

    def promise(self, units: np.ndarray, by: int) -> None:
        """One hold of each will end with a step (1), or does so now (-1)."""
        np.add.at(self._promised, units, by)

    def moved(self, before: np.ndarray, after: np.ndarray) -> None:
        """Positions that led to `before` lead to `after`; -1 is nowhere."""
        np.add.at(self.counts, after[after >= 0], 1)
        np.add.at(self.counts, before[before >= 0], -1)

    def clear(self) -> None:
        for counts in (self.holds, self.counts, self._promised):
            counts[:] = 0

    def free_in(self, start: int, stop: int) -> np.ndarray:
        """int64, the free units of start .. stop - 1 in order."""
        return np.flatnonzero(self.counts[start:stop] == 0) + start

    # Arguments

    def units(self, units: Any) -> np.ndarray:
        """int64 [n]. *raises:* ArgumentError: there are no such units."""
        units = np.atleast_1d(np.asarray(units, np.int64))
        if len(units) and (units.min() < 0 or units.max() >= self.num_units):
            raise ArgumentError(f"expected units of 0 to {self.num_units - 1}, got {units.tolist()}")
        return units

    def live(self, units: Any) -> np.ndarray:
        """The same, *raises:* ArgumentError also where one is free."""
        units = self.units(units)
        if len(units) and not self.counts[units].all():
            free = units[self.counts[units] == 0]
            raise ArgumentError(f"expected units in use, got {free.tolist()}, which are free")
        return units

    def check_held(self, units: np.ndarray) -> None:
        """*raises:* ArgumentError unless each is held as often as it is given, promised holds not counted."""
        counts = np.bincount(units) if len(units) else np.zeros(0, int)
        over = np.flatnonzero(counts > (self.holds - self._promised)[: len(counts)])
        if len(over):
            raise ArgumentError(
                f"expected units that are held, got {over.tolist()}, which are not (so often)"
            )
