"""One step as the scheduler decided it: data for the runner and the sampler. Built once, never changed.

Cost of `build`: O(samples), and a copy of the tokens of prompt chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.engine.request import Sample

__all__ = ["ScheduledStep", "StepRefusedError"]


class StepRefusedError(Exception):
    """The storage has no memory for a step now: nothing was computed or written. Its cause is the CapacityError."""


@dataclass(slots=True)
class ScheduledStep:
    """One forward: `samples[i]` computes its next `num_new_tokens[i]` tokens, flattened into one row of T.

    sequence_ids: int64 [len(samples)], their cache sequences. input_ids, positions: int64 [T].
    logit_rows: int64 [m], the places in the row whose logits are wanted. sampled: the samples that draw a token;
    draw_rows: int64 [len(sampled)], which of the m each draws from.
    plan: the cache's StepPlan, its sequences in the order of `samples`.
    closed_ids: int64, cache sequences that were closed since the step before.
    """

    samples: list[Sample]
    sequence_ids: np.ndarray
    num_new_tokens: np.ndarray
    input_ids: np.ndarray
    positions: np.ndarray
    logit_rows: np.ndarray
    sampled: list[Sample]
    draw_rows: np.ndarray
    plan: Any
    closed_ids: np.ndarray

    @property
    def copying(self) -> list[Sample]:
        """The samples for which the storage copies something in this step: undone, they cannot go on as they are."""
        copying = np.zeros(len(self.samples), bool)
        for group in map(self.plan.group, range(self.plan.num_groups)):
            if len(group.copies):
                copying |= np.isin(group.block_tables, group.copies[:, 1]).any(axis=1)
        return [self.samples[at] for at in np.flatnonzero(copying).tolist()]

    @property
    def is_decode(self) -> bool:
        """Whether every sample computes its newest token and draws one: nothing but decodes."""
        return self.sampled is self.samples

    @property
    def is_prompt(self) -> bool:
        """Whether some sample computes more than its newest token."""
        return len(self.input_ids) > len(self.samples)

    @classmethod
    def build(
        cls,
        chosen: list[tuple[Sample, int]],
        sequence_ids: np.ndarray,
        num_new_tokens: np.ndarray,
        plan: Any,
        closed_ids: np.ndarray,
    ) -> ScheduledStep:
        """chosen: each sample and the number of tokens it computes, in the order of the plan."""
        samples = [sample for sample, _ in chosen]
        starts = np.array([sample.num_computed for sample in samples], np.int64)
        num_rows = int(num_new_tokens.sum())
        if num_rows == len(samples) and all(s.num_computed + 1 == s.num_tokens for s in samples):
            return cls._decodes(samples, sequence_ids, starts, num_new_tokens, plan, closed_ids)
        first = np.cumsum(num_new_tokens) - num_new_tokens
        positions = np.arange(num_rows, dtype=np.int64) + np.repeat(starts - first, num_new_tokens)
        input_ids = np.empty(num_rows, np.int64)
        for (sample, n), row in zip(chosen, first.tolist(), strict=True):
            start = sample.num_computed
            if start + 1 == sample.num_tokens:
                input_ids[row] = sample.last_token
            else:
                input_ids[row : row + n] = sample.token_ids()[start : start + n]
        logit_rows: list[int] = []
        draw_rows: list[int] = []
        sampled: list[Sample] = []
        last = -1
        for sample, n in chosen:
            last += n
            if sample.num_computed + n < sample.num_tokens:
                continue  # a chunk of a prompt that goes on
            draws = sample.unborn_siblings()
            sampled.append(sample)
            sampled += draws
            draw_rows += [len(logit_rows)] * (1 + len(draws))
            logit_rows.append(last)
        return cls(
            samples=samples,
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
        samples: list[Sample],
        sequence_ids: np.ndarray,
        positions: np.ndarray,
        num_new_tokens: np.ndarray,
        plan: Any,
        closed_ids: np.ndarray,
    ) -> ScheduledStep:
        """A step in which everybody computes its newest token and draws the next: the common one."""
        rows = np.arange(len(samples), dtype=np.int64)
        sampled, draw_rows = samples, rows
        if any(s.request.params.n > 1 for s in samples):
            draws = [[sample, *sample.unborn_siblings()] for sample in samples]
            sampled = [sample for siblings in draws for sample in siblings]
            draw_rows = np.repeat(rows, [len(siblings) for siblings in draws])
        return cls(
            samples=samples,
            sequence_ids=sequence_ids,
            num_new_tokens=num_new_tokens,
            input_ids=np.array([sample.last_token for sample in samples], np.int64),
            positions=positions,
            logit_rows=rows,
            sampled=sampled,
            draw_rows=draw_rows,
            plan=plan,
            closed_ids=closed_ids,
        )
