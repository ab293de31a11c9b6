"""The known token ids of a sequence, in a buffer that grows: the base class of every manager's sequences.

Cost: `append` O(new tokens) amortised; `tokens` a view.
"""

from __future__ import annotations

import numpy as np

from quire.cache.types import Int32Array

__all__ = ["KnownTokens"]


class KnownTokens:
    """`num_tokens` token ids. A subclass takes tokens back by lowering `num_tokens`."""

    __slots__ = ("_tokens", "num_tokens")

    def __init__(self, tokens: Int32Array) -> None:
        self._tokens = tokens.copy()
        self.num_tokens = len(tokens)

    @property
    def tokens(self) -> Int32Array:
        """The known tokens; valid until the next change, not to be kept."""
        return self._tokens[: self.num_tokens]

    def append(self, tokens: Int32Array) -> None:
        end = self.num_tokens + len(tokens)
        if end > len(self._tokens):
            grown = np.empty(max(2 * len(self._tokens), end), np.int32)
            grown[: self.num_tokens] = self.tokens
            self._tokens = grown
        self._tokens[self.num_tokens : end] = tokens
        self.num_tokens = end
