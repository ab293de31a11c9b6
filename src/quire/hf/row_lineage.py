"""`RowLineage`: how far the rows of a batch are copies of one another, so that a reorder copies only what differs.

A beam search continues some rows several times: the rows that descend from one row equal it up to that step, and the
next reorder among them moves the tokens behind it only, mostly a few. Tokens not known to be equal count as different.

Invariants
    L1  in rows r and s the positions below `equal[r, s]` hold the same bytes; it is symmetric.

Cost: `reorder` O(rows^2) numbers; no token is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["RowLineage"]


class RowLineage:
    """Of `num_rows` rows, about which nothing is known."""

    def __init__(self, num_rows: int) -> None:
        self._equal = np.zeros((num_rows, num_rows), np.int64)

    def copy(self) -> RowLineage:
        made = RowLineage(0)
        made._equal = self._equal.copy()
        return made

    def equal_until(self, order: Sequence[int]) -> list[int]:
        """For each row r, the position before which it equals row `order[r]`; the number of rows stays."""
        return self._equal[np.arange(len(order)), np.asarray(order)].tolist()

    def reorder(self, order: Sequence[int], num_tokens: int) -> None:
        """Records that row r has become what row `order[r]` was, in the first `num_tokens` positions."""
        sources = np.asarray(order)
        self._equal = self._equal[np.ix_(sources, sources)]
        self._equal[sources[:, None] == sources] = num_tokens

    def forget_from(self, num_tokens: int) -> None:
        """Records that positions from `num_tokens` on will be written anew."""
        np.minimum(self._equal, num_tokens, out=self._equal)
