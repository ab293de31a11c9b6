"""`Speculation`: chooses the draft tokens of a step, and counts how many of them were accepted.

Drafts are further rows of a decode (`sampling.proposers.proposer`). Their number follows two measurements: the share p
of a sequence's drafts that were right lately, and the seconds of a step by its rows (`step_costs`). With n drafts a
sequence gets 1 + p + ... + p^n tokens of a step; each further row makes the step longer for all. The step gets the
drafts with the least mean time of a token over its sequences, and none if they make it less than `_LEAST_GAIN` times
shorter. Where the cost is unknown, each sequence gets `_NUM_TRIED`. After a step whose drafts would not pay, the next
`_REST` steps of as many sequences have none, and the cost of more rows is doubted; after one without proposals, the
next `_SHORT_REST`. In these, speculation costs nothing.

In a step whose drafts would not pay, up to `_NUM_GUESSING` sequences guess: their drafters propose, no row is computed,
and the tokens that come next show how many proposals were right. So the share of a text is known before its drafts cost
anything. A draft model's proposals cost too much for this: there, a sequence without drafts forgets its share, so that
it is tried again.

A step that computes a prompt has no drafts: its rows are not cheap, and the prompt's requests wait for it.

Invariant
    P1  drafts exist within one step only. Between steps no cache sequence knows a token that was not drawn.

Cost: O(sequences) a step, at most `_MAX_SEQUENCES`, and the proposer's for those that get drafts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from quire.config import MAX_STEP_DRAFTS
from quire.sampling.proposers.proposer import Drafter, DrawsLikeRequest, Proposer, ProposesTogether
from quire.scheduler.request import RequestSequence
from quire.scheduler.step_costs import StepCosts

__all__ = ["Speculation"]

_LEAST_GAIN = 1.05
_NUM_TRIED = 3
_MAX_SEQUENCES = 64  # of a step with drafts
_REST, _SHORT_REST = 15, 2
_NUM_GUESSING, _NUM_GUESSED = 8, 8  # sequences of a step, and tokens of each
_NUM_PRIOR = 1.5  # drafts that a sequence begins with
_PRIOR, _PRIOR_WITH_GUESSES = 0.5, 0.2  # the share of these
# Of the share's weight: after drafts or a guess, and at each look without guesses.
_KEPT_TRIED, _KEPT_IDLE = 0.96, 0.98


class _SequenceDrafts:
    """The drafter of a sequence, and the share of its drafts and guesses that were right, the newest weighing most."""

    __slots__ = ("_guess", "_num_accepted", "_num_tried", "_prior", "drafter", "num_known")

    def __init__(self, drafter: Drafter, num_known: int, prior: float) -> None:
        self.drafter = drafter
        self.num_known = num_known  # output tokens that the drafter knows
        self._num_accepted = self._num_tried = 0.0
        self._prior = prior
        self._guess: Sequence[int] = ()  # of the tokens behind those

    def extend(self, output_ids: Sequence[int]) -> None:
        """output_ids: all of the sequence."""
        if self.num_known == len(output_ids):
            return
        new = output_ids[self.num_known :]
        self.drafter.extend(new)
        self.num_known = len(output_ids)
        if len(self._guess):
            compared = list(zip(self._guess, new, strict=False))
            num_right = next((i for i, (a, b) in enumerate(compared) if a != b), len(compared))
            self.record(num_right, num_right + (num_right < len(compared)))
            self._guess = ()

    def guess(self, num_tokens: int) -> bool:
        """Has the drafter propose for the share alone. Whether it did."""
        self._guess = self.drafter.propose(num_tokens)
        return len(self._guess) > 0

    def record(self, num_accepted: int, num_tried: int) -> None:
        self._num_accepted = self._num_accepted * _KEPT_TRIED + num_accepted
        self._num_tried = self._num_tried * _KEPT_TRIED + num_tried

    def share(self) -> float:
        return (self._num_accepted + self._prior * _NUM_PRIOR) / (self._num_tried + _NUM_PRIOR)

    def forget(self) -> None:
        """The share weighs less."""
        self._num_accepted *= _KEPT_IDLE
        self._num_tried *= _KEPT_IDLE


class Speculation:
    """The drafts of one engine. max_drafts: of a sequence and step. max_step_drafts: of a step; of a model with state
    layers as many as there are slots for the states behind drafts.

    num_drafts: sequences that had drafts, counted each step. num_draft_tokens, num_accepted_tokens: drafts, and those
    that equalled the drawn token. num_accepted_by_position: the latter by their place among the drafts of their step.
    proposal_s: seconds that the last drafts took to propose.
    """

    def __init__(
        self,
        proposer: Proposer,
        max_drafts: int,
        max_step_drafts: int = MAX_STEP_DRAFTS,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._proposer = proposer
        self._guesses = not isinstance(proposer, ProposesTogether)
        self.max_drafts = max_drafts
        self._max_step_drafts = max_step_drafts
        self._clock = clock
        self.costs = StepCosts()
        self.proposal_s = 0.0
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        self.num_accepted_by_position = [0] * max_drafts
        self._by_sequence: dict[RequestSequence, _SequenceDrafts] = {}
        self._rest = (0, 0)  # steps without drafts that are left, and the number of sequences that they have
        self._first_guessing = 0  # place of the next sequence that guesses

    def choose(
        self, chosen: Sequence[tuple[RequestSequence, int]], num_tokens: int
    ) -> dict[RequestSequence, list[int]]:
        """The drafts of a step. chosen: its sequences and their numbers of tokens. num_tokens: the step's largest."""
        self.proposal_s = 0.0
        room = min(self._max_step_drafts, num_tokens - len(chosen))
        if room < 1 or len(chosen) > _MAX_SEQUENCES or any(n != 1 for _, n in chosen):
            return {}
        steps, num_sequences = self._rest
        if steps and num_sequences == len(chosen):
            self._rest = (steps - 1, num_sequences)
            return {}
        limits = [
            (s, min(self.max_drafts, s.request.max_tokens - len(s.output_ids) - 1))
            for s, _ in chosen
            if s.output_ids and s.request.beams is None
        ]
        limits = [(sequence, limit) for sequence, limit in limits if limit > 0]
        divided = self._divide(limits, len(chosen), room)
        drafts = self._propose(divided)
        if limits and not drafts and self.costs.num_points:
            self._rest = (_SHORT_REST if divided else self._guess(limits), len(chosen))
        return drafts

    def _guess(self, limits: list[tuple[RequestSequence, int]]) -> int:
        """Has some sequences guess, each in turn. Returns the steps until the guesses can be compared."""
        if not self._guesses:
            return _REST
        first = self._first_guessing % len(limits)
        self._first_guessing = first + _NUM_GUESSING
        guessing = [*limits[first:], *limits[:first]][:_NUM_GUESSING]
        guesses = [self._of(sequence).guess(min(limit, _NUM_GUESSED)) for sequence, limit in guessing]
        return _NUM_GUESSED - 1 if any(guesses) else _REST

    def _propose(self, divided: list[tuple[RequestSequence, int]]) -> dict[RequestSequence, list[int]]:
        wanted = [(self._of(sequence).drafter, count) for sequence, count in divided]
        began = self._clock()
        if isinstance(self._proposer, ProposesTogether):
            proposed = self._proposer.propose_all(wanted)
        else:
            proposed = [list(drafter.propose(count)) for drafter, count in wanted]
        self.proposal_s = self._clock() - began
        return {
            sequence: tokens[:count]
            for (sequence, count), tokens in zip(divided, proposed, strict=True)
            if tokens
        }

    def _divide(
        self, limits: list[tuple[RequestSequence, int]], num_sequences: int, room: int
    ) -> list[tuple[RequestSequence, int]]:
        """How many drafts each sequence gets; those that get some. limits: of each. num_sequences: of the step."""
        known = [self._of(sequence) for sequence, _ in limits]
        if not self._guesses:
            for of_sequence in known:
                of_sequence.forget()
        shares = np.array([of_sequence.share() for of_sequence in known])
        most = np.array([limit for _, limit in limits])
        # The steps that a token takes, by the number of drafts, and what each draft saves of them.
        steps = 1 / np.cumsum(shares[:, None] ** np.arange(most.max(initial=0) + 1), axis=1)
        saved = -np.diff(steps, axis=1)
        places, nths = np.nonzero(np.arange(saved.shape[1]) < most[:, None])
        order = np.lexsort((nths, -saved[places, nths]))[:room]
        places, nths = places[order], nths[order]
        costs = self.costs.seconds(num_sequences + np.arange(len(order) + 1))
        if costs is None and not self.costs.num_points:
            return []  # the first step is one without drafts
        if costs is None:
            tried = min(_NUM_TRIED, room // max(1, len(limits)))
            return [(sequence, min(limit, tried)) for sequence, limit in limits] if tried else []
        if isinstance(self._proposer, ProposesTogether):
            rounds = np.maximum.accumulate([0, *(nths + 1)])
            costs = costs + rounds * self._proposer.round_seconds(len(limits))
        seconds_of_token = costs * (num_sequences - np.cumsum([0.0, *saved[places, nths]]))
        best = int(seconds_of_token.argmin())
        if _LEAST_GAIN * seconds_of_token[best] > seconds_of_token[0]:
            self.costs.doubt(num_sequences)
            return []
        counts = np.bincount(places[:best], minlength=len(limits)).tolist()
        return [(sequence, n) for (sequence, _), n in zip(limits, counts, strict=True) if n]

    def record(self, sequence: RequestSequence, num_drafts: int, num_accepted: int) -> None:
        """Counts the drafts of a sequence in a computed step."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            self.num_accepted_by_position[position] += 1
        if (of_sequence := self._by_sequence.get(sequence)) is not None:
            of_sequence.record(num_accepted, num_accepted + (num_accepted < num_drafts))

    def stats(self) -> dict[str, Any]:
        """The counts since the start, for `LLM.stats`."""
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_accepted_by_position": list(self.num_accepted_by_position),
        }

    def close(self, sequence: RequestSequence) -> None:
        """Forgets an ended sequence."""
        of_sequence = self._by_sequence.pop(sequence, None)
        if of_sequence is not None:
            of_sequence.extend(sequence.output_ids)
            of_sequence.drafter.close()

    def forget(self, namespace: bytes) -> None:
        """Content of the namespace was dropped."""
        self._proposer.forget(namespace)

    def _of(self, sequence: RequestSequence) -> _SequenceDrafts:
        """The sequence's drafter and share, with all of its tokens."""
        found = self._by_sequence.get(sequence)
        if found is None:
            key = sequence.request.key
            namespace = None if key.extra_keys else key.namespace
            drafter = self._proposer.open(sequence.token_ids().tolist(), namespace)
            if isinstance(drafter, DrawsLikeRequest):
                drafter.draw_like(sequence.request.params, sequence.request.seed, sequence.index)
            prior = _PRIOR_WITH_GUESSES if self._guesses else _PRIOR
            found = self._by_sequence[sequence] = _SequenceDrafts(drafter, len(sequence.output_ids), prior)
        found.extend(sequence.output_ids)
        return found
