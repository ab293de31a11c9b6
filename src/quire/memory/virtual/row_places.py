"""Where the blocks of a group's sequences lie in its address range: block b of a row at the row's b-th position.

Not an owner: it says what should lead where, and keeps nothing but the range; `VirtualStorage` maps. `WindowRing` is
the other way, for groups that forget.

Cost: numpy over the tables given.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from quire.errors import ArgumentError
from quire.memory.placement import PlacementHeap
from quire.memory.storage import TablePlan
from quire.memory.view import KVView
from quire.spec import KVGroup, Span
from quire.step import StepPlan

__all__ = ["RowPlaces", "RowShape", "placements"]


class RowShape(NamedTuple):
    """Of the rows of a group: `num_rows` of `blocks_per_row` blocks of `block_size` tokens each; all groups' rows are
    equally many, and of as many tokens.

    buffer_of: of keys (2 * slot) and values (2 * slot + 1) of each slot, which of the heap's layer buffers it is.
    """

    num_rows: int
    blocks_per_row: int
    block_size: int
    dtype: torch.dtype
    buffer_of: dict[int, int]


class RowPlaces:
    """A group's rows, each of `blocks_per_row` positions for one sequence.

    piece_bytes: of a position in each layer buffer of the heap, 0 where the group has none.

    *raises:* CapacityError: the address space is not to be had.
    """

    span: Span | None = None  # whose tables these entries are alone; None: those of all rows

    def __init__(
        self,
        heap: PlacementHeap,
        group: KVGroup,
        piece_bytes: list[int],
        shape: RowShape,
    ) -> None:
        self.group = group
        self.num_rows, self.blocks_per_row, self.block_size, self.dtype, self._buffer_of = shape
        self.row_tokens = self.blocks_per_row * self.block_size
        self._reserve(heap, piece_bytes)

    def _reserve(self, heap: PlacementHeap, piece_bytes: list[int]) -> None:
        self.range = heap.reserve(self.num_rows * self.blocks_per_row, piece_bytes)
        # [rows, positions of a row]: the block plus one that each leads to.
        self._led = self.range.entries[1:-1].reshape(self.num_rows, self.blocks_per_row)

    def differing(self, rows: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What rows do not lead to yet, and what a window has given back: positions, and the blocks there (-1: none).

        table: int32 [rows, widest], of blocks, -1 before a window and beyond a sequence's end.
        """
        width = table.shape[1]
        there = self._led[rows, :width]
        differ = there != table + 1
        # Beyond a sequence's end the table is -1 too: what a parked row has there does no harm.
        ends = width - (table[:, ::-1] >= 0).argmax(1)
        differ &= (table >= 0) | (np.arange(width) < ends[:, None])
        which, place = np.nonzero(differ)
        return rows[which] * self.blocks_per_row + place, table[which, place]

    def num_led(self, rows: list[int], table: np.ndarray) -> np.ndarray:
        """int64 [rows]: how many of one sequence's blocks each row leads to."""
        wanted = table + 1
        there = self._led[rows, : len(wanted)]
        return ((there == wanted) & (wanted > 0)).sum(1)

    def mapped(self, rows: list[int]) -> np.ndarray:
        """The positions of these rows that lead anywhere."""
        which, place = np.nonzero(self._led[rows])
        return np.asarray(rows, np.int64)[which] * self._led.shape[1] + place

    def entries(self, rows: np.ndarray, table: np.ndarray) -> np.ndarray:
        """int64 [rows]: the table entry from which the row's positions count: token p is the p-th behind it."""
        return rows

    def check_table(self, table: np.ndarray) -> None:
        """*raises:* ArgumentError: sequences longer than a row."""
        if table.shape[1] > self.blocks_per_row:
            raise ArgumentError(
                f"expected sequences of at most {self.row_tokens} tokens, got {table.shape[1]} blocks of "
                f"{self.block_size}"
            )

    def view(self, slot: int) -> KVView:
        """Keys and values of the group's layer in `slot`: [entries, kv_heads, row_tokens, head_dim]."""
        rows = [
            self._tensor(self._buffer_of[2 * slot + kind], dim)
            for kind, dim in enumerate(self.group.row_elements)
        ]
        return KVView.of_rows(rows, self.group.layer)

    def _tensor(self, layer_buffer: int, dim: int) -> torch.Tensor:
        heads = self.group.num_kv_heads
        return self.range.tensor(layer_buffer, self.dtype).as_strided(
            (self.num_rows, heads, self.row_tokens, dim), (self.row_tokens * heads * dim, dim, heads * dim, 1)
        )

    def check(self) -> None:
        """Prove the invariants. *raises:* InvariantError."""


def placements(plan: StepPlan, entries: list[np.ndarray], row_tokens: int) -> list[TablePlan]:
    """A step's tables and slots, of rows that begin at these entries: an int64 [sequences] for each table."""
    contexts = plan.context_lengths.astype(np.int64)
    starts = plan.query_start
    if starts[-1] == len(contexts):  # a token each
        positions, sequence = contexts - 1, np.arange(len(contexts))
    else:
        lengths = np.diff(starts)
        positions = np.arange(starts[-1]) + np.repeat(contexts - lengths - starts[:-1], lengths)
        sequence = np.repeat(np.arange(len(contexts)), lengths)
    return [(one.astype(np.int32)[:, None], one[sequence] * row_tokens + positions) for one in entries]
