"""Mirror rings: a row of a group that forgets has addresses for its window only, and leads to it twice in a row.

Not an owner, see `RowPlaces`. A ring is R tokens, `ring_blocks` positions; block b of a sequence lies at position b mod
`ring_blocks`, and once more R tokens further on:

    blocks 5 6 7 8 of a ring of 4        | 8 | 5 | 6 | 7 | 8 | 5 | 6 | 7 |        5 6 7 8 are one stretch of memory
                                         ring              mirror

So whatever consecutive tokens are needed, from the first block that is kept to the last of the step, are one plain
tensor at ascending addresses: an unmodified contiguous kernel reads it. A kernel of ours finds a token by its position
in the sequence. The lap is how often the ring has been gone round before the first block kept; an entry is R tokens:

    entry of a row            num_laps + 2 * row - lap
    address of position p     entry * R + p tokens from entry 0

`num_laps` entries that nobody touches lie before the first ring, so that none is negative; they are reserved once for
the range, not for each layer buffer, as are those that views name behind the last ring. Views overlap, as in
`contiguous`.

Blocks are the cache's: it counts, gives and takes one for every block as it does for any row, and knows of no ring. The
ring is addresses; the memory behind them is that of the blocks, which change as the sequence goes on.

Invariants
    W1  after `prepare`, position b mod `ring_blocks` of a row leads to the block of block b, for every block its table
        keeps; these are at most `ring_blocks`, so no two blocks meet.
    W2  both copies of a position lead to the same block, or neither does: they are changed in one call of the heap's,
        which is all or nothing.
    W3  a position whose block the window has given back leads on to that block until another block comes round: nobody
        reads it there, and a block has one place in the heap whoever leads to it. `give_back` unmaps it.

Cost: two calls a layer buffer for each new block, as in a plain row (there one to map and one to unmap).
"""

from __future__ import annotations

import numpy as np
import torch

from quire.errors import ArgumentError, CapacityError, InvariantError
from quire.memory.placement import PlacementHeap
from quire.memory.virtual.row_places import RowPlaces, RowShape
from quire.spec import KVGroup

__all__ = ["WindowRing", "places_for"]


def places_for(
    heap: PlacementHeap,
    group: KVGroup,
    piece_bytes: list[int],
    shape: RowShape,
    step_tokens: int | None,
) -> RowPlaces:
    """A group's rings, where it forgets, steps are bounded, and a ring and its mirror are shorter than a row."""
    if step_tokens is not None and group.span.kind != "full":
        # What a sequence keeps is a window before its first new token; its first and last blocks may be kept in part.
        ring_blocks = (group.span.max_num_kept - 2 + step_tokens) // shape.block_size + 2
        if 2 * ring_blocks < shape.blocks_per_row:
            return WindowRing(heap, group, piece_bytes, shape, ring_blocks)
    return RowPlaces(heap, group, piece_bytes, shape)


class WindowRing(RowPlaces):
    """Rows of a group with a window (or a chunk); see the module's text. ring_blocks: positions of a ring."""

    def __init__(
        self,
        heap: PlacementHeap,
        group: KVGroup,
        piece_bytes: list[int],
        shape: RowShape,
        ring_blocks: int,
    ) -> None:
        self.ring_blocks = ring_blocks
        super().__init__(heap, group, piece_bytes, shape)

    def _reserve(self, heap: PlacementHeap, piece_bytes: list[int]) -> None:
        self.span = self.group.span
        self.ring_tokens = self.ring_blocks * self.block_size
        self.num_laps = (self.blocks_per_row - 1) // self.ring_blocks
        self.num_entries = self.num_laps + 2 * self.num_rows - 1
        if self.num_entries >= 2**31:
            raise CapacityError(f"expected tables of at most {2**31} entries, got {self.num_entries}")
        self.range = heap.reserve(
            self.num_rows * 2 * self.ring_blocks,
            piece_bytes,
            margin_bytes=self.num_laps * self.ring_blocks * max(piece_bytes),
        )
        self._led = self.range.entries[1:-1].reshape(self.num_rows, 2 * self.ring_blocks)

    def differing(self, rows: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions of both copies, and the blocks there; see `RowPlaces.differing`."""
        which, block = np.nonzero(table >= 0)
        block_ids, place = table[which, block], block % self.ring_blocks
        new = self._led[rows[which], place] != block_ids + 1
        positions = rows[which[new]] * (2 * self.ring_blocks) + place[new]
        return np.concatenate([positions, positions + self.ring_blocks]), np.tile(block_ids[new], 2)

    def num_led(self, rows: list[int], table: np.ndarray) -> np.ndarray:
        block = np.flatnonzero(table >= 0)
        there = self._led[np.asarray(rows, np.int64)[:, None], block % self.ring_blocks]
        return (there == table[block] + 1).sum(1)

    def entries(self, rows: np.ndarray, table: np.ndarray) -> np.ndarray:
        return self.num_laps + 2 * rows - (table >= 0).argmax(1) // self.ring_blocks

    def check_table(self, table: np.ndarray) -> None:
        """*raises:* ArgumentError: sequences too long, or more blocks at once than the ring has."""
        super().check_table(table)
        kept = int((table >= 0).sum(1).max(initial=0))
        if kept > self.ring_blocks:
            raise ArgumentError(
                f"expected at most {self.ring_blocks} blocks of {self.block_size} tokens at once, which a window of "
                f"{self.group.span.max_num_kept} tokens and a step need, got {kept}; raise step_tokens or shorten steps"
            )

    def _tensor(self, layer_buffer: int, dim: int) -> torch.Tensor:
        token = self.group.num_kv_heads * dim
        token_bytes = token * self.dtype.itemsize
        named = self.range.tensor(
            layer_buffer,
            self.dtype,
            before=self.num_laps * self.ring_tokens * token_bytes,
            behind=(self.row_tokens - 2 * self.ring_tokens) * token_bytes,
        )
        return named.as_strided(
            (self.num_entries, self.group.num_kv_heads, self.row_tokens, dim),
            (self.ring_tokens * token, dim, token, 1),
        )

    def check(self) -> None:
        """Prove W2."""
        ring, mirror = self._led[:, : self.ring_blocks], self._led[:, self.ring_blocks :]
        wrong = np.flatnonzero((ring != mirror).any(1))
        if len(wrong):
            raise InvariantError(
                f"W2: the ring of row {int(wrong[0])} and its mirror lead to different blocks"
            )
