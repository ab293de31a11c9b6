"""`References`: counts of each block of a heap: holds, positions that lead there, holds that end with a step.

It touches no memory. A block without references is free.

Invariants
    N1  a block's references are its holds and the positions it is mapped at.
    N2  a block has at least the holds that are promised to end with a step: `check_held` refuses to release more.

Cost: O(blocks given).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.errors import ArgumentError

__all__ = ["References"]


class References:
    """Counts of blocks 0 .. num_blocks - 1; only the entries of used blocks cost memory."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.holds = np.zeros(num_blocks, np.int32)
        self.counts = np.zeros(num_blocks, np.int32)
        self._promised = np.zeros(num_blocks, np.int32)  # holds that end with a step

    def add_holds(self, block_ids: np.ndarray, by: int) -> None:
        """Add `by` holds to each block, once for each time that it is given."""
        np.add.at(self.holds, block_ids, by)
        np.add.at(self.counts, block_ids, by)

    def promise(self, block_ids: np.ndarray, by: int) -> None:
        """Record that one hold of each block will end with a step (1), or ends now (-1)."""
        np.add.at(self._promised, block_ids, by)

    def count_moves(self, before: np.ndarray, after: np.ndarray) -> None:
        """Count positions that led to blocks `before` and now lead to blocks `after`; -1 is no block."""
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
        """int64 [n]. *raises:* ArgumentError: a number out of range."""
        block_ids = np.atleast_1d(np.asarray(block_ids, np.int64))
        if len(block_ids) and (block_ids.min() < 0 or block_ids.max() >= self.num_blocks):
            raise ArgumentError(f"expected blocks of 0 to {self.num_blocks - 1}, got {block_ids.tolist()}")
        return block_ids

    def live(self, block_ids: Any) -> np.ndarray:
        """As `block_ids`; *raises:* ArgumentError also if a block is free."""
        block_ids = self.block_ids(block_ids)
        if len(block_ids) and not self.counts[block_ids].all():
            free = block_ids[self.counts[block_ids] == 0]
            raise ArgumentError(f"expected blocks in use, got {free.tolist()}, which are free")
        return block_ids

    def check_held(self, block_ids: np.ndarray) -> None:
        """*raises:* ArgumentError unless each block has as many holds as it is given times, not counting promised
        holds."""
        counts = np.bincount(block_ids) if len(block_ids) else np.zeros(0, int)
        over = np.flatnonzero(counts > (self.holds - self._promised)[: len(counts)])
        if len(over):
            raise ArgumentError(
                f"expected blocks that are held, got {over.tolist()}, which are not held, or less often than given"
            )
