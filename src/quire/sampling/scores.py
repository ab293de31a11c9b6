"""Log probabilities of tokens from logits: of one drawn token, and of the tokens of prompts row by row.

Both are the log softmax of a row's raw logits in float32: a prompt's token has the bits that it has when it is drawn.

Cost: O(rows * vocabulary); a few rows at a time are widened to float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from quire.errors import QuireError
from quire.sampling.prompt_scores import PromptScores

__all__ = ["logprobs_of", "score_prompts"]

_ROWS = 16  # widened at a time: they stay in the processor's caches


class _ScoredRequest(Protocol):
    @property
    def request_id(self) -> str: ...
    @property
    def prompt_token_ids(self) -> np.ndarray: ...
    @property
    def scores(self) -> PromptScores | None: ...


class ScoredSequence(Protocol):
    """The part of a request's sequence (`quire.scheduler.request.RequestSequence`) that scoring needs."""

    error: BaseException | None

    @property
    def request(self) -> _ScoredRequest: ...


def logprobs_of(table: torch.Tensor, tokens: torch.Tensor, num_top: int) -> list[dict[int, float]]:
    """The entry of each row's token: itself first, then the `num_top` likeliest.

    table: float32 [rows, vocab], log probabilities. tokens: int64 [rows].
    """
    own = table.gather(1, tokens[:, None])[:, 0].tolist()
    entries = [{token: value} for token, value in zip(tokens.tolist(), own, strict=True)]
    if num_top:
        values, indices = table.topk(min(num_top, table.shape[1]), dim=-1)
        for entry, others, likeliest in zip(entries, indices.tolist(), values.tolist(), strict=True):
            for other, value in zip(others, likeliest, strict=True):
                entry.setdefault(other, value)
    return entries


def score_prompts(logits: torch.Tensor, scored: Sequence[tuple[ScoredSequence, range]]) -> None:
    """Records the scores of prompts' tokens.

    logits: [rows, vocab] of the model's dtype, on any device. scored: each sequence and its positions, in the order of
    the rows; the row of a position scores the next token.
    *changes:* the requests' scores; `error` of a sequence with a row that is not finite, whose scores stay missing.
    """
    first = 0
    for sequence, positions in scored:
        rows = logits[first : first + len(positions)]
        first += len(positions)
        request, scores = sequence.request, sequence.request.scores
        assert scores is not None
        tokens = torch.from_numpy(
            request.prompt_token_ids[positions.start + 1 : positions.stop + 1].astype(np.int64)
        )
        for start in range(0, len(rows), _ROWS):
            table = torch.log_softmax(rows[start : start + _ROWS].float().cpu(), dim=-1)
            own = tokens[start : start + _ROWS]
            if not torch.isfinite(table.amax(dim=-1)).all():
                sequence.error = QuireError(
                    "expected finite logits, got a NaN or infinity from the model - in the prompt of request "
                    f"{request.request_id!r}, behind token {positions.start + start} or one of the next {len(own)}"
                )
                break
            scores.record(positions.start + start + 1, logprobs_of(table, own, scores.num_top))
