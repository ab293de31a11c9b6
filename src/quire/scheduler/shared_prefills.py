"""`SharedPrefills`: the prompts in computation, and whether a waiting prompt should wait for one of them.

Two requests with a common prefix that arrive together would both compute it, because content is findable only after its
commit. The second one waits for that commit instead. An object lives for one scheduling call.

Cost: `find` compares one token with each prompt that has the same first token, and the whole prompt only if
it is equal.
"""

from __future__ import annotations

import numpy as np

from quire.scheduler.request import Request, RequestSequence

__all__ = ["SharedPrefills"]


class SharedPrefills:
    """The prompts that this step computes, by namespace and first token."""

    def __init__(self, running: list[RequestSequence], block_size: int) -> None:
        self._block_size = block_size
        self._buckets: dict[tuple[bytes, int], list[tuple[RequestSequence, np.ndarray]]] = {}
        for sequence in running:
            if sequence.num_tokens - sequence.num_computed > 1:
                self.add(sequence, sequence.token_ids())

    def add(self, sequence: RequestSequence, tokens: np.ndarray) -> None:
        if not sequence.cache_sequence.is_findable:
            return  # its commits are not findable
        key = (sequence.request.key.namespace, int(tokens[0]))
        self._buckets.setdefault(key, []).append((sequence, tokens))

    def find(
        self, request: Request, tokens: np.ndarray, num_computed: int
    ) -> tuple[RequestSequence, int] | None:
        """A sequence that will compute at least one more block of `tokens` (or all missing tokens but the last), and
        the position that it has to reach for that; None without one."""
        num_missing = len(tokens) - 1 - num_computed
        if num_missing <= 0:
            return None
        for other, other_tokens in self._buckets.get((request.key.namespace, int(tokens[0])), ()):
            if len(other_tokens) <= num_computed or other_tokens[num_computed] != tokens[num_computed]:
                continue
            if (other.request.key.extra_keys or None) != (request.key.extra_keys or None):
                continue
            shared = min(_common_length(tokens, other_tokens), len(tokens) - 1)
            if shared - num_computed >= min(self._block_size, num_missing) and other.num_computed < shared:
                return other, shared
        return None


def _common_length(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    different = a[:length] != b[:length]
    return int(different.argmax()) if different.any() else length
