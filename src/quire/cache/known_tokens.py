"""The token ids that are known of a sequence, in a buffer that grows: what every manager's sequences begin with.

Cost: `append` O(new tokens) amortised; `tokens` a view.
"""

from __future__ import annotations

import numpy as np

from quire.cache.types import Int32Array

__all__ = ["KnownTokens"]


class KnownTokens:
    """`num_tokens` token ids. Whoever takes some back lowers `num_tokens`."""

    __slots__ = ("_tokens", "num_tokens")

    def __init__(self, tokens: Int32Array) -> None:
        self._tokens = tokens.copy()
        self.num_tokens = len(tokens)

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
