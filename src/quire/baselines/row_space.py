"""The space of contiguous sequences: the protocol that `RowCache` needs.

Two classes implement it: `arena.Arena` (contiguous: one fixed range) and `buffers.Buffers` (growing: a buffer for each
layer, replaced by a larger one). They count *blocks*: tokens of the arena, pages of the buffers.
"""

from __future__ import annotations

from typing import Protocol

from quire.baselines.row import Row, RowRanges

__all__ = ["RowSpace"]


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

    def blocks_of_extent(self, num_tokens: int) -> int:
        """Blocks of an extent."""
        ...

    def find_extent(self, num_tokens: int) -> RowRanges | None:
        """Take a range of `num_tokens` tokens in every table for a `SharedPlace`; None without room: nothing is
        taken then."""
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
