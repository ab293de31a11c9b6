"""The free blocks of a pool, and the choice among them: neighbours, so that a sequence's blocks lie side by side.

The virtual storage needs one memory mapping for neighbours at neighbouring positions, and every reader of a sequence
reads contiguous memory. The block at position b of a sequence gets, in this order,

    1. the block after that of the previous position, if it is free;
    2. block r * run + b % run of the lowest *run* r (blocks r * run .. r * run + run - 1) that is wholly free;
    3. the lowest free block.

With runs of 1 the second equals the third: the choice seeks only neighbours. A run is a power of two.

The twin of `native/core/free_blocks.hpp`: here a set is an integer whose bit u is set for block u.
Cost: O(blocks / 64) machine words in a few operations of Python's integers; the number of blocks O(1).
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["FreeBlocks"]


class FreeBlocks:
    """Blocks 0 .. num_ids - 1 at first, all free. Iterates in ascending order."""

    def __init__(self, num_ids: int, run: int) -> None:
        self._run = run
        self._num_ids = num_ids
        self._mask = (1 << num_ids) - 1
        self._num_free = num_ids  # set bits of the mask, which are counted by no call

    def __len__(self) -> int:
        return self._num_free

    def __contains__(self, block_id: int) -> bool:
        return block_id >= 0 and self._mask >> block_id & 1 == 1

    def __iter__(self) -> Iterator[int]:
        mask = self._mask
        while mask:
            lowest = mask & -mask
            yield lowest.bit_length() - 1
            mask ^= lowest

    def take(self, before: int, position: int) -> int:
        """A block for `position`, after the block `before` of the previous position (negative: there is none).

        A negative position: the lowest block.
        """
        if position < 0:
            return self.take_lowest()
        if before >= 0 and before + 1 in self:
            block_id = before + 1
        elif (first := self._first_of_a_free_run()) >= 0:
            block_id = first + position % self._run
        else:
            return self.take_lowest()
        self.remove(block_id)
        return block_id

    def take_lowest(self) -> int:
        block_id = _lowest(self._mask)
        self.remove(block_id)
        return block_id

    def add(self, block_id: int) -> None:
        self._num_free += block_id not in self
        self._mask |= 1 << block_id

    def remove(self, block_id: int) -> None:
        self._num_free -= block_id in self
        self._mask &= ~(1 << block_id)

    def grow(self, num_new: int) -> None:
        """Adds so many ids, all free."""
        self._mask |= ((1 << num_new) - 1) << self._num_ids
        self._num_ids += num_new
        self._num_free += num_new

    def _first_of_a_free_run(self) -> int:
        """The first block of the lowest wholly free run, -1 if there is none."""
        # Bit u stays while blocks u .. u + width - 1 are all free.
        mask, width = self._mask, 1
        while width < self._run:
            mask &= mask >> width
            width *= 2
        while mask:
            first = _lowest(mask)
            if first % self._run == 0:
                return first
            mask &= -1 << (first // self._run + 1) * self._run
        return -1


def _lowest(mask: int) -> int:
    return (mask & -mask).bit_length() - 1
