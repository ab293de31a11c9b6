"""The places of a group's blocks in its address range: block b of a row is at the row's b-th position.

Not an owner: it computes positions and has only the range; `VirtualStorage` maps. `WindowRing` is the other layout, for
groups with a window.

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
    """Shape of a group's rows: `num_rows` rows of `blocks_per_row` blocks of `block_size` tokens each. All groups have
    equally many rows of equally many tokens.

    buffer_of: the heap's layer buffer of keys (2 * slot) and of values (2 * slot + 1) of each slot.
    """

    num_rows: int
    blocks_per_row: int
    block_size: int
    dtype: torch.dtype
    buffer_of: dict[int, int]


class RowPlaces:
    """A group's rows, each of `blocks_per_row` positions for one sequence.

    piece_bytes: of a position in each layer buffer of the heap, 0 if the group does not use it.

    *raises:* CapacityError: the address space cannot be reserved.
    """

    span: Span | None = None  # a kind of window with a table of its own; None: the table of plain rows

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
        # [rows, positions of a row]: the mapped block plus one.
        self._mapped = self.range.entries[1:-1].reshape(self.num_rows, self.blocks_per_row)

    def differences(self, rows: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions whose mapping differs from the table, and the blocks to map there (-1: unmap, a window has given it
        back).

        table: int32 [rows, widest] of blocks, -1 before a window and beyond a sequence's end.
        """
        width = table.shape[1]
        there = self._mapped[rows, :width]
        differ = there != table + 1
        # Beyond a sequence's end the table is -1 too: a block that a formerly parked row has there is harmless.
        ends = width - (table[:, ::-1] >= 0).argmax(1)
        differ &= (table >= 0) | (np.arange(width) < ends[:, None])
        which, place = np.nonzero(differ)
        return rows[which] * self.blocks_per_row + place, table[which, place]

    def count_mapped(self, rows: list[int], table: np.ndarray) -> np.ndarray:
        """int64 [rows]: the number of one sequence's blocks that each row leads to already."""
        wanted = table + 1
        there = self._mapped[rows, : len(wanted)]
        return ((there == wanted) & (wanted > 0)).sum(1)

    def mapped_positions(self, rows: list[int]) -> np.ndarray:
        """The mapped positions of these rows."""
        which, place = np.nonzero(self._mapped[rows])
        return np.asarray(rows, np.int64)[which] * self._mapped.shape[1] + place

    def entries(self, rows: np.ndarray, table: np.ndarray) -> np.ndarray:
        """int64 [rows]: the table entry at which each row begins: token p is the p-th behind it."""
        return rows

    def check_table(self, table: np.ndarray) -> None:
        """*raises:* ArgumentError: a sequence longer than a row."""
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
        """Check the invariants. *raises:* InvariantError."""


def placements(plan: StepPlan, entries: list[np.ndarray], row_tokens: int) -> list[TablePlan]:
    """A step's tables and slots for rows that begin at `entries`: an int64 [sequences] for each table."""
    contexts = plan.context_lengths.astype(np.int64)
    starts = plan.query_start
    if starts[-1] == len(contexts):  # one new token each
        positions, sequence = contexts - 1, np.arange(len(contexts))
    else:
        lengths = np.diff(starts)
        positions = np.arange(starts[-1]) + np.repeat(contexts - lengths - starts[:-1], lengths)
        sequence = np.repeat(np.arange(len(contexts)), lengths)
    return [(one.astype(np.int32)[:, None], one[sequence] * row_tokens + positions) for one in entries]
