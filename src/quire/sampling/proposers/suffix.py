"""Drafts from the text's own words, and from answers that were given to earlier requests of the same namespace.

A namespace has the newest answers that ended in it, each behind the last words before it: at most `NUM_TOKENS` tokens,
in host memory, 4 bytes each. They do not depend on what the cache has evicted. The longest match decides (`ngram`), the
text's own if both are as long. `drop` of any content of a namespace forgets all of its answers.

Invariant
    T1  a draft is from its own text or from one of the same namespace, which no other tenant and no other salt has. A
        text with extra keys gives no other text a draft, and gets none of another.

Cost of a proposal: as `ngram`, over the text and the namespace's answers: some 30 us with 65 536 tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from quire.sampling.proposers.ngram import LEAST, MOST, NgramDrafter, TokenBuffer, last_match

__all__ = ["NUM_NAMESPACES", "NUM_TOKENS", "SuffixDrafter", "SuffixProposer"]

NUM_TOKENS = 65_536  # of a namespace
NUM_NAMESPACES = 64  # the last used
_END = -1  # behind each answer


class _Answers(TokenBuffer):
    """The newest answers of a namespace."""

    def __init__(self) -> None:
        super().__init__(())

    def add(self, token_ids: Sequence[int]) -> None:
        self.extend([*token_ids[-NUM_TOKENS // 2 :], _END])
        if self.num_tokens > NUM_TOKENS:  # forgets the older half at once
            kept = self.tokens[-NUM_TOKENS // 2 :].tolist()
            self.num_tokens = 0
            self.extend(kept)


class SuffixDrafter(NgramDrafter):
    """The drafts of one text. answers: of its namespace; None for a text that shares nothing."""

    def __init__(self, token_ids: Sequence[int], answers: _Answers | None) -> None:
        super().__init__(token_ids)
        self._answers = answers
        self._first = max(0, len(token_ids) - MOST)  # of the tokens that other texts may see

    def propose(self, num_tokens: int) -> Sequence[int]:
        """See `Drafter.propose`."""
        tokens = self._text.tokens
        if self._answers is None or not self._answers.num_tokens:
            return super().propose(num_tokens)
        length, stop = last_match(self._answers.tokens, tokens[-MOST:])
        if length < LEAST or length <= last_match(tokens[:-1], tokens)[0]:
            return super().propose(num_tokens)
        behind = self._answers.tokens[stop : stop + num_tokens]
        ends = np.flatnonzero(behind == _END)
        return behind[: ends[0] if len(ends) else None].tolist()

    def close(self) -> None:
        """See `Drafter.close`."""
        if self._answers is not None:
            self._answers.add(self._text.tokens[self._first :].tolist())


class SuffixProposer:
    """Makes drafters that know the answers of their namespace."""

    def __init__(self) -> None:
        self._by_namespace: OrderedDict[bytes, _Answers] = OrderedDict()

    def open(self, token_ids: Sequence[int], namespace: bytes | None) -> SuffixDrafter:
        """See `Proposer.open`."""
        if namespace is None:
            return SuffixDrafter(token_ids, None)
        answers = self._by_namespace.setdefault(namespace, _Answers())
        self._by_namespace.move_to_end(namespace)
        if len(self._by_namespace) > NUM_NAMESPACES:
            self._by_namespace.popitem(last=False)
        return SuffixDrafter(token_ids, answers)

    def forget(self, namespace: bytes) -> None:
        """See `Proposer.forget`."""
        answers = self._by_namespace.pop(namespace, None)
        if answers is not None:  # open drafters have it too
            answers.num_tokens = 0
