"""Mirror rings: a row of a group with a window has addresses for its window only, mapped twice in succession.

Not an owner, see `RowPlaces`. A ring is R tokens, `ring_blocks` positions; block b of a sequence lies at position b mod
`ring_blocks`, and once more R tokens further on:

    blocks 5 6 7 8 of a ring of 4        | 8 | 5 | 6 | 7 | 8 | 5 | 6 | 7 |        5 6 7 8 are one stretch of memory
                                         ring              mirror

So all consecutive tokens that a step reads, from the first kept block to the last of the step, are one tensor at
ascending addresses: an unmodified contiguous kernel reads it. Quire's kernels find a token by its position in the
sequence. The lap is the number of full rounds of the ring before the first kept block; an entry is R tokens:

    entry of a row            num_laps + 2 * row - lap
    address of position p     entry * R + p tokens from entry 0

`num_laps` untouched entries lie before the first ring, so that no entry is negative; they are reserved once for the
range, not for each layer buffer, like the entries of views behind the last ring. Views overlap, as in `contiguous`.

The cache counts and allocates blocks as for any row and knows no rings. A ring is addresses; their memory is that of
the blocks, which change as the sequence grows.

Invariants
    W1  after `prepare`, position b mod `ring_blocks` of a row leads to block b of the sequence, for every block its
        table keeps; these are at most `ring_blocks`, so no two blocks share a position.
    W2  both copies of a position lead to the same block, or neither leads to any: one all-or-nothing call of the heap
        changes both.
    W3  a position whose block the window has given back still leads to that block until another block takes the
        position: no step reads it there, and a block has one place in the heap for all its mappings. `give_back` unmaps
        it.

Cost: two calls a layer buffer for each new block, as in a plain row (there one to map and one to unmap).
"""

from __future__ import annotations

import numpy as np
import torch

from quire.errors import ArgumentError, CapacityError, InvariantError
from quire.memory.placement import PlacementHeap
from quire.memory.virtual.row_places import RowPlaces, RowShape
from quire.spec import KVGroup

__all__ = ["WindowRing", "make_places"]


def make_places(
    heap: PlacementHeap,
    group: KVGroup,
    piece_bytes: list[int],
    shape: RowShape,
    step_tokens: int | None,
) -> RowPlaces:
    """Rings for a group with a window, if steps are bounded and a ring with its mirror is shorter than a row; else
    rows."""
    if step_tokens is not None and group.span.kind != "full":
        # A sequence keeps a window before its first new token; its first and last blocks may be partial.
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
        self._mapped = self.range.entries[1:-1].reshape(self.num_rows, 2 * self.ring_blocks)

    def differences(self, rows: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions of both copies, and the blocks to map there; see `RowPlaces.differences`."""
        which, block = np.nonzero(table >= 0)
        block_ids, place = table[which, block], block % self.ring_blocks
        new = self._mapped[rows[which], place] != block_ids + 1
        positions = rows[which[new]] * (2 * self.ring_blocks) + place[new]
        return np.concatenate([positions, positions + self.ring_blocks]), np.tile(block_ids[new], 2)

    def count_mapped(self, rows: list[int], table: np.ndarray) -> np.ndarray:
        block = np.flatnonzero(table >= 0)
        there = self._mapped[np.asarray(rows, np.int64)[:, None], block % self.ring_blocks]
        return (there == table[block] + 1).sum(1)

    def entries(self, rows: np.ndarray, table: np.ndarray) -> np.ndarray:
        return self.num_laps + 2 * rows - (table >= 0).argmax(1) // self.ring_blocks

    def check_table(self, table: np.ndarray) -> None:
        """*raises:* ArgumentError: a sequence too long, or more blocks at once than the ring has."""
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
        """Check W2."""
        ring, mirror = self._mapped[:, : self.ring_blocks], self._mapped[:, self.ring_blocks :]
        wrong = np.flatnonzero((ring != mirror).any(1))
        if len(wrong):
            raise InvariantError(
                f"W2: the ring of row {int(wrong[0])} and its mirror lead to different blocks"
            )
