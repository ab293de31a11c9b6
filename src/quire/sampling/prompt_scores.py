"""`PromptScores`: the scores of one request's prompt.

The score of a token is its log probability behind the tokens before it: the float32 that generation gives for it.

The logits behind position p score the token at p + 1: a row of a step scores the next token. The first token has no
score. A score is computed by a step (`record`), or was kept beside the keys (`add_kept`); a request that asks for the
likeliest tokens too computes every row, as only scores are kept.

Cost: O(prompt) bytes; a call O(tokens it is about).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["MAX_SCORED_ROWS", "PromptScores"]

MAX_SCORED_ROWS = 128
"""Rows of a step that score prompts: no more rows of logits, each as wide as the vocabulary, exist at a time."""
_LONG_RUN = 32  # kept scores in a run that is worth opening the sequence again behind it


class PromptScores:
    """num_tokens: of the prompt. start: tokens before it need no score. num_top: likeliest tokens asked for.

    values: float32 [num_tokens], NaN where no score is known. entries: for outputs, see `RequestOutput`.
    """

    def __init__(self, num_tokens: int, start: int, num_top: int) -> None:
        self.start = max(1, start)
        self.num_top = num_top
        self.values: NDArray[np.float32] = np.full(num_tokens, np.nan, np.float32)
        self._top: dict[int, dict[int, float]] = {}
        self.is_filled = False
        """Whether the scores that were kept for the prompt are taken, since it has begun to wait."""

    @property
    def num_tokens(self) -> int:
        return len(self.values)

    def first_missing(self, position: int = 0) -> int:
        """The first token from `position` on whose score is missing; `num_tokens` if none is."""
        first = max(position, self.start)
        missing = np.isnan(self.values[first:])
        return first + int(missing.argmax()) if missing.any() else self.num_tokens

    @property
    def most_cached(self) -> int:
        """The most tokens of a hit: the row before the first missing score has to be computed."""
        return self.first_missing() - 1

    def rows(self, first: int, stop: int) -> range:
        """The positions in [first, stop), computed by one step, that score their next token: from the first whose score
        is missing on."""
        start = self.first_missing(first + 1) - 1
        return range(start, max(start, min(stop, self.num_tokens - 1)))

    def chunk(self, num_computed: int, num_tokens: int, num_rows: int) -> int:
        """How many of the next `num_tokens` tokens a step may compute while it may score `num_rows` rows.

        The chunk also ends where a long run of known scores begins: its K and V may be cached.
        """
        stop = num_computed + num_tokens
        if num_computed >= self.num_tokens:
            return num_tokens
        rows = self.rows(num_computed, stop)
        if len(rows) > num_rows:
            stop = rows[num_rows]
        missing = self.first_missing(num_computed + 1)
        known = np.isnan(self.values[missing:]).argmin() if missing < self.num_tokens else 0
        run = missing + int(known)
        if known and run - 1 < stop and self.first_missing(run) - run >= _LONG_RUN:
            stop = run - 1
        return stop - num_computed

    def skips_from(self, num_computed: int) -> int:
        """Where rows are missing next, if a long run of known scores lies before; else `num_computed`."""
        row = self.first_missing(num_computed + 1) - 1
        return row if row - num_computed >= _LONG_RUN else num_computed

    def add_kept(self, values: NDArray[np.float32]) -> None:
        """Takes kept scores, NaN where there are none. values: float32, of the first tokens."""
        if not self.num_top:
            n = min(len(values), self.num_tokens)
            known = self.values[:n]
            np.copyto(known, values[:n], where=np.isnan(known))

    def record(self, position: int, entries: list[dict[int, float]]) -> None:
        """Takes the entries of the tokens from `position` on, each with the prompt's own token first."""
        for at, entry in enumerate(entries, position):
            self.values[at] = next(iter(entry.values()))
            if self.num_top:
                self._top[at] = entry

    def entries(self, tokens: NDArray[np.int32]) -> list[dict[int, float] | None]:
        """One entry a token of the prompt: None before `start`, else its score and those of the likeliest."""
        scores: list[dict[int, float] | None] = [None] * min(self.start, self.num_tokens)
        for at in range(self.start, self.num_tokens):
            scores.append(self._top[at] if self.num_top else {int(tokens[at]): float(self.values[at])})
        return scores
