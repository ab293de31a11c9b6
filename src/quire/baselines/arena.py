"""The space of the contiguous storage: one arena, of which every sequence has one range from its admission to its end.

`reservation` sets the length of a range:
    max     as long as any sequence may become
    pow2    the next power of two that holds the prompt and the maximum output, at most `max`
    exact   the prompt and the maximum output

Engines before paging work so: ranges never move and share no tokens, and a sequence waits while no gap is long enough,
even if the gaps together would be. A block is a token. Invariants and cost: `ranges.Ranges`.
"""

from __future__ import annotations

import numpy as np

from quire.baselines.ranges import Ranges
from quire.baselines.row import Row, RowRanges
from quire.errors import ArgumentError

__all__ = ["RESERVATIONS", "Arena"]

RESERVATIONS = ("max", "pow2", "exact")


class Arena:
    """`num_tokens` tokens for sequences of at most `row_tokens` each."""

    num_tables = 1
    block_name = "token"
    grows = False

    def __init__(self, num_tokens: int, row_tokens: int, reservation: str = "max") -> None:
        if reservation not in RESERVATIONS:
            raise ArgumentError(f"expected a reservation of {', '.join(RESERVATIONS)}, got {reservation!r}")
        self.num_blocks = num_tokens
        self.longest = min(row_tokens, num_tokens)
        self.reservation = reservation
        self.ranges = Ranges(num_tokens)

    @property
    def num_free(self) -> int:
        return self.ranges.num_free

    @property
    def largest_free(self) -> int:
        return self.ranges.largest_free

    @property
    def tops(self) -> list[int]:
        return [self.ranges.highest_taken]

    def range_for(self, num_tokens: int) -> int:
        """Tokens of the range for a sequence of at most `num_tokens`."""
        if self.reservation == "max":
            return self.longest
        if self.reservation == "pow2":
            num_tokens = 1 << (num_tokens - 1).bit_length()
        return max(1, min(num_tokens, self.longest))

    def num_blocks_for(self, num_tokens: int) -> int:
        # Never less than `num_tokens`: a sequence beyond the longest range must not seem to fit.
        return max(num_tokens, self.range_for(num_tokens))

    def limit(self, row: Row) -> int:
        return row.room if row.place is not None else self.range_for(row.most_tokens)

    def useful(self, row: Row) -> int:
        return min(row.room, row.most_tokens)

    def blocks_needed(self, row: Row, end: int) -> int:
        return self.range_for(row.most_tokens) if row.place is None else 0

    def find(self, row: Row, end: int) -> RowRanges | None:
        return self.find_extent(self.range_for(row.most_tokens))

    def blocks_of_extent(self, num_tokens: int) -> int:
        return num_tokens

    def find_extent(self, num_tokens: int) -> RowRanges | None:
        start = self.ranges.take(num_tokens)
        if start is None:
            return None
        return RowRanges(np.array([start], np.int64), np.array([num_tokens], np.int64))

    def give(self, place: RowRanges, kept: RowRanges | None) -> None:
        if kept is None:
            self.ranges.give(int(place.starts[0]), int(place.capacities[0]))

    def blocks_of(self, place: RowRanges, kept: RowRanges | None) -> int:
        return int(place.capacities[0]) if kept is None else 0

    def check(self, places: list[RowRanges]) -> None:
        self.ranges.check([(int(place.starts[0]), int(place.capacities[0])) for place in places])
