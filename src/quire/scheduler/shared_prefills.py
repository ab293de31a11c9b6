"""Which prompts are being computed right now, and whether a waiting one should wait for one of them.

Two requests with a common prefix that arrive together would both compute it: it is findable only once it is
committed. The second is better off waiting for that commit. Lives for one scheduling call.

Cost: `find` compares with the prompts under way that have the same first token: one number each, and a whole
prompt only where that agrees.
"""

from __future__ import annotations

import numpy as np

from quire.scheduler.request import Request, RequestSequence

__all__ = ["SharedPrefills"]


class SharedPrefills:
    """The prompts under way in this step, to be asked whether one of them computes another's next tokens."""

    def __init__(self, running: list[RequestSequence], block_size: int) -> None:
        self._block_size = block_size
        self._buckets: dict[tuple[bytes, int], list[tuple[RequestSequence, np.ndarray]]] = {}
        for sequence in running:
            if sequence.num_tokens - sequence.num_computed > 1:
                self.add(sequence, sequence.token_ids())

    def add(self, sequence: RequestSequence, tokens: np.ndarray) -> None:
        if not sequence.cache_sequence.is_findable:
            return  # nobody would find what it commits
        key = (sequence.request.key.namespace, int(tokens[0]))
        self._buckets.setdefault(key, []).append((sequence, tokens))

    def find(
        self, request: Request, tokens: np.ndarray, num_computed: int
    ) -> tuple[RequestSequence, int] | None:
        """The sequence that will compute at least one more block of `tokens` (or all that is missing but the
        last token), and the position it has to reach for that."""
        num_missing = len(tokens) - 1 - num_computed
        if num_missing <= 0:
            return None
        for other, theirs in self._buckets.get((request.key.namespace, int(tokens[0])), ()):
            if len(theirs) <= num_computed or theirs[num_computed] != tokens[num_computed]:
                continue
            if (other.request.key.extra_keys or None) != (request.key.extra_keys or None):
                continue
            shared = min(_common_length(tokens, theirs), len(tokens) - 1)
            if shared - num_computed >= min(self._block_size, num_missing) and other.num_computed < shared:
                return other, shared
        return None


def _common_length(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    different = a[:length] != b[:length]
    return int(different.argmax()) if different.any() else length
