"""The space of contiguous sequences: the protocol that `RowCache` needs, and the places in it.

Two classes implement it: `arena.Arena` (contiguous: one fixed range) and `buffers.Buffers` (growing: a buffer for each
layer, replaced by a larger one). They count *blocks*: tokens of the arena, pages of the buffers.
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
    """The place of a sequence. int64 [num_tables] each: first token of its range, and capacity of the range."""

    starts: Int64Array
    capacities: Int64Array

    @property
    def num_tokens(self) -> int:
        """Tokens for which every table has room."""
        return int(self.capacities.min())


class Row(CacheSequence):
    """An open sequence: its tokens, the number computed, and its place (None until it first reserves)."""

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
        self.most_tokens = most_tokens  # its limit
        self.num_computed = 0
        self.reserved = 0
        self.place: RowRanges | None = None
        self.room = 0  # tokens of its place

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
        """One entry, the beginning of its range of table `group`; empty before it first reserves."""
        self._require_open("block_table")
        starts = () if self.place is None else self.place.starts[group : group + 1]
        return np.array(starts, np.int32)

    def truncate(self, num_tokens: int) -> None:
        """Forget the known tokens from `num_tokens` on."""
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
    grows: bool  # whether a running row takes more blocks as it becomes longer

    @property
    def num_free(self) -> int:
        """Free blocks."""
        ...

    @property
    def largest_free(self) -> int:
        """Maximum blocks for one new sequence now."""
        ...

    @property
    def tops(self) -> list[int]:
        """For each table, the end in tokens of the highest range handed out so far."""
        ...

    def num_blocks_for(self, num_tokens: int) -> int:
        """Maximum blocks that a sequence of `num_tokens`, alone, holds at any time. Monotonic."""
        ...

    def limit(self, row: Row) -> int:
        """Maximum tokens of the row."""
        ...

    def useful(self, row: Row) -> int:
        """Tokens of the row's place that it may use."""
        ...

    def blocks_needed(self, row: Row, end: int) -> int:
        """Blocks to take for the row to hold `end` tokens; it keeps its present blocks until then."""
        ...

    def find(self, row: Row, end: int) -> RowRanges | None:
        """Take a place where the row holds `end` tokens; None without room, and then nothing is taken."""
        ...

    def give(self, place: RowRanges, kept: RowRanges | None) -> None:
        """Free the ranges of `place` that are not ranges of `kept`."""
        ...

    def blocks_of(self, place: RowRanges, kept: RowRanges | None) -> int:
        """Blocks of the ranges of `place` that are not ranges of `kept`."""
        ...

    def check(self, places: list[RowRanges]) -> None:
        """Check that the taken ranges are exactly those of these places (a range may be listed twice)."""
        ...
