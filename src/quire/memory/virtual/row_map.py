"""`RowMap`: maps blocks into rows of addresses, and holds mapped blocks in the placement heap.

It stands between `VirtualStorage`, which knows the rows of a step, and the heap, which maps. A block that was mapped
once is held until `give_back`, even if no row leads there any more: its bytes stay.

Invariants
    M1  `is_held` is true for exactly the blocks that it holds in the heap, once each.
    M2  a call that fails has changed only parked rows.

Cost: numpy over the tables given; a call to the machine for each run of blocks that is new, two a layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.errors import CapacityError
from quire.memory.placement import PlacementHeap
from quire.memory.virtual.row_places import RowPlaces
from quire.memory.virtual.rows import Rows

__all__ = ["RowMap"]


class RowMap:
    """places: of each group, over the same rows. num_blocks: maximum number of blocks."""

    def __init__(self, heap: PlacementHeap, places: Sequence[RowPlaces], rows: Rows, num_blocks: int) -> None:
        self._heap = heap
        self._places = places
        self._rows = rows
        self.is_held = np.zeros(num_blocks, bool)

    def map_rows(self, rows: np.ndarray, tables: list[np.ndarray]) -> None:
        """Map the blocks that the rows do not lead to yet, and unmap the blocks that a window has given back.

        *raises:* CapacityError: no room, even after unmapping the parked rows.
        """
        changes = []
        for places, table in zip(self._places, tables, strict=True):
            places.check_table(table)
            if not table.size:
                continue
            positions, block_ids = places.differences(rows, table)
            if len(positions):
                changes.append((places.range, positions, block_ids))
        if not changes:
            return
        wanted = np.concatenate([block_ids for _, _, block_ids in changes])
        new = self.hold(np.unique(wanted[wanted >= 0]))
        try:
            try:
                self._heap.map(changes)
            except CapacityError:
                # Parked rows cost mappings and memory: unmap them and try again.
                self.unmap_parked()
                self._heap.map(changes)
        except BaseException:
            self._heap.free(new)
            self.is_held[new] = False
            raise

    def hold(self, block_ids: np.ndarray) -> np.ndarray:
        """Hold the distinct blocks that are not held yet; returns these."""
        new = block_ids[~self.is_held[block_ids]]
        self._heap.claim(new)
        self.is_held[new] = True
        return new

    def give_back(self, block_ids: np.ndarray) -> None:
        """Unmap these blocks from all rows and release their holds and memory.

        *raises:* CapacityError: the system refuses to unmap; nothing has changed then.
        """
        free = np.zeros(len(self.is_held) + 1, bool)
        free[block_ids + 1] = True  # indexed like entries, which are blocks plus one
        ranges = [places.range for places in self._places]
        stale = [np.flatnonzero(free[r.entries[1:-1]]) for r in ranges]
        self._heap.map([(r, at, np.full(len(at), -1)) for r, at in zip(ranges, stale, strict=True)])
        given = np.flatnonzero(free[1:] & self.is_held)
        self._heap.free(given)
        self.is_held[given] = False
        self._heap.trim()

    def unmap_parked(self) -> None:
        """Unmap all parked rows."""
        changes = []
        for places in self._places:
            at = places.mapped_positions(self._rows.parked)
            changes.append((places.range, at, np.full(len(at), -1)))
        self._heap.map(changes)
