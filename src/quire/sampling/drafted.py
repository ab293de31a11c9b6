"""Draws the tokens of sequences with drafts: the sampler's own draw at each row, as long as it equals the draft.

The rows of a sequence are those behind its newest token and behind each of its drafts. Row after row, the sampler draws
with the tokens that came before: penalties, masks, grammar, rules, noise and log probabilities are those of a step
without drafts. The first token that differs from its draft, or that ends the sequence, is the last one: the rows behind
it have computed another text.

Invariant
    D1  tokens, `logprobs`, `matcher` and `error` of a sequence are those that one step a token would have given it.

Cost: one look for the likeliest tokens of all rows, and one call of the sampler for each row of the sequence with most
accepted drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, TypeVar

import numpy as np
import torch

from quire.sampling.greedy import most_likely
from quire.sampling.sampler import DrawingSequence, SamplingRequest, sample_tokens

__all__ = ["sample_drafted"]


class _EndingRequest(SamplingRequest, Protocol):
    @property
    def stop_ids(self) -> Collection[int]: ...


class DraftedSequence(DrawingSequence, Protocol):
    """The part of a request's sequence that the draws over its drafts need."""

    @property
    def request(self) -> _EndingRequest: ...


Drafted = TypeVar("Drafted", bound=DraftedSequence)


def sample_drafted(
    logits: torch.Tensor,
    sequences: Sequence[Drafted],
    rows: np.ndarray,
    drafts: Mapping[Drafted, Sequence[int]],
    choose: Callable[[torch.Tensor], tuple[np.ndarray, np.ndarray]] = most_likely,
) -> tuple[np.ndarray, dict[Drafted, list[int]]]:
    """One token for each sequence, and all tokens of each sequence with drafts.

    logits, sequences, rows, choose: as of `sample_tokens`; rows[i] + j is the row behind draft j of sequences[i].
    drafts: of some of the sequences, one token or more each; their length limits allow one token more than drafts.
    Returns int64 [len(sequences)] as `sample_tokens`, and the drawn tokens: none if the first draw failed, and with
    `error` those before the failed draw.
    """
    found = choose(logits)
    tokens = sample_tokens(logits, sequences, rows, lambda _: found)
    row_of = dict(zip(sequences, rows.tolist(), strict=True))
    newest = dict(zip(sequences, tokens.tolist(), strict=True))
    num_before = {sequence: len(sequence.output_ids) for sequence in drafts}
    drawn: dict[Drafted, list[int]] = {sequence: [] for sequence in drafts}
    going_on = list(drafts)
    try:
        while going_on := [s for s in going_on if _accept(s, newest[s], drafts[s], drawn[s])]:
            behind = np.array([row_of[s] + len(drawn[s]) for s in going_on], np.int64)
            more = sample_tokens(logits, going_on, behind, lambda _: found)
            newest = dict(zip(going_on, more.tolist(), strict=True))
    finally:
        for sequence, count in num_before.items():
            del sequence.output_ids[count:]
    return tokens, drawn


def _accept(sequence: DraftedSequence, token: int, drafts: Sequence[int], drawn: list[int]) -> bool:
    """Adds a drawn token to `drawn`; whether the row behind it counts. Then it is in `output_ids` too, for that row."""
    if sequence.error is not None:
        return False
    drawn.append(token)
    goes_on = (
        len(drawn) <= len(drafts)
        and token == drafts[len(drawn) - 1]
        and token not in sequence.request.stop_ids
    )
    if goes_on:
        sequence.output_ids.append(token)
    return goes_on
