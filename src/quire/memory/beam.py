"""Beam search without moving keys and values: a table [beam, position] of where each beam's token lies in one buffer.

All beams of a search are one sequence of the cache: its tokens are the prompt's, once, and then, for every position
after it, one for each beam. `rows[b, p]` is the number, within that sequence, of the token that beam b has at
position p. The kernel reads it as block tables of block size 1 (`GrowingStorage.token_view`). Continuing with other
beams rewrites only this small table; a cache with a row for each beam has to gather all of its keys and values.

Not a search: the caller chooses the beams that continue.

Invariants
    T1  the prompt's part of the table is the same for all beams.
    T2  a row is written once, by `append`, and named only by beams that descend from the one it was written for.
    T3  rows count from the sequence's first token: they stay valid when a larger buffer replaces the old one.

Cost: `append` O(beams); `reorder` 4 bytes a beam and generated position; `block_tables` 4 a beam and position.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.errors import ArgumentError

__all__ = ["BeamTable"]


class BeamTable:
    """The table of `num_beams` beams that continue a prompt of `num_prompt_tokens` tokens."""

    def __init__(self, num_beams: int, num_prompt_tokens: int) -> None:
        if num_beams < 1 or num_prompt_tokens < 1:
            raise ArgumentError(
                f"expected at least one beam and a prompt token, got {num_beams} and {num_prompt_tokens}"
            )
        self.num_beams = num_beams
        self.num_prompt_tokens = num_prompt_tokens
        self.length = num_prompt_tokens  # positions that every beam has
        self._rows = np.empty((num_beams, num_prompt_tokens + 64), np.int32)
        self._rows[:, :num_prompt_tokens] = np.arange(num_prompt_tokens)

    @property
    def rows(self) -> np.ndarray:
        """int32 [num_beams, length]; a view, valid until the next call."""
        return self._rows[:, : self.length]

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence: the prompt's, and one of each beam for every later position."""
        return self.num_prompt_tokens + self.num_beams * (self.length - self.num_prompt_tokens)

    def append(self) -> None:
        """Add a position: beam b's token becomes token `num_tokens + b` of the sequence."""
        if self.length == self._rows.shape[1]:
            rows = np.empty((self.num_beams, 2 * self.length), np.int32)
            rows[:, : self.length] = self.rows
            self._rows = rows
        first = self.num_tokens
        self._rows[:, self.length] = np.arange(first, first + self.num_beams)
        self.length += 1

    def reorder(self, parents: Any) -> None:
        """Beam b continues what beam `parents[b]` was. No key or value is touched."""
        index = np.asarray(parents)
        if index.shape != (self.num_beams,) or index.dtype.kind not in "iu":
            raise ArgumentError(
                f"expected {self.num_beams} integers, the parent of each beam, got {index.dtype} {list(index.shape)}"
            )
        if index.size and not 0 <= int(index.min()) <= int(index.max()) < self.num_beams:
            raise ArgumentError(f"expected parents of 0 .. {self.num_beams - 1}, got {index.tolist()}")
        generated = slice(self.num_prompt_tokens, self.length)
        self._rows[:, generated] = self._rows[index, generated]

    def block_tables(self, entry: int) -> np.ndarray:
        """int32 [num_beams, length], blocks of one token; `entry`: the sequence's entry in the layer's table."""
        return self.rows + np.int32(entry)

    def slots(self, entry: int) -> np.ndarray:
        """int64 [num_beams]: slot of the newest token of each beam, in the view of blocks of one token."""
        return self.rows[:, -1].astype(np.int64) + entry
