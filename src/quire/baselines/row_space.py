"""Where sequences that lie in one piece may lie: what `RowCache` needs of it, and what a place is.

Two of them: `arena.Arena` (contiguous: one range for good) and `buffers.Buffers` (growing: a buffer for each layer,
replaced by a larger one). They count *blocks*: tokens of the arena, pages of the buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from quire.cache import arguments
from quire.cache.known_tokens import KnownTokens
from quire.cache.protocol import CacheSequence, Int32Array, Int64Array

__all__ = ["Row", "RowRanges", "RowSpace"]


@dataclass(frozen=True, eq=False)
class RowRanges:
    """Where a sequence lies. int64 [num_tables] each: first token of its range, and tokens that it holds there."""

    starts: Int64Array
    capacities: Int64Array

    @property
    def num_tokens(self) -> int:
        """Tokens for which there is room in every table."""
        return int(self.capacities.min())


class Row(CacheSequence):
    """An open sequence: its tokens, how far they are computed, and where it lies (None until it first reserves)."""

    __slots__ = (
        "_known",
        "id",
        "is_open",
        "most_tokens",
        "num_computed",
        "owner_id",
        "place",
        "reserved",
        "room",
    )

    def __init__(self, row_id: int, tokens: Int32Array, most_tokens: int, owner_id: int = 0) -> None:
        self._known = KnownTokens(tokens)
        self.is_open = True
        self.id = row_id
        self.owner_id = owner_id
        self.most_tokens = most_tokens  # it will not have more
        self.num_computed = 0
        self.reserved = 0
        self.place: RowRanges | None = None
        self.room = 0  # of its place

    def __repr__(self) -> str:
        return f"Sequence(id={self.id})"

    def _require_open(self, where: str) -> None:
        if not self.is_open:
            raise arguments.closed(self.id, where)

    @property
    def tokens(self) -> Int32Array:
        self._require_open("tokens")
        return self._known.tokens.copy()

    @property
    def num_tokens(self) -> int:
        self._require_open("num_tokens")
        return self._known.num_tokens

    @property
    def num_cached_tokens(self) -> int:
        self._require_open("num_cached_tokens")
        return 0  # nothing is shared

    @property
    def num_computed_tokens(self) -> int:
        self._require_open("num_computed_tokens")
        return self.num_computed

    @property
    def is_findable(self) -> bool:
        self._require_open("is_findable")
        return False

    def append(self, token_ids: Any) -> None:
        self._require_open("append")
        self._known.append(arguments.token_array(token_ids))

    def block_table(self, group: int = 0) -> Int32Array:
        """One entry, where its range of table `group` begins; none before it first reserves."""
        self._require_open("block_table")
        starts = () if self.place is None else self.place.starts[group : group + 1]
        return np.array(starts, np.int32)

    def truncate(self, num_tokens: int) -> None:
        """Known tokens from there on are forgotten."""
        self._known.num_tokens = num_tokens

    def settle_in(self, place: RowRanges) -> None:
        self.place = place
        self.room = place.num_tokens


class RowSpace(Protocol):
    """See the module's text."""

    num_tables: int
    num_blocks: int
    longest: int
    block_name: str
    grows: bool  # whether a row that runs takes more blocks as it becomes longer

    @property
    def num_free(self) -> int:
        """Blocks that nobody has."""
        ...

    @property
    def largest_free(self) -> int:
        """Blocks that one sequence could be given now."""
        ...

    @property
    def tops(self) -> list[int]:
        """For each table, the end in tokens of what was ever handed out."""
        ...

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of so many tokens holds at most at any time, alone. Never falls as they grow."""
        ...

    def limit(self, row: Row) -> int:
        """Tokens that the row may ever have."""
        ...

    def useful(self, row: Row) -> int:
        """Tokens of the row's place that it may come to."""
        ...

    def blocks_needed(self, row: Row, end: int) -> int:
        """Blocks it takes for the row to hold `end` tokens; what it has stays with it until then."""
        ...

    def find(self, row: Row, end: int) -> RowRanges | None:
        """A place where the row holds `end` tokens, taken; None if there is no room, and nothing is taken then."""
        ...

    def give(self, place: RowRanges, kept: RowRanges | None) -> None:
        """Free the ranges of `place` that are not ranges of `kept`."""
        ...

    def blocks_of(self, place: RowRanges, kept: RowRanges | None) -> int:
        """Blocks of the ranges of `place` that are not ranges of `kept`."""
        ...

    def check(self, places: list[RowRanges]) -> None:
        """Prove that what is out is what these places have, each range once (given twice: the same range)."""
        ...
