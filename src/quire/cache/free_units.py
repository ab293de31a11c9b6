"""The free units of a pool, and which of them a block gets: neighbours, so that a sequence's blocks lie side by side.

The virtual storage needs one memory mapping for neighbours at neighbouring positions, and whatever reads a sequence
reads on. The block at position b of a sequence gets, in this order,

    1. the unit behind that of the block before, if it is free;
    2. unit r * run + b % run of the lowest *run* r (units r * run .. r * run + run - 1) that is wholly free;
    3. the lowest free unit.

With runs of 1 the second is the third: only neighbours are sought. A run is a power of two.

The twin of `native/core/free_units.hpp`: here a set is an integer whose bit u is set for unit u.
Cost: O(units / 64) machine words in a few operations of Python's integers.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["FreeUnits"]


class FreeUnits:
    """Units 0 .. num_ids - 1 at first, all free. Iterates in ascending order."""

    def __init__(self, num_ids: int, run: int) -> None:
        self._run = run
        self._num_ids = num_ids
        self._units = (1 << num_ids) - 1

    def __len__(self) -> int:
        return self._units.bit_count()

    def __contains__(self, unit: int) -> bool:
        return unit >= 0 and self._units >> unit & 1 == 1

    def __iter__(self) -> Iterator[int]:
        units = self._units
        while units:
            lowest = units & -units
            yield lowest.bit_length() - 1
            units ^= lowest

    def take(self, before: int, position: int) -> int:
        """A unit for a block at `position`, behind one that has the unit `before` (negative: there is none).

        A negative position: the lowest unit."""
        if position < 0:
            return self.take_lowest()
        if before >= 0 and before + 1 in self:
            unit = before + 1
        elif (first := self._first_of_a_free_run()) >= 0:
            unit = first + position % self._run
        else:
            return self.take_lowest()
        self.remove(unit)
        return unit

    def take_lowest(self) -> int:
        unit = _lowest(self._units)
        self.remove(unit)
        return unit

    def add(self, unit: int) -> None:
        self._units |= 1 << unit

    def remove(self, unit: int) -> None:
        self._units &= ~(1 << unit)

    def grow(self, num_new: int) -> None:
        """So many ids more, all free."""
        self._units |= ((1 << num_new) - 1) << self._num_ids
        self._num_ids += num_new

    def _first_of_a_free_run(self) -> int:
        """The first unit of the lowest run that is wholly free, -1 if there is none."""
        # Bit u stays while units u .. u + width - 1 are all free.
        units, width = self._units, 1
        while width < self._run:
            units &= units >> width
            width *= 2
        while units:
            first = _lowest(units)
            if first % self._run == 0:
                return first
            units &= -1 << (first // self._run + 1) * self._run
        return -1


def _lowest(units: int) -> int:
    return (units & -units).bit_length() - 1
