"""One step as the scheduler decided it: data for the runner and the sampler. Built once, never changed.

Cost of `build`: O(sequences), and a copy of the tokens of prompt chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.cache.protocol import StepPlan
from quire.scheduler.request import RequestSequence

__all__ = ["ScheduledStep", "StepRefusedError"]


class StepRefusedError(Exception):
    """The storage has no memory for a step now: nothing was computed or written. Its cause is the CapacityError."""


@dataclass(slots=True)
class ScheduledStep:
    """One forward: `sequences[i]` computes its next `num_new_tokens[i]` tokens, flattened into one row of T.

    sequence_ids: int64 [len(sequences)], their cache sequences. input_ids, positions: int64 [T].
    logit_rows: int64 [m], the places in the row whose logits are wanted. sampled: the sequences that draw a token;
    draw_rows: int64 [len(sampled)], which of the m each draws from.
    plan: the cache's StepPlan, its sequences in the order of `sequences`.
    closed_ids: int64, cache sequences that were closed since the step before.
    """

    sequences: list[RequestSequence]
    sequence_ids: np.ndarray
    num_new_tokens: np.ndarray
    input_ids: np.ndarray
    positions: np.ndarray
    logit_rows: np.ndarray
    sampled: list[RequestSequence]
    draw_rows: np.ndarray
    plan: StepPlan
    closed_ids: np.ndarray

    @property
    def copying(self) -> list[RequestSequence]:
        """The sequences for which the storage copies something in this step: undone, they cannot go on as they are."""
        copying = np.zeros(len(self.sequences), bool)
        for group in map(self.plan.group, range(self.plan.num_groups)):
            if len(group.copies):
                copying |= np.isin(group.block_tables, group.copies[:, 1]).any(axis=1)
        return [self.sequences[at] for at in np.flatnonzero(copying).tolist()]

    @property
    def is_decode(self) -> bool:
        """Whether every sequence computes its newest token and draws one: nothing but decodes."""
        return self.sampled is self.sequences

    @property
    def is_prompt(self) -> bool:
        """Whether some sequence computes more than its newest token."""
        return len(self.input_ids) > len(self.sequences)

    @classmethod
    def build(
        cls,
        chosen: list[tuple[RequestSequence, int]],
        sequence_ids: np.ndarray,
        num_new_tokens: np.ndarray,
        plan: StepPlan,
        closed_ids: np.ndarray,
    ) -> ScheduledStep:
        """chosen: each sequence and the number of tokens it computes, in the order of the plan."""
        sequences = [sequence for sequence, _ in chosen]
        starts = np.array([sequence.num_computed for sequence in sequences], np.int64)
        num_rows = int(num_new_tokens.sum())
        if num_rows == len(sequences) and all(s.num_computed + 1 == s.num_tokens for s in sequences):
            return cls._decodes(sequences, sequence_ids, starts, num_new_tokens, plan, closed_ids)
        first = np.cumsum(num_new_tokens) - num_new_tokens
        positions = np.arange(num_rows, dtype=np.int64) + np.repeat(starts - first, num_new_tokens)
        input_ids = np.empty(num_rows, np.int64)
        for (sequence, n), row in zip(chosen, first.tolist(), strict=True):
            start = sequence.num_computed
            if start + 1 == sequence.num_tokens:
                input_ids[row] = sequence.last_token
            else:
                input_ids[row : row + n] = sequence.token_ids()[start : start + n]
        logit_rows: list[int] = []
        draw_rows: list[int] = []
        sampled: list[RequestSequence] = []
        last = -1
        for sequence, n in chosen:
            last += n
            if sequence.num_computed + n < sequence.num_tokens:
                continue  # a chunk of a prompt that goes on
            draws = sequence.unborn_siblings()
            sampled.append(sequence)
            sampled += draws
            draw_rows += [len(logit_rows)] * (1 + len(draws))
            logit_rows.append(last)
        return cls(
            sequences=sequences,
            sequence_ids=sequence_ids,
            num_new_tokens=num_new_tokens,
            input_ids=input_ids,
            positions=positions,
            logit_rows=np.array(logit_rows, np.int64),
            sampled=sampled,
            draw_rows=np.array(draw_rows, np.int64),
            plan=plan,
            closed_ids=closed_ids,
        )

    @classmethod
    def _decodes(
        cls,
        sequences: list[RequestSequence],
        sequence_ids: np.ndarray,
        positions: np.ndarray,
        num_new_tokens: np.ndarray,
        plan: StepPlan,
        closed_ids: np.ndarray,
    ) -> ScheduledStep:
        """A step in which everybody computes its newest token and draws the next: the common one."""
        rows = np.arange(len(sequences), dtype=np.int64)
        sampled, draw_rows = sequences, rows
        if any(s.request.params.n > 1 for s in sequences):
            draws = [[sequence, *sequence.unborn_siblings()] for sequence in sequences]
            sampled = [sequence for siblings in draws for sequence in siblings]
            draw_rows = np.repeat(rows, [len(siblings) for siblings in draws])
        return cls(
            sequences=sequences,
            sequence_ids=sequence_ids,
            num_new_tokens=num_new_tokens,
            input_ids=np.array([sequence.last_token for sequence in sequences], np.int64),
            positions=positions,
            logit_rows=rows,
            sampled=sampled,
            draw_rows=draw_rows,
            plan=plan,
            closed_ids=closed_ids,
        )
