"""The plan of a step for contiguous sequences: a table has one entry, the beginning of the sequence's range.

A slot is `entry * row_tokens + position`. In a step with beams of a `SharedPlace` a table has an entry for each token,
which is its slot as well. All tables lie one after another in one matrix; a table's part is made at its first reading.
See `step.GroupPlan` for every field's shape and dtype. Immutable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.baselines.row import Row, SharedPlace
from quire.cache.protocol import Int32Array, Int64Array, in_words_of
from quire.step import GroupPlan, StepPlan

__all__ = ["RowLayout", "RowPlan", "RowTable", "TokenEntries", "token_entries"]


@dataclass(frozen=True, eq=False)
class TokenEntries:
    """The tables of a step's rows with an entry for each token.

    extent: int64 [n, widest], the range of each token, -1 behind a row's last one; offset: int64 [n, widest]. starts:
    int64 [num_tables, ranges]; the entry of a token is `starts[table, extent] + offset`.
    """

    extent: Int64Array
    offset: Int64Array
    starts: Int64Array

    def block_tables(self, table: int) -> Int32Array:
        """int32 [n, widest]; -1: no entry."""
        return np.where(self.extent < 0, -1, self.starts[table][self.extent] + self.offset).astype(np.int32)

    def slots(self, table: int, rows: Int64Array, positions: Int64Array) -> Int64Array:
        """int64, like `rows` and `positions`: the slot of each of these tokens."""
        return self.starts[table][self.extent[rows, positions]] + self.offset[rows, positions]


@dataclass(frozen=True, eq=False)
class RowLayout:
    """The places of a step's sequences, and the moved and released ranges.

    starts: int64 [num_tables, n]. row_of_token, positions: int64 [T]. all_copies: int64 [m, 4], rows of (table, from,
    to, tokens). released: int64 [r, 3], rows of (table, first token, end): ranges that no sequence has read since the
    previous plan; parts of them may be in this plan's tables again. tops: int64 [num_tables]: upper bound of every
    entry ever handed out, with its tokens. tokens: in a step with beams of a `SharedPlace`, else None.
    """

    step: int
    query_start: Int32Array
    context_lengths: Int32Array
    row_of_token: Int64Array
    positions: Int64Array
    starts: Int64Array
    row_tokens: int
    num_lookahead: int
    all_copies: Int64Array
    released: Int64Array
    tops: Int64Array
    tokens: TokenEntries | None = None


@in_words_of(GroupPlan)
@dataclass(frozen=True)
class RowTable:
    """One table's part of a step."""

    rows: RowLayout
    index: int

    @property
    def step(self) -> int:
        return self.rows.step

    @property
    def query_start(self) -> Int32Array:
        return self.rows.query_start

    @property
    def context_lengths(self) -> Int32Array:
        return self.rows.context_lengths

    @property
    def block_tables(self) -> Int32Array:
        if self.rows.tokens is not None:
            return self.rows.tokens.block_tables(self.index)
        return self.rows.starts[self.index].astype(np.int32)[:, None]

    @property
    def slot_mapping(self) -> Int64Array:
        rows = self.rows
        if rows.tokens is not None:
            return rows.tokens.slots(self.index, rows.row_of_token, rows.positions)
        return rows.starts[self.index][rows.row_of_token] * rows.row_tokens + rows.positions

    @property
    def lookahead_slots(self) -> Int64Array:
        rows = self.rows
        ahead = np.arange(rows.num_lookahead, dtype=np.int64)
        if rows.tokens is not None:
            of_row = np.repeat(np.arange(len(rows.context_lengths)), rows.num_lookahead)
            positions = (rows.context_lengths[:, None] + ahead[None, :]).ravel()
            return rows.tokens.slots(self.index, of_row, positions)
        first = rows.starts[self.index] * rows.row_tokens + rows.context_lengths
        return (first[:, None] + ahead[None, :]).ravel()

    @property
    def copies(self) -> Int32Array:
        """Rows of (source entry, destination entry, tokens)."""
        copies = self.rows.all_copies
        return copies[copies[:, 0] == self.index, 1:].astype(np.int32)


@dataclass(slots=True, eq=False, kw_only=True)
class RowPlan(StepPlan):
    """The grant of a `reserve` of `RowCache`."""

    rows: RowLayout

    @classmethod
    def of_rows(cls, rows: RowLayout) -> RowPlan:
        tables = [RowTable(rows, index) for index in range(len(rows.starts))]
        return cls(tables, rows=rows)


def token_entries(rows: Sequence[Row], ends: Int64Array) -> TokenEntries:
    """The tables of rows with memory for `ends` positions; int64 [n]."""
    shape = len(rows), int(ends.max())
    extent, offset = np.full(shape, -1, np.int64), np.zeros(shape, np.int64)
    starts: list[Int64Array] = []
    first_extent: dict[SharedPlace, int] = {}
    for index, (row, end) in enumerate(zip(rows, ends.tolist(), strict=True)):
        if (shared := row.shared) is None:
            assert row.place is not None  # it has reserved
            extent[index, :end] = len(starts)
            offset[index, :end] = np.arange(end)
            starts.append(row.place.starts)
            continue
        if shared not in first_extent:
            first_extent[shared] = len(starts)
            starts += [part.starts - base for part, base in zip(shared.extents, shared.bases, strict=True)]
        offsets = row.offsets[:end]
        extent[index, :end] = first_extent[shared] + np.searchsorted(shared.bases, offsets, side="right") - 1
        offset[index, :end] = offsets
    return TokenEntries(extent, offset, np.stack(starts, axis=1))
