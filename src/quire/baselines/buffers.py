"""The space of the growing storage: a buffer for every sequence and table (layer), replaced by a larger one when full.

`growth` sets the spare room of a buffer:
    spread     `spare_tokens` of the table
    together   up to the next multiple of `step` tokens, in all tables at once

A table's buffers are ranges of its *layer buffer*, whose address space is many times the memory; memory is the limit,
counted in pages over all tables. A buffer begins and ends on pages, and takes a whole number of *granules*: the fewest
tokens that fill whole pages in each of the layer's lines. A block is a page.

Invariants
    B1  pages of all buffers, including old buffers that a step still reads, never exceed `num_blocks`.
    B2  a sequence gets all buffers that it needs or none.

Cost: `find` O(tables that grow + free ranges of their layer buffers); checking whether a row has room O(1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.baselines.ranges import Ranges
from quire.baselines.row import Row, RowRanges
from quire.cache.protocol import Int64Array
from quire.errors import ArgumentError, InvariantError
from quire.memory.spare_tokens import spare_tokens

__all__ = ["GROWTHS", "STEP_TOKENS", "Buffers", "LayerBuffer", "parse_growth"]

GROWTHS = ("spread", "together")
STEP_TOKENS = 4096


def parse_growth(growth: str) -> tuple[str, int]:
    """("spread", STEP_TOKENS), ("together", STEP_TOKENS) or, of "together:N", ("together", N). *raises:*
    ArgumentError."""
    name, colon, tokens = growth.partition(":")
    if not colon and name in GROWTHS:
        return name, STEP_TOKENS
    if name == "together" and tokens.isdecimal() and int(tokens) > 0:
        return name, int(tokens)
    raise ArgumentError(
        f"expected spread, together or together:N with N tokens, got {growth!r} - in `growth`"
    )


@dataclass(frozen=True)
class LayerBuffer:
    """A table's address space in tokens, and its granule in tokens and in pages."""

    num_tokens: int
    granule_tokens: int
    granule_pages: int


class Buffers:
    """`num_pages` pages for sequences of at most `row_tokens` tokens, in `layer_buffers`, one for each table."""

    block_name = "page"
    grows = True

    def __init__(
        self,
        layer_buffers: Sequence[LayerBuffer],
        num_pages: int,
        row_tokens: int,
        growth: str = "spread",
        step: int = STEP_TOKENS,
    ) -> None:
        if growth not in GROWTHS:
            raise ArgumentError(f"expected a growth of {' or '.join(GROWTHS)}, got {growth!r}")
        if step < 1:
            raise ArgumentError(f"expected a step of at least one token, got {step}")
        self.layer_buffers = list(layer_buffers)
        self.num_tables = len(self.layer_buffers)
        self.num_blocks = num_pages
        self.num_used = 0
        self.longest = row_tokens
        self.growth, self.step = growth, step
        self._granule_tokens = np.array(
            [layer_buffer.granule_tokens for layer_buffer in layer_buffers], np.int64
        )
        self._granule_pages = np.array(
            [layer_buffer.granule_pages for layer_buffer in layer_buffers], np.int64
        )
        self._ranges = [
            Ranges(layer_buffer.num_tokens // layer_buffer.granule_tokens) for layer_buffer in layer_buffers
        ]
        self._ahead = np.array([spare_tokens(table) for table in range(self.num_tables)], np.int64)
        self._max_coinciding = np.zeros(1, np.int64)  # see _coinciding

    @property
    def num_free(self) -> int:
        return self.num_blocks - self.num_used

    @property
    def largest_free(self) -> int:
        return self.num_free

    @property
    def tops(self) -> list[int]:
        return [
            ranges.highest_taken * layer_buffer.granule_tokens
            for ranges, layer_buffer in zip(self._ranges, self.layer_buffers, strict=True)
        ]

    def capacities(self, num_tokens: int) -> Int64Array:
        """int64 [num_tables]: capacities of the buffers taken for `num_tokens` tokens."""
        if self.growth == "together":
            wanted = np.full(self.num_tables, -(-num_tokens // self.step) * self.step, np.int64)
        else:
            wanted = num_tokens + self._ahead
        return np.minimum(wanted, max(num_tokens, self.longest))

    def _pages(self, capacities: Int64Array) -> Int64Array:
        return -(-capacities // self._granule_tokens) * self._granule_pages

    def limit(self, row: Row) -> int:
        return self.longest

    def useful(self, row: Row) -> int:
        assert row.place is not None
        return min(row.room, row.most_tokens)

    # Demand

    def num_blocks_for(self, num_tokens: int) -> int:
        new = int(self._pages(self.capacities(num_tokens)).sum())
        if self.growth == "together":
            before = num_tokens - self.step  # tokens for which the replaced buffers were taken
            return new + (int(self._pages(self.capacities(before)).sum()) if before > 0 else 0)
        largest = int(self._pages(np.full(self.num_tables, num_tokens, np.int64)).max())
        return new + self._coinciding(num_tokens) * largest

    def _coinciding(self, num_tokens: int) -> int:
        """Maximum number of tables that grow in one step while a sequence grows to `num_tokens`, token by token.

        Token n + ahead + 1 outgrows a buffer taken for n tokens, and the new buffer is taken for that many. So x tokens
        after the first reservation exactly the tables grow whose ahead + 1 divides x.
        """
        if num_tokens >= len(self._max_coinciding):
            length = min(2 * num_tokens + 1, max(self.longest, num_tokens) + 1)
            growing = np.zeros(length, np.int64)
            for period in (self._ahead + 1).tolist():
                growing[period::period] += 1
            self._max_coinciding = np.maximum.accumulate(growing)
        return int(self._max_coinciding[num_tokens])

    def blocks_needed(self, row: Row, end: int) -> int:
        return 0 if end <= row.room else int(self._pages(self._wanted(row, end))[self._grows(row, end)].sum())

    def _wanted(self, row: Row, end: int) -> Int64Array:
        # For all known tokens: a prompt in chunks takes its place once.
        return self.capacities(max(end, row.num_tokens))

    def _grows(self, row: Row, end: int) -> np.ndarray:
        if row.place is None:
            return np.ones(self.num_tables, bool)
        return row.place.capacities < end

    # Taking and giving

    def find(self, row: Row, end: int) -> RowRanges | None:
        return self._take(self._grows(row, end), self._wanted(row, end), row.place)

    def blocks_of_extent(self, num_tokens: int) -> int:
        return int(self._pages(np.full(self.num_tables, num_tokens, np.int64)).sum())

    def find_extent(self, num_tokens: int) -> RowRanges | None:
        every_table = np.ones(self.num_tables, bool)
        return self._take(every_table, np.full(self.num_tables, num_tokens, np.int64), None)

    def _take(self, grows: np.ndarray, wanted: Int64Array, place: RowRanges | None) -> RowRanges | None:
        """Take buffers of `wanted` tokens in the tables that grow; the others keep those of `place`."""
        pages = int(self._pages(wanted)[grows].sum())
        if pages > self.num_free:
            return None
        if place is None:
            starts, capacities = np.zeros(self.num_tables, np.int64), wanted
        else:
            starts, capacities = place.starts.copy(), np.where(grows, wanted, place.capacities)
        taken: list[int] = []
        for table in np.flatnonzero(grows).tolist():
            size = self._granule_tokens[table]
            start = self._ranges[table].take(int(-(-wanted[table] // size)))
            if start is None:  # the layer buffer's address space is too fragmented
                for other in taken:
                    self._give(other, int(starts[other]), int(capacities[other]))
                return None
            starts[table] = start * size
            taken.append(table)
        self.num_used += pages
        return RowRanges(starts, capacities)

    def _give(self, table: int, start: int, capacity: int) -> None:
        size = int(self._granule_tokens[table])
        self._ranges[table].give(start // size, -(-capacity // size))

    def give(self, place: RowRanges, kept: RowRanges | None) -> None:
        self.num_used -= self.blocks_of(place, kept)
        for table in self._left(place, kept).tolist():
            self._give(table, int(place.starts[table]), int(place.capacities[table]))

    def _left(self, place: RowRanges, kept: RowRanges | None) -> Int64Array:
        """The tables whose range in `place` differs from that in `kept`."""
        return np.arange(self.num_tables) if kept is None else np.flatnonzero(place.starts != kept.starts)

    def blocks_of(self, place: RowRanges, kept: RowRanges | None) -> int:
        return int(self._pages(place.capacities)[self._left(place, kept)].sum())

    def check(self, places: list[RowRanges]) -> None:
        pages = 0
        for table, (ranges, layer_buffer) in enumerate(zip(self._ranges, self.layer_buffers, strict=True)):
            taken_ranges = {(int(place.starts[table]), int(place.capacities[table])) for place in places}
            sizes = [
                (start // layer_buffer.granule_tokens, -(-n // layer_buffer.granule_tokens))
                for start, n in taken_ranges
            ]
            ranges.check(sizes)
            pages += sum(size for _, size in sizes) * layer_buffer.granule_pages
        if pages != self.num_used or pages > self.num_blocks:
            raise InvariantError(
                f"B1: {pages} pages are taken, {self.num_used} counted, of {self.num_blocks}"
            )
