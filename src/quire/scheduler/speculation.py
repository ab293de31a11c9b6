"""`Speculation`: chooses the draft tokens of a step, and counts how many of them were accepted.

Drafts are further rows of a decode (`sampling.proposers.proposer`). Their number follows two measurements: the share p
of a sequence's drafts that were accepted lately, and the seconds of a step by its rows (`step_costs`). The j-th draft
of a sequence is worth p^j tokens. The step gets the most valuable drafts, as many as give the most tokens a second, and
none if that is less than `_LEAST_GAIN` times the rate without. Where the cost is unknown, it gets `_NUM_TRIED` drafts a
sequence. A sequence without drafts forgets its share, so that it is tried again. After a step whose drafts would not
pay, the next `_REST` steps of as many sequences have none, and the cost of more rows is doubted; after one without
proposals, the next `_SHORT_REST`. In these, speculation costs nothing.

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
_PRIOR = 0.75, 1.5  # accepted and tried drafts that a sequence begins with
_KEPT_TRIED, _KEPT_IDLE = 0.96, 0.98  # of the share's weight: after a step with drafts, and at each look


class _SequenceDrafts:
    """The drafter of a sequence, and its share of accepted drafts, the newest weighing most."""

    __slots__ = ("_num_accepted", "_num_tried", "drafter", "num_known")

    def __init__(self, drafter: Drafter, num_known: int) -> None:
        self.drafter = drafter
        self.num_known = num_known  # output tokens that the drafter knows
        self._num_accepted = self._num_tried = 0.0

    def record(self, num_accepted: int, num_tried: int) -> None:
        self._num_accepted = self._num_accepted * _KEPT_TRIED + num_accepted
        self._num_tried = self._num_tried * _KEPT_TRIED + num_tried

    def share(self) -> float:
        """The share now; its weight falls."""
        self._num_accepted *= _KEPT_IDLE
        self._num_tried *= _KEPT_IDLE
        return (self._num_accepted + _PRIOR[0]) / (self._num_tried + _PRIOR[1])


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
        self.max_drafts = max_drafts
        self._max_step_drafts = max_step_drafts
        self._clock = clock
        self.costs = StepCosts()
        self.proposal_s = 0.0
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        self.num_accepted_by_position = [0] * max_drafts
        self._by_sequence: dict[RequestSequence, _SequenceDrafts] = {}
        self._rest = (0, 0)  # steps without drafts that are left, and the number of sequences that they have

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
            self._rest = (_SHORT_REST if divided else _REST, len(chosen))
        return drafts

    def _propose(self, divided: list[tuple[RequestSequence, int]]) -> dict[RequestSequence, list[int]]:
        wanted = [(self._drafter(sequence), count) for sequence, count in divided]
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
        shares = [self._of(sequence).share() for sequence, _ in limits]
        values = [
            (share**j, -j, index)
            for index, (share, (_, limit)) in enumerate(zip(shares, limits, strict=True))
            for j in range(1, limit + 1)
        ]
        values.sort(reverse=True)
        costs = self.costs.seconds(np.arange(num_sequences, num_sequences + min(room, len(values)) + 1))
        if costs is None and not self.costs.num_points:
            return []  # the first step is one without drafts
        if costs is None:
            tried = min(_NUM_TRIED, room // max(1, len(limits)))
            return [(sequence, min(limit, tried)) for sequence, limit in limits] if tried else []
        values = values[:room]
        gained = np.cumsum([num_sequences, *(value for value, _, _ in values)])
        if isinstance(self._proposer, ProposesTogether):
            rounds = np.maximum.accumulate([0, *(-j for _, j, _ in values)])
            costs = costs + rounds * self._proposer.round_seconds(len(limits))
        rates = gained / costs
        best = int(rates.argmax())
        if rates[best] < _LEAST_GAIN * rates[0]:
            self.costs.doubt(num_sequences)
            return []
        counts = [0] * len(limits)
        for _, _, index in values[:best]:
            counts[index] += 1
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
            of_sequence.drafter.extend(sequence.output_ids[of_sequence.num_known :])
            of_sequence.drafter.close()

    def forget(self, namespace: bytes) -> None:
        """Content of the namespace was dropped."""
        self._proposer.forget(namespace)

    def _of(self, sequence: RequestSequence) -> _SequenceDrafts:
        found = self._by_sequence.get(sequence)
        if found is None:
            key = sequence.request.key
            namespace = None if key.extra_keys else key.namespace
            drafter = self._proposer.open(sequence.token_ids().tolist(), namespace)
            if isinstance(drafter, DrawsLikeRequest):
                drafter.draw_like(sequence.request.params, sequence.request.seed, sequence.index)
            found = self._by_sequence[sequence] = _SequenceDrafts(drafter, len(sequence.output_ids))
        return found

    def _drafter(self, sequence: RequestSequence) -> Drafter:
        """The sequence's drafter, with all known tokens."""
        of_sequence = self._of(sequence)
        if of_sequence.num_known < len(sequence.output_ids):
            of_sequence.drafter.extend(sequence.output_ids[of_sequence.num_known :])
            of_sequence.num_known = len(sequence.output_ids)
        return of_sequence.drafter
