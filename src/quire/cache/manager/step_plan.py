"""What `reserve` hands out: where the step's tokens go and which blocks its attention reads.

A plan holds arrays that nobody writes again, so it stays right while later calls change the cache. The padded
block table is made when it is asked for. See `protocol.StepPlan` for every field's shape and dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from quire.cache.protocol import GroupPlan, StepPlan, in_words_of
from quire.cache.types import Int32Array, Int64Array

__all__ = ["PythonGroupPlan", "PythonStepPlan"]


@in_words_of(GroupPlan)
@dataclass(frozen=True)
class PythonGroupPlan:
    """One group's part of a step."""

    step: int
    query_start: Int32Array
    context_lengths: Int32Array
    slot_mapping: Int64Array
    lookahead_slots: Int64Array
    copies: Int32Array
    # One array of blocks for each sequence, of different lengths.
    rows: tuple[Int32Array, ...]
    _made: list[Int32Array] = field(default_factory=list)

    @property
    def block_tables(self) -> Int32Array:
        if not self._made:
            widest = max((len(row) for row in self.rows), default=0)
            tables = np.full((len(self.rows), widest), -1, np.int32)
            for table, row in zip(tables, self.rows, strict=True):
                table[: len(row)] = row
            self._made.append(tables)
        return self._made[0]


@in_words_of(StepPlan)
class PythonStepPlan:
    """What `reserve` decided: its groups, and group 0's arrays under their own names."""

    def __init__(self, groups: list[PythonGroupPlan]) -> None:
        self._groups = groups

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    def group(self, index: int) -> PythonGroupPlan:
        if not 0 <= index < len(self._groups):
            raise IndexError(f"expected a group of 0 .. {len(self._groups) - 1}, got {index} in plan.group")
        return self._groups[index]

    @property
    def step(self) -> int:
        return self._groups[0].step

    @property
    def query_start(self) -> Int32Array:
        return self._groups[0].query_start

    @property
    def context_lengths(self) -> Int32Array:
        return self._groups[0].context_lengths

    @property
    def slot_mapping(self) -> Int64Array:
        return self._groups[0].slot_mapping

    @property
    def lookahead_slots(self) -> Int64Array:
        return self._groups[0].lookahead_slots

    @property
    def block_tables(self) -> Int32Array:
        return self._groups[0].block_tables

    @property
    def copies(self) -> Int32Array:
        return self._groups[0].copies
