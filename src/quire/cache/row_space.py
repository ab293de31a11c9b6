"""Where sequences that lie in one piece may lie: what `RowManager` needs of it, and what a place is.

Two of them: `arena.Arena` (contiguous: one range for good) and `buffers.Buffers` (growing: a buffer for each layer,
replaced by a larger one). They count *units*: tokens of the arena, pages of the buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from quire.cache.backend import Int32Array, Int64Array

__all__ = ["Place", "Row", "RowSpace"]


@dataclass(frozen=True, eq=False)
class Place:
    """Where a sequence lies. int64 [num_tables] each: first token of its range, and tokens that it holds there."""

    starts: Int64Array
    capacities: Int64Array

    @property
    def num_tokens(self) -> int:
        """Tokens for which there is room in every table."""
        return int(self.capacities.min())


class Row:
    """An open sequence: its tokens, how far they are computed, and where it lies (None until it first reserves)."""

    __slots__ = (
        "_tokens",
        "account",
        "id",
        "most_tokens",
        "num_computed",
        "num_tokens",
        "place",
        "reserved",
        "room",
    )

    def __init__(self, row_id: int, tokens: Int32Array, most_tokens: int, account: int = 0) -> None:
        self.id = row_id
        self.account = account
        self._tokens = tokens.copy()
        self.num_tokens = len(tokens)
        self.most_tokens = most_tokens  # it will not have more
        self.num_computed = 0
        self.reserved = 0
        self.place: Place | None = None
        self.room = 0  # of its place

    @property
    def tokens(self) -> Int32Array:
        """The known tokens; to be read at once, not kept."""
        return self._tokens[: self.num_tokens]

    def append(self, tokens: Int32Array) -> None:
        end = self.num_tokens + len(tokens)
        if end > len(self._tokens):
            grown = np.empty(max(2 * len(self._tokens), end), np.int32)
            grown[: self.num_tokens] = self.tokens
            self._tokens = grown
        self._tokens[self.num_tokens : end] = tokens
        self.num_tokens = end

    def settle_in(self, place: Place) -> None:
        self.place = place
        self.room = place.num_tokens


class RowSpace(Protocol):
    """See the module's text."""

    num_tables: int
    num_units: int
    longest: int
    unit: str
    grows: bool  # whether a row that runs takes more units as it becomes longer

    @property
    def num_free(self) -> int:
        """Units that nobody has."""
        ...

    @property
    def largest_free(self) -> int:
        """Units that one sequence could be given now."""
        ...

    @property
    def tops(self) -> list[int]:
        """For each table, the end in tokens of what was ever handed out."""
        ...

    def units_alone(self, num_tokens: int) -> int:
        """Units that a sequence of so many tokens holds at most at any time, alone. Never falls as they grow."""
        ...

    def limit(self, row: Row) -> int:
        """Tokens that the row may ever have."""
        ...

    def useful(self, row: Row) -> int:
        """Tokens of the row's place that it may come to."""
        ...

    def units_needed(self, row: Row, end: int) -> int:
        """Units it takes for the row to hold `end` tokens; what it has stays with it until then."""
        ...

    def find(self, row: Row, end: int) -> Place | None:
        """A place where the row holds `end` tokens, taken; None if there is no room, and nothing is taken then."""
        ...

    def give(self, place: Place, kept: Place | None) -> None:
        """Free the ranges of `place` that are not ranges of `kept`."""
        ...

    def units_of(self, place: Place, kept: Place | None) -> int:
        """Units of the ranges of `place` that are not ranges of `kept`."""
        ...

    def check(self, places: list[Place]) -> None:
        """Prove that what is out is what these places have, each range once (given twice: the same range)."""
        ...
