"""`record_candidates`: the likeliest next tokens of beams, from the logits of a step.

All beams of a step at once: the log softmax of each row in float32, the request's masks, biases and penalties on it (as
transformers' `generate(num_beams=...)`, which applies them to log probabilities), then the largest. A row's candidates
do not depend on the other rows.

Cost: O(rows * vocabulary).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from quire.sampling.beam_search import Candidates
from quire.sampling.model_rules import RequestRules
from quire.sampling.params import SamplingParams
from quire.sampling.scores import logprobs_of

__all__ = ["BeamSequence", "CandidateSearch", "record_candidates"]


class CandidateSearch(Protocol):
    """The part of a beam search (`quire.scheduler.beam_group.BeamGroup`) that this module needs."""

    @property
    def num_candidates(self) -> int: ...


class _BeamRequest(Protocol):
    @property
    def params(self) -> SamplingParams: ...
    @property
    def rules(self) -> RequestRules | None: ...
    @property
    def beams(self) -> CandidateSearch | None: ...


class BeamSequence(Protocol):
    """The part of a beam (`quire.scheduler.request.RequestSequence`) that this module needs."""

    candidates: Candidates | None
    error: BaseException | None

    @property
    def request(self) -> _BeamRequest: ...


Beam = TypeVar("Beam", bound=BeamSequence)


def record_candidates(
    logits: torch.Tensor,
    beams: Sequence[Beam],
    edit: Callable[[torch.Tensor, Beam, SamplingParams], torch.Tensor],
) -> None:
    """Sets `candidates` of each beam, or its `error`.

    logits: float32 [beams, vocab], changed. edit: applies a request's masks, biases and penalties to a row.
    """
    table = torch.log_softmax(logits, dim=-1)
    raw = table.clone() if any(beam.request.params.logprobs is not None for beam in beams) else table
    groups: dict[int, list[int]] = {}
    for index, beam in enumerate(beams):
        if beam.request.params.changes_logits or beam.request.rules is not None:
            try:
                table[index] = edit(table[index], beam, beam.request.params)
            except Exception as error:  # fails only this beam's request
                beam.error = error
                continue
        assert beam.request.beams is not None  # as the caller's selection
        groups.setdefault(min(beam.request.beams.num_candidates, table.shape[1]), []).append(index)
    for count, members in groups.items():
        rows = table if len(members) == len(beams) else table[members]
        values, tokens = rows.topk(count, dim=-1)
        for index, log_probs, token_ids in zip(members, values.numpy(), tokens, strict=True):
            beam, entries = beams[index], None
            if (num_top := beam.request.params.logprobs) is not None:
                entries = logprobs_of(raw[index].expand(count, -1), token_ids, num_top)
            beam.candidates = Candidates(token_ids.numpy(), log_probs, entries)
