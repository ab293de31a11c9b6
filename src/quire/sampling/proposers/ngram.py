"""Drafts from the text's own words: the tokens that followed the last occurrence of its newest tokens.

The longest end of the text that occurs earlier decides, at least `LEAST` and at most `MOST` tokens; among equally long
ones the latest. Drafts go on into themselves where the text repeats: behind "a b a b" they are "a b a b ...".

Cost of a proposal: one comparison of all tokens of the text in numpy, some 15 us and 1 us for each 2 000 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["LEAST", "MOST", "NgramDrafter", "NgramProposer", "TokenBuffer", "last_match"]

LEAST = 3
MOST = 32


class TokenBuffer:
    """Token ids in a buffer that grows. `tokens` is a view, valid until the next `extend`."""

    def __init__(self, token_ids: Sequence[int] | NDArray[np.integer]) -> None:
        self._buffer = np.array(token_ids, np.int32)
        self.num_tokens = len(self._buffer)

    @property
    def tokens(self) -> NDArray[np.int32]:
        return self._buffer[: self.num_tokens]

    def extend(self, token_ids: Sequence[int]) -> None:
        end = self.num_tokens + len(token_ids)
        if end > len(self._buffer):
            grown = np.empty(max(2 * len(self._buffer), end), np.int32)
            grown[: self.num_tokens] = self.tokens
            self._buffer = grown
        self._buffer[self.num_tokens : end] = token_ids
        self.num_tokens = end


def last_match(text: NDArray[np.int32], words: NDArray[np.int32]) -> tuple[int, int]:
    """(length, stop) of the longest end of `words`, at most `MOST` tokens, that ends in `text` at `stop`, the latest of
    equally long ones. (0, 0) if even the last token is not there."""
    if not len(words):
        return 0, 0
    stops = np.flatnonzero(text == words[-1]) + 1
    length = min(1, len(stops))
    most = min(MOST, len(words))
    for longer in range(2, min(LEAST, most) + 1):
        found = stops[(stops >= longer) & (text[stops - longer] == words[-longer])]
        if not len(found):
            break
        stops, length = found, longer
    if length < LEAST:
        return (length, int(stops[-1])) if length else (0, 0)
    # Few are left: all longer words at once.
    behind = np.arange(LEAST + 1, most + 1)
    first = stops[:, None] - behind
    is_equal = (first >= 0) & (text[np.maximum(first, 0)] == words[-behind])
    lengths = LEAST + np.logical_and.accumulate(is_equal, axis=1).sum(axis=1)
    longest = int(lengths.max())
    return longest, int(stops[np.flatnonzero(lengths == longest)[-1]])


class NgramDrafter:
    """The drafts of one text from that text."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._text = TokenBuffer(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """See `Drafter.extend`."""
        self._text.extend(token_ids)

    def propose(self, num_tokens: int) -> Sequence[int]:
        """See `Drafter.propose`."""
        tokens = self._text.tokens
        length, stop = last_match(tokens[:-1], tokens)
        if length < LEAST:
            return ()
        return tokens[stop + np.arange(num_tokens) % (len(tokens) - stop)].tolist()

    def close(self) -> None:
        """See `Drafter.close`."""


class NgramProposer:
    """Makes drafters that know their own text alone."""

    def open(self, token_ids: Sequence[int], namespace: bytes | None) -> NgramDrafter:
        """See `Proposer.open`."""
        return NgramDrafter(token_ids)

    def forget(self, namespace: bytes) -> None:
        """See `Proposer.forget`."""
