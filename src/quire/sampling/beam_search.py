"""`BeamSearch`: the rules of one request's beam search. No tensors, no text, no model.

The rules are those of transformers' `generate(num_beams=width)` for one prompt. A *beam* is an answer that grows, a
*hypothesis* an answer that has ended. In each step every beam brings its likeliest next tokens; of all of them the
`num_candidates` best go on: the first `width` that end become hypotheses, and the first `width` that do not end are the
next beams. The score of a beam is the sum of its log probabilities, that of a hypothesis its sum divided by its length
to the power `length_penalty`; the best `width` hypotheses are kept. All sums and quotients are float32.

The search ends when no beam goes on, or when `width` hypotheses exist and `early_stopping` is True or no beam can do
better than the worst of them: at its present length, or with "never" and a positive length penalty at the largest one.

One difference: if fewer than `width` candidates are possible, there are fewer beams; `generate` fills up with copies.

Invariants
    B1  `scores` falls from beam to beam, and the score of `hypotheses` from one to the next.
    B2  there are at most `width` beams and at most `width` hypotheses; after the end there is no beam.

Cost: `advance` O(beams * num_candidates), without the model's vocabulary.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeAlias, TypeVar

import numpy as np

__all__ = ["BeamSearch", "Candidates", "Continuation", "EarlyStopping", "Hypothesis"]

EarlyStopping: TypeAlias = bool | Literal["never"]
Answer = TypeVar("Answer")


@dataclass(frozen=True, eq=False, slots=True)
class Candidates:
    """The likeliest next tokens of one beam, best first.

    token_ids: int64 [k]. log_probs: float32 [k], after the request's masks, biases and penalties; -inf: impossible.
    entries: of `SamplingParams.logprobs`, one for each token; None if not asked for.
    """

    token_ids: np.ndarray
    log_probs: np.ndarray
    entries: list[dict[int, float]] | None = None


@dataclass(frozen=True, slots=True)
class Continuation:
    """A beam of the next step: beam number `beam` of this step, with candidate number `place`. score: its sum."""

    beam: int
    place: int
    score: np.float32


@dataclass(frozen=True, slots=True)
class Hypothesis(Generic[Answer]):
    """An answer that has ended, and its score."""

    score: float
    answer: Answer


class BeamSearch(Generic[Answer]):
    """The search of one request.

    num_ends: number of tokens that may end an answer: there are so many times more candidates that `width` of them go
    on. max_tokens: length of the longest answer; its caller ends those.
    """

    def __init__(
        self,
        width: int,
        *,
        num_ends: int,
        max_tokens: int,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
    ) -> None:
        self.width = width
        self.num_candidates = max(2, 1 + num_ends) * width
        self._max_tokens = max_tokens
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self.num_tokens = 0  # of each beam
        self.scores: list[np.float32] = [np.float32(0.0)]  # of the beams, the best first
        self.hypotheses: list[Hypothesis[Answer]] = []  # the best first

    def advance(
        self, candidates: Sequence[Candidates], ended: Callable[[int, int], Answer | None]
    ) -> list[Continuation]:
        """Chooses the beams of the next step, the best first; an empty list is the end of the search.

        candidates: of each beam, in order. ended: the answer of a beam with one of its candidates, by (beam, place), if
        it ends there; else None.
        """
        totals = np.concatenate(
            [entry.log_probs + score for entry, score in zip(candidates, self.scores, strict=True)]
        )
        beams = np.repeat(np.arange(len(candidates)), [len(entry.log_probs) for entry in candidates])
        firsts = np.cumsum([0, *(len(entry.log_probs) for entry in candidates)])
        self.num_tokens += 1
        going_on: list[Continuation] = []
        best = np.argsort(-totals, kind="stable")[: self.num_candidates]
        for rank, at in enumerate(best.tolist()):
            beam, total = int(beams[at]), np.float32(totals[at])
            if not np.isfinite(total):
                break
            place = at - int(firsts[beam])
            answer = ended(beam, place)
            if answer is None:
                if len(going_on) < self.width:
                    going_on.append(Continuation(beam, place, total))
            elif rank < self.width:
                score = self._normalised(total, self.num_tokens)
                insort(self.hypotheses, Hypothesis(float(score), answer), key=lambda other: -other.score)
            if rank + 1 >= self.width and len(going_on) == self.width:
                break
        del self.hypotheses[self.width :]
        self.scores = [continuation.score for continuation in going_on]
        if self._is_done():
            self.scores = []
            return []
        return going_on

    def score_of(self, beam: int) -> float:
        """The score that beam number `beam` would have if it ended now."""
        return float(self._normalised(self.scores[beam], max(1, self.num_tokens)))

    def _normalised(self, total: np.float32, num_tokens: int) -> np.float32:
        return total / np.float32(num_tokens**self._length_penalty)

    def _is_done(self) -> bool:
        if not self.scores:
            return True
        if len(self.hypotheses) < self.width:
            return False
        if self._early_stopping is True:
            return True
        at_the_longest = self._early_stopping == "never" and self._length_penalty > 0.0
        length = self._max_tokens if at_the_longest else self.num_tokens
        return not self._normalised(self.scores[0], length) > np.float32(self.hypotheses[-1].score)
