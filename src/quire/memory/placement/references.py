"""`References`: who needs each block of a heap: holds, positions that lead there, holds that end with a step.

No memory is touched here. A block is free while nothing refers to it.

Invariants
    N1  a block's references are its holds and the positions it is mapped at.
    N2  of its holds at least those that were promised to a step are there: `check_held` refuses what goes beyond.

Cost: O(blocks given).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.errors import ArgumentError

__all__ = ["References"]


class References:
    """Of blocks 0 .. num_blocks - 1; arrays that cost memory only where blocks are used."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.holds = np.zeros(num_blocks, np.int32)
        self.counts = np.zeros(num_blocks, np.int32)
        self._promised = np.zeros(num_blocks, np.int32)  # holds that end with a step

    def add_holds(self, block_ids: np.ndarray, by: int) -> None:
        """`by` more holds of each block, one for each time that it is given."""
        np.add.at(self.holds, block_ids, by)
        np.add.at(self.counts, block_ids, by)

    def promise(self, block_ids: np.ndarray, by: int) -> None:
        """One hold of each will end with a step (1), or does so now (-1)."""
        np.add.at(self._promised, block_ids, by)

    def moved(self, before: np.ndarray, after: np.ndarray) -> None:
        """Positions that led to `before` lead to `after`; -1 is nowhere."""
        np.add.at(self.counts, after[after >= 0], 1)
        np.add.at(self.counts, before[before >= 0], -1)

    def clear(self) -> None:
        for counts in (self.holds, self.counts, self._promised):
            counts[:] = 0

    def free_in(self, start: int, stop: int) -> np.ndarray:
        """int64, the free blocks of start .. stop - 1 in order."""
        return np.flatnonzero(self.counts[start:stop] == 0) + start

    # Arguments

    def block_ids(self, block_ids: Any) -> np.ndarray:
        """int64 [n]. *raises:* ArgumentError: there are no such blocks."""
        block_ids = np.atleast_1d(np.asarray(block_ids, np.int64))
        if len(block_ids) and (block_ids.min() < 0 or block_ids.max() >= self.num_blocks):
            raise ArgumentError(f"expected blocks of 0 to {self.num_blocks - 1}, got {block_ids.tolist()}")
        return block_ids

    def live(self, block_ids: Any) -> np.ndarray:
        """The same, *raises:* ArgumentError also where one is free."""
        block_ids = self.block_ids(block_ids)
        if len(block_ids) and not self.counts[block_ids].all():
            free = block_ids[self.counts[block_ids] == 0]
            raise ArgumentError(f"expected blocks in use, got {free.tolist()}, which are free")
        return block_ids

    def check_held(self, block_ids: np.ndarray) -> None:
        """*raises:* ArgumentError unless each is held as often as it is given, promised holds not counted."""
        counts = np.bincount(block_ids) if len(block_ids) else np.zeros(0, int)
        over = np.flatnonzero(counts > (self.holds - self._promised)[: len(counts)])
        if len(over):
            raise ArgumentError(
                f"expected blocks that are held, got {over.tolist()}, which are not (so often)"
            )
