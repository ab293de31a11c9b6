"""Builds a `Batch` from chosen sequences and the cache's plan.

Cost: O(sequences), and a copy of the tokens of prompt chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from quire.scheduler.request import RequestSequence
from quire.step import Batch, Int64Array, StepPlan

__all__ = ["make_batch"]


def make_batch(
    chosen: list[tuple[RequestSequence, int]],
    sequence_ids: Int64Array,
    num_new_tokens: Int64Array,
    plan: StepPlan,
    closed_ids: Int64Array,
    drafts: Mapping[RequestSequence, Sequence[int]],
) -> Batch[RequestSequence]:
    """The batch of a step. chosen: each sequence and its number of rows, in the order of the plan.

    drafts: of decodes; a decode with k drafts has k + 1 rows.
    """
    sequences: list[RequestSequence] = []
    starts: list[int] = []
    logit_rows: list[int] = []
    draw_rows: list[int] = []
    sampled: list[RequestSequence] = []
    scored: list[tuple[RequestSequence, range]] = []
    scored_rows: list[int] = []
    completed: list[RequestSequence] = []
    is_decode, last = True, -1
    for sequence, n in chosen:
        start = sequence.num_computed
        sequences.append(sequence)
        starts.append(start)
        last += n
        if sequence in drafts:
            sampled.append(sequence)
            draw_rows.append(len(logit_rows))
            logit_rows += range(last + 1 - n, last + 1)
            continue
        if sequence.request.scores is not None and (positions := sequence.scored_rows(n)):
            is_decode = False
            scored.append((sequence, positions))
            first = last + 1 - n - start
            scored_rows += range(first + positions.start, first + positions.stop)
        if start + n < sequence.num_tokens:
            is_decode = False
            continue  # the prompt has further chunks
        if sequence.only_computes:
            is_decode = False
            completed += [sequence, *sequence.unforked_siblings()]
            continue
        sampled.append(sequence)
        draw_rows.append(len(logit_rows))
        if n > 1:
            is_decode = False
        if sequence.request.beams is not None:
            is_decode = False  # its candidates are for the search to choose from
        elif sequence.request.params.n > 1 and (siblings := sequence.unforked_siblings()):
            is_decode = False
            sampled += siblings
            draw_rows += [len(logit_rows)] * len(siblings)
        logit_rows.append(last)
    positions = np.array(starts, np.int64)
    if last + 1 == len(sequences):  # one token per sequence
        input_ids = np.array([_token_at(sequence, sequence.num_computed) for sequence in sequences], np.int64)
    else:
        first = np.cumsum(num_new_tokens) - num_new_tokens
        positions = np.arange(last + 1, dtype=np.int64) + np.repeat(positions - first, num_new_tokens)
        input_ids = np.empty(last + 1, np.int64)
        for (sequence, n), row, start in zip(chosen, first.tolist(), starts, strict=True):
            if sequence in drafts:
                input_ids[row : row + n] = [sequence.last_token, *drafts[sequence]]
            elif n == 1:
                input_ids[row] = _token_at(sequence, start)
            else:
                input_ids[row : row + n] = sequence.token_ids()[start : start + n]
    return Batch(
        sequences=sequences,
        sequence_ids=sequence_ids,
        num_new_tokens=num_new_tokens,
        input_ids=input_ids,
        positions=positions,
        logit_rows=np.array(logit_rows + scored_rows, np.int64),
        sampled=sequences if is_decode and not drafts else sampled,
        draw_rows=np.array(draw_rows, np.int64),
        plan=plan,
        closed_ids=closed_ids,
        num_draw_rows=len(logit_rows),
        scored=scored,
        completed=completed,
        drafts=drafts,
    )


def next_decodes(
    batch: Batch[RequestSequence], tokens: Int64Array, plan: StepPlan, closed_ids: Int64Array
) -> Batch[RequestSequence]:
    """The batch after a batch of decodes: each sequence computes the token that it has just drawn."""
    return Batch(
        sequences=batch.sequences,
        sequence_ids=batch.sequence_ids,
        num_new_tokens=batch.num_new_tokens,
        input_ids=tokens,
        positions=batch.positions + 1,
        logit_rows=batch.logit_rows,
        sampled=batch.sequences,
        draw_rows=batch.draw_rows,
        plan=plan,
        closed_ids=closed_ids,
        num_draw_rows=batch.num_draw_rows,
    )


def _token_at(sequence: RequestSequence, position: int) -> int:
    if position + 1 == sequence.num_tokens:
        return sequence.last_token
    return int(sequence.token_ids()[position])
