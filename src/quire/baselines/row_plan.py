"""The plan of a step for contiguous sequences: a table has one entry, the beginning of the sequence's range.

A slot is `entry * row_tokens + position`. All tables lie one after another in one matrix; a table's part is made at its
first reading. See `step.GroupPlan` for every field's shape and dtype. Immutable.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.cache.protocol import Int32Array, Int64Array, in_words_of
from quire.step import GroupPlan, StepPlan

__all__ = ["RowLayout", "RowPlan", "RowTable"]


@dataclass(frozen=True, eq=False)
class RowLayout:
    """The places of a step's sequences, and the moved and released ranges.

    starts: int64 [num_tables, n]. row_of_token, positions: int64 [T]. all_copies: int64 [m, 4], rows of (table, from,
    to, tokens). released: int64 [r, 3], rows of (table, first token, end): ranges that no sequence has read since the
    previous plan; parts of them may be in this plan's tables again. tops: int64 [num_tables]: upper bound of every
    entry ever handed out, with its tokens.
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
        return self.rows.starts[self.index].astype(np.int32)[:, None]

    @property
    def slot_mapping(self) -> Int64Array:
        rows = self.rows
        return rows.starts[self.index][rows.row_of_token] * rows.row_tokens + rows.positions

    @property
    def lookahead_slots(self) -> Int64Array:
        rows = self.rows
        ahead = np.arange(rows.num_lookahead, dtype=np.int64)
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
