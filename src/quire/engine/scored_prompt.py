"""`ScoredPrompt`: the log probability of each token of a prompt, and what follows from them.

Cost: O(tokens) a property, computed at each access.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import ArgumentError, CancelledError
from quire.sampling.params import SamplingParams
from quire.scheduler.prompts import split
from quire.scheduler.request import RequestOutput

__all__ = ["ScoredPrompt", "perplexity_of", "score_params"]


@dataclass(frozen=True)
class ScoredPrompt:
    """The score of each token of a prompt: its log probability (natural logarithm) behind the tokens before it.

    token_ids: the prompt's tokens. logprobs: a score for each; None for the first token, and for those before `start`.
    num_cached_tokens: tokens of the prompt found in memory or in a tier and not computed.
    """

    token_ids: list[int]
    logprobs: list[float | None]
    num_cached_tokens: int = 0

    @classmethod
    def of(cls, output: RequestOutput) -> ScoredPrompt:
        """From the last output of a request with `prompt_logprobs`. *raises:* the error of the request."""
        if output.prompt_logprobs is None or output.error is not None:
            raise output.error or CancelledError("the request was ended elsewhere")
        scores = [None if entry is None else next(iter(entry.values())) for entry in output.prompt_logprobs]
        return cls(list(output.prompt_token_ids), scores, output.num_cached_tokens)

    @property
    def num_scored(self) -> int:
        """The number of tokens that have a score."""
        return sum(score is not None for score in self.logprobs)

    @property
    def total(self) -> float:
        """The sum of the scores: the log probability of the scored tokens together; 0 without any."""
        return math.fsum(score for score in self.logprobs if score is not None)

    @property
    def perplexity(self) -> float:
        """exp(-total / num_scored); NaN without scores."""
        return perplexity_of(self.total, self.num_scored)


def perplexity_of(total: float, num_scored: int) -> float:
    """exp of the mean negative score; NaN without scores, infinity if it is too large for a float."""
    if not num_scored:
        return math.nan
    mean = -total / num_scored
    return math.exp(mean) if mean < 709 else math.inf


def score_params(prompts: Any, start: int | Sequence[int]) -> SamplingParams | list[SamplingParams]:
    """The parameters of requests that compute scores and generate nothing. *raises:* ArgumentError."""
    if not isinstance(start, Sequence):
        return _params(start)
    if len(start) != (num_prompts := len(split(prompts))):
        raise ArgumentError(
            f"expected a position, or one for each of the {num_prompts} prompts, got {len(start)} - in `start`"
        )
    return [_params(position) for position in start]


def _params(start: Any) -> SamplingParams:
    if isinstance(start, bool) or not hasattr(start, "__index__") or start < 0:
        raise ArgumentError(f"expected a position of 0 or more, got {start!r} - in `start`")
    return SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=0, prompt_logprobs_start=int(start))
