"""A proposer that knows how texts go on, spoils its drafts at a rate, and drafts in every step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.scheduler.request import RequestSequence
from quire.scheduler.speculation import Speculation

__all__ = ["SteadySpeculation", "TruthProposer", "texts_of"]


class _TruthDrafter:
    def __init__(self, proposer: TruthProposer, token_ids: Sequence[int]) -> None:
        self._proposer, self._tokens = proposer, list(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        self._tokens += token_ids

    def propose(self, num_tokens: int) -> Sequence[int]:
        return self._proposer.drafts(self._tokens, num_tokens)

    def close(self) -> None:
        self._proposer.num_closed += 1


class TruthProposer:
    """texts: prompts with their answers. share: of the drafts that are right, independently of each other."""

    def __init__(self, texts: list[list[int]], share: float, vocab_size: int, seed: int = 0) -> None:
        self._texts, self._share, self._vocab_size = texts, share, vocab_size
        self._rng = np.random.default_rng(seed)
        self.num_opened = self.num_closed = 0

    def open(self, token_ids: Sequence[int], namespace: bytes | None) -> _TruthDrafter:
        self.num_opened += 1
        return _TruthDrafter(self, token_ids)

    def forget(self, namespace: bytes) -> None:
        pass

    def drafts(self, tokens: list[int], num_tokens: int) -> list[int]:
        count = len(tokens)
        text = next((text for text in self._texts if text[:count] == tokens), [])
        true = text[count : count + num_tokens]
        # Behind the end of a known text all drafts are by chance.
        true += self._rng.integers(0, self._vocab_size, num_tokens - len(true)).tolist()
        spoiled = self._rng.random(num_tokens) >= self._share
        others = (np.array(true) + self._rng.integers(1, self._vocab_size, num_tokens)) % self._vocab_size
        return np.where(spoiled, others, true).tolist()


class SteadySpeculation(Speculation):
    """Gives each sequence as many drafts as it may have, whatever they cost."""

    def _divide(
        self, limits: list[tuple[RequestSequence, int]], num_sequences: int, room: int
    ) -> list[tuple[RequestSequence, int]]:
        divided: list[tuple[RequestSequence, int]] = []
        for sequence, limit in limits:
            count = min(limit, room)
            room -= count
            divided += [(sequence, count)] * (count > 0)
        return divided


def texts_of(outputs: Sequence[object]) -> list[list[int]]:
    """Each output's prompt with each of its answers."""
    return [
        [*output.prompt_token_ids, *one.token_ids]  # type: ignore[attr-defined]
        for output in outputs
        for one in output.outputs  # type: ignore[attr-defined]
    ]
