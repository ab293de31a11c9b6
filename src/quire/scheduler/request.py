"""A request, its sequences and its outputs. Data only: nothing here decides or computes.

A *request* is one prompt and its parameters; a *sequence* is one of its `n` continuations, the unit that the scheduler
moves. The first sequence computes the prompt; the others are forked from it after that.

    State of a sequence          edge: function
    WAITING -> RUNNING           Scheduler.schedule admits it (a cache sequence is open while RUNNING or LOADING)
    WAITING -> LOADING           Scheduler.schedule begins to load its prefix from a tier
    LOADING -> RUNNING           Scheduler.schedule, after the load has ended, if there is a seat
    RUNNING, LOADING -> WAITING  Scheduler preempts it (its sequence is closed, its content stays findable)
    UNFORKED -> RUNNING|WAITING  Scheduler.update forks it from the first sequence
    any -> FINISHED              stop token, stop string, length, abort, error
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from quire.cache.prefix_key import NOBODYS, ResolvedKey
from quire.cache.protocol import CacheSequence
from quire.errors import ArgumentError
from quire.sampling.params import SamplingParams
from quire.sampling.prompt_scores import PromptScores
from quire.scheduler.beam_group import BeamGroup
from quire.scheduler.request_options import RequestOptions, cache_priority_number

if TYPE_CHECKING:
    from quire.offload.swap import Swapped
    from quire.offload.tier_load import LoadedSpan, Search, TierLoad
    from quire.sampling.beam_search import Candidates
    from quire.sampling.detokenizer import Detokenizer
    from quire.sampling.grammar import Matcher
    from quire.sampling.model_rules import RequestRules
    from quire.sampling.token_mask import TokenMask

__all__ = ["CompletionOutput", "Request", "RequestOutput", "RequestSequence", "SequenceStatus", "Timings"]


class SequenceStatus(enum.Enum):
    UNFORKED = "unforked"
    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


class RequestSequence:
    """One continuation of a request's prompt.

    cache_sequence: open, None unless RUNNING or LOADING. num_computed: tokens whose KV is computed (equals
    `cache_sequence.num_computed_tokens` while RUNNING, without the call). swapped: its bytes while it waits after a
    preemption, if they were swapped out. search: the search of the tiers for its prefix; load: its running load.
    """

    __slots__ = (
        "cache_sequence",
        "candidates",
        "detokenizer",
        "error",
        "finish_reason",
        "index",
        "is_long",
        "is_withdrawn",
        "key",
        "last_token",
        "load",
        "logprobs",
        "matcher",
        "most_found",
        "num_computed",
        "num_shown",
        "num_tokens",
        "output_ids",
        "request",
        "score",
        "search",
        "state",
        "stop_reason",
        "swapped",
        "token_s",
        "waits_for",
    )

    def __init__(self, request: Request, index: int) -> None:
        self.request = request
        self.index = index
        self.last_token = int(request.prompt_token_ids[-1])  # the newest known token
        self.state = SequenceStatus.UNFORKED
        self.key: tuple[int, int, int] = (
            request.priority,
            2 * request.arrival,  # an odd number is a place between two arrivals
            index,
        )  # the smallest is served first
        self.output_ids: list[int] = []
        self.num_tokens = len(request.prompt_token_ids)  # known tokens: prompt and output
        self.num_computed = 0
        self.cache_sequence: CacheSequence = None  # type: ignore[assignment]  # while RUNNING or LOADING; else None
        self.is_withdrawn = False  # its computed content was dropped: further content of it is not findable
        self.is_long = False  # while it waits: an admission found no room in the step for a long prompt
        self.swapped: Swapped | None = None
        self.search: Search | None = None
        self.load: TierLoad | None = None
        self.most_found: int | None = None  # the most tokens that it may take: no block is left for a copy
        # A running or loading sequence, and the position that it has to reach first.
        self.waits_for: tuple[RequestSequence, int] | None = None
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.error: BaseException | None = None
        self.logprobs: list[dict[int, float]] | None = None
        self.detokenizer: Detokenizer | None = None
        self.matcher: Matcher | None = None
        self.candidates: Candidates | None = None  # of a beam whose tokens are all computed
        self.score: float | None = None  # of an answer of a beam search
        self.num_shown = 0  # output tokens that earlier outputs of deltas contained
        self.token_s: float | None = None  # time of its newest token; None before the first and after a pause

    def take_drawn(self, token_ids: Sequence[int]) -> None:
        """Makes the first tokens of its answer known before it runs, as if it had drawn them and waited since. Their
        log probabilities are unknown: NaN. *raises:* ArgumentError: they would have ended it."""
        for token in token_ids:
            if self.detokenizer is not None:
                self.detokenizer.push([token])
            if self.matcher is not None:
                self.matcher.accept(token)
        is_stopped = self.detokenizer is not None and self.detokenizer.stopped
        if is_stopped or not self.request.stop_ids.isdisjoint(token_ids):
            raise ArgumentError("expected tokens behind which an answer goes on, got its end - in `begun`")
        self.output_ids = list(token_ids)
        self.num_tokens += len(token_ids)
        self.last_token = token_ids[-1]
        if self.request.params.logprobs is not None:
            self.logprobs = [{token: math.nan} for token in token_ids]

    @property
    def finished(self) -> bool:
        return self.state is SequenceStatus.FINISHED

    @property
    def is_preempted(self) -> bool:
        """True if it was preempted and waits for a place."""
        is_out = self.state in (SequenceStatus.WAITING, SequenceStatus.LOADING)
        return is_out and self.request.num_preemptions > 0 and (self.index == 0 or len(self.output_ids) > 1)

    @property
    def is_searched(self) -> bool:
        """True if this step knows the result of the search of the tiers, or there is no search."""
        return self.search is None or self.search.is_seen

    @property
    def only_computes(self) -> bool:
        """True if the step that computes its last token ends it, which draws none."""
        return self.request.max_tokens == 0

    def scored_rows(self, num_tokens: int) -> range:
        """The positions among its next `num_tokens` tokens that score the next token of the prompt."""
        scores = self.request.scores
        if scores is None:
            return range(0)
        return scores.rows(self.num_computed, self.num_computed + num_tokens)

    @property
    def waits_for_commit(self) -> bool:
        """True if another sequence has yet to commit the tokens that it waits for, or its search's other beams have yet
        to bring their candidates."""
        if self.candidates is not None:
            return True
        if self.waits_for is None:
            return False
        other, position = self.waits_for
        return (
            other.state in (SequenceStatus.RUNNING, SequenceStatus.LOADING) and other.num_computed < position
        )

    @property
    def max_cached_tokens(self) -> int | None:
        """The most tokens that it may take from the cache or a tier: tokens whose scores are missing are computed."""
        scores = self.request.scores
        most = [limit for limit in (self.most_found, scores and scores.most_cached) if limit is not None]
        return min(most, default=None)

    def known_scores(self) -> np.ndarray:
        """float32 [num_tokens]: the scores of prompt and output, NaN where none is known."""
        request = self.request
        prompt = request.scores
        scores = np.full(self.num_tokens, np.nan, np.float32)
        if prompt is not None:
            scores[: prompt.num_tokens] = prompt.values
        if self.logprobs is not None:
            first = len(request.prompt_token_ids)
            known = self.logprobs[: self.num_tokens - first]  # a failed step may have drawn more
            scores[first : first + len(known)] = [next(iter(entry.values())) for entry in known]
        return scores

    def unforked_siblings(self) -> list[RequestSequence]:
        """The request's sequences not forked yet, which draw their first token from this sequence's logits."""
        if self.index or self.output_ids or len(self.request.sequences) == 1:
            return []
        return [
            sequence for sequence in self.request.sequences[1:] if sequence.state is SequenceStatus.UNFORKED
        ]

    def dependents(self) -> list[RequestSequence]:
        """The request's other sequences that end with this one's error."""
        if self.request.beams is not None:
            return [sequence for sequence in self.request.sequences if sequence is not self]
        return self.unforked_siblings()

    def token_ids(self) -> np.ndarray:
        """All known tokens, int32 [num_tokens]."""
        prompt = self.request.prompt_token_ids
        if not self.output_ids:
            return prompt
        return np.concatenate([prompt, np.asarray(self.output_ids, np.int32)])


class Request:
    """One prompt and its parameters, with its sequences and times (seconds of the engine's clock).

    params, max_tokens, key: resolved; options: as the caller gave them. scores: None unless its prompt is scored.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: np.ndarray,
        params: SamplingParams,
        *,
        max_tokens: int,
        stop_ids: frozenset[int] = frozenset(),
        end_ids: frozenset[int] = frozenset(),
        mask: TokenMask | None = None,
        rules: RequestRules | None = None,
        arrival: int = 0,
        seed: int = 0,
        call: int = 0,
        arrival_s: float = 0.0,
        prompt: str | None = None,
        options: RequestOptions | None = None,
        key: ResolvedKey | None = None,
    ) -> None:
        """stop_ids: tokens that end a sequence; end_ids: the model's end tokens among them.

        call: number of the call that queued it, the same for all prompts of one call.
        mask: forbidden tokens. rules: the rules of the model's generation config. *raises:* ArgumentError: an unknown
        cache priority.
        """
        self.options = options = options or RequestOptions(params)
        self.key = key = key or NOBODYS
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.max_tokens = max_tokens
        self.stop_ids = stop_ids
        self.end_ids = end_ids
        self.mask = mask
        self.rules = rules
        self.arrival = arrival
        self.priority = key.priority + options.priority
        self.seed = seed
        self.call = call
        self.prompt = prompt
        num_beams = params.num_beams()
        self.stream = options.stream and num_beams == 1  # a search has no answer before its end
        self.deltas = options.deltas
        # Values that most steps read of every sequence, computed once.
        self.is_plain = (
            params.is_plain_greedy and params.logprobs is None and rules is None and num_beams == 1
        )
        self.owner_id = key.owner_id  # of its memory, see `Cache.open`
        self.cache_priority = cache_priority_number(options.cache_priority)
        self.tenant = options.key.tenant
        self.client = options.key.tenant if options.client is None else options.client
        self.weight = key.weight  # of the client's share, see `ClientFairness`
        self.sequences = [RequestSequence(self, index) for index in range(max(params.n, num_beams))]
        self.num_outputs = params.n  # of `sequences`, the first are the answers
        self.beams: BeamGroup[RequestSequence] | None = BeamGroup(self) if num_beams > 1 else None
        self.scores: PromptScores | None = None
        if params.prompt_logprobs is not None:
            self.scores = PromptScores(
                len(prompt_token_ids), params.prompt_logprobs_start, params.prompt_logprobs
            )
        self.num_cached_tokens = 0
        self.loaded_spans: Sequence[LoadedSpan] = ()  # cached tokens that were loaded, and their tiers
        self.num_preemptions = 0
        self.is_paused = False  # takes part in no step, see `Scheduler.pause`
        self.arrival_s = arrival_s
        self.started_s: float | None = None
        self.first_token_s: float | None = None
        self.finished_s: float | None = None

    @cached_property
    def prompt_list(self) -> list[int]:
        """The prompt as a list, for outputs."""
        return self.prompt_token_ids.tolist()

    @property
    def num_tier_tokens(self) -> dict[str, int]:
        """Cached tokens that were loaded, by tier."""
        by_tier: dict[str, int] = {}
        for start, stop, tier in self.loaded_spans:
            by_tier[tier] = by_tier.get(tier, 0) + stop - start
        return by_tier

    def hit_tokens(self) -> dict[str, int]:
        """`num_cached_tokens` by their place, memory or a tier; constant after the request has begun."""
        if self.started_s is None:
            return {}
        by_tier = self.num_tier_tokens
        return {**by_tier, "memory": max(0, self.num_cached_tokens - sum(by_tier.values()))}

    @property
    def finished(self) -> bool:
        return all(sequence.state is SequenceStatus.FINISHED for sequence in self.sequences)


@dataclass(frozen=True)
class Timings:
    """Seconds since the request arrived; None before the event."""

    queued_s: float | None = None
    time_to_first_token_s: float | None = None
    total_s: float | None = None


@dataclass
class CompletionOutput:
    """One continuation so far.

    index: its number, 0 .. n - 1. text, token_ids: what is generated so far, the prompt left out. finish_reason: None
    while it grows, then "stop", "length", "abort" or "error". error: the error that ended it; None without one.
    stop_reason: the stop string, or the token of `stop_token_ids`, that ended it; None for an end token of the model.
    new_text: the text that this output adds to the previous output (streaming). logprobs: one dict per token, the
    chosen token first, then the likeliest. For a request with deltas, `token_ids` and `logprobs` contain only entries
    since the previous output, and `text` is `new_text`. score: of an answer of a beam search, see
    `SamplingParams.length_penalty`; else None.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, float]] | None = None
    new_text: str = ""
    error: BaseException | None = None
    score: float | None = None


@dataclass
class RequestOutput:
    """The output of a request so far; `finished` marks its last output.

    request_id: given or made. prompt: its text; None for a prompt of token ids. prompt_token_ids: its tokens.
    num_cached_tokens: tokens of the prompt found in memory or in a tier and not computed; num_tier_tokens: those
    loaded, by tier. outputs: the continuations, `n` of them; of a beam search fewer, if no more are possible. finished:
    whether all have ended. timings: seconds since the request arrived: until its first step, its first token, its end;
    None before. prompt_logprobs: with `SamplingParams.prompt_logprobs`, one entry for each token of the prompt once it
    is computed: a dict, the prompt's token first, then the likeliest; None for the first token and those before
    `prompt_logprobs_start`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    num_cached_tokens: int
    outputs: list[CompletionOutput]
    finished: bool
    timings: Timings = field(default_factory=Timings)
    num_tier_tokens: dict[str, int] = field(default_factory=dict)
    prompt_logprobs: list[dict[int, float] | None] | None = None

    @property
    def error(self) -> BaseException | None:
        """The first error among the continuations; None without one."""
        return next((output.error for output in self.outputs if output.error is not None), None)
