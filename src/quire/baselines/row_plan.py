"""The plan of a step for contiguous sequences: a table has one entry, the beginning of the sequence's range.

A slot is `entry * row_tokens + position`. Tables lie one after another in one matrix; a table's part is made on
request. See `protocol.StepPlan` for every field's shape and dtype. Immutable.

Beyond a StepPlan:

    released   int64 [r, 3], rows of (table, first token, end): ranges released since the plan before, which no step
               reads any more; this plan's tables may contain parts of them again
    tops       int64 [num_tables]: the end of the highest range handed out so far
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.cache.protocol import GroupPlan, Int32Array, Int64Array, StepPlan, in_words_of

__all__ = ["RowPlan", "RowTable"]


@in_words_of(GroupPlan)
@dataclass(frozen=True)
class RowTable:
    """One table's part of a step."""

    plan: RowPlan
    index: int

    @property
    def step(self) -> int:
        return self.plan.step

    @property
    def query_start(self) -> Int32Array:
        return self.plan.query_start

    @property
    def context_lengths(self) -> Int32Array:
        return self.plan.context_lengths

    @property
    def block_tables(self) -> Int32Array:
        return self.plan.starts[self.index].astype(np.int32)[:, None]

    @property
    def slot_mapping(self) -> Int64Array:
        plan = self.plan
        return plan.starts[self.index][plan.row_of_token] * plan.row_tokens + plan.positions

    @property
    def lookahead_slots(self) -> Int64Array:
        plan = self.plan
        ahead = np.arange(plan.num_lookahead, dtype=np.int64)
        first = plan.starts[self.index] * plan.row_tokens + plan.context_lengths
        return (first[:, None] + ahead[None, :]).ravel()

    @property
    def copies(self) -> Int32Array:
        """Rows of (source entry, destination entry, tokens)."""
        copies = self.plan.all_copies
        return copies[copies[:, 0] == self.index, 1:].astype(np.int32)


@in_words_of(StepPlan)
@dataclass(frozen=True)
class RowPlan:
    """The decision of `reserve`.

    starts: int64 [num_tables, n]; all_copies: int64 [m, 4], rows of (table, from, to, tokens).
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

    @property
    def num_groups(self) -> int:
        return len(self.starts)

    def group(self, index: int) -> RowTable:
        if not 0 <= index < self.num_groups:
            raise IndexError(f"expected a table of 0 .. {self.num_groups - 1}, got {index} in plan.group")
        return RowTable(self, index)

    @property
    def slot_mapping(self) -> Int64Array:
        return self.group(0).slot_mapping

    @property
    def lookahead_slots(self) -> Int64Array:
        return self.group(0).lookahead_slots

    @property
    def block_tables(self) -> Int32Array:
        return self.group(0).block_tables

    @property
    def copies(self) -> Int32Array:
        return self.group(0).copies
