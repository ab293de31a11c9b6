"""One group's part of a plan from `reserve`: where the step's tokens go and which blocks its attention reads.

The arrays of a plan are never written again, so it stays valid while later calls change the cache. The padded block
table is made at its first reading. See `step.GroupPlan` for every field's shape and dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from quire.cache.protocol import in_words_of
from quire.cache.types import Int32Array, Int64Array
from quire.step import GroupPlan

__all__ = ["PythonGroupPlan"]


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
