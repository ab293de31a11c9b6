"""`Engine`: the step loop. Takes requests, returns outputs, and returns every block, also after an error.

`Engine` ties scheduler, runner, sampler and detokenizer together. It owns no thread: its owner calls `step` while
`has_work`. Not thread-safe.

Invariants
    E1  after a request has ended, for any reason, it holds no block and the engine no reference to it.
    E2  an error of one sequence (its logits, its text) ends only that sequence; an error of a step ends the requests of
        that step; waiting requests continue. An interruption and a lost device end all requests and are raised.
    E3  a step that the storage has no memory for has no effect; only a request that runs alone may end with it.

Cost per step without the model: O(running sequences), and text for sequences that stream or have stop strings.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from quire.cache.event_dispatcher import Forgotten
from quire.cache.pins import Pins
from quire.cache.prefix_key import NOBODYS, PrefixKey, ResolvedKey
from quire.cache.protocol import PrefixKVCache, shares_prefixes
from quire.cache.results import Dropped
from quire.engine.engine_parts import EngineParts, StepLimits, VerifiesHits
from quire.engine.outputs import Outputs
from quire.errors import ArgumentError, DeviceLostError, QuireError
from quire.offload.swap import Swap
from quire.sampling.detokenizer import Detokenizer
from quire.sampling.drafted import sample_drafted
from quire.sampling.greedy import most_likely
from quire.sampling.params import SamplingParams
from quire.sampling.sampler import sample_tokens
from quire.sampling.scores import score_prompts
from quire.scheduler.prompts import Prompt
from quire.scheduler.request import Request, RequestOutput, RequestSequence, SequenceStatus
from quire.scheduler.request_options import RequestOptions
from quire.scheduler.request_validator import RequestValidator, ServedModel
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.tenant_quotas import MemoryLimits
from quire.scheduler.tenants import Tenants
from quire.sessions.session_registry import SessionRegistry
from quire.step import Batch, StepRefusedError

__all__ = ["Engine"]

_WAIT_S = 0.05  # longest time that a step without other work waits for tiers


class Engine:
    """Requests over one cache and one runner.

    seed: for requests without one; the same submissions in the same order then give the same tokens.
    tenant_secret: see `Tenants`. clock: monotonic seconds.
    """

    def __init__(
        self,
        parts: EngineParts,
        model: ServedModel,
        *,
        limits: StepLimits | None = None,
        seed: int = 0,
        tenant_secret: bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.on_work: Callable[[], None] = lambda: None
        """Called before an idle engine checks a request; its errors go to the request's caller."""
        self.verifier: VerifiesHits | None = None
        """Checks hits of ended requests while the engine is idle; None without `verify_hits`."""
        self._runner, self._cache = parts.runner, parts.cache
        self._launches_ahead = parts.launch_ahead is not None
        self._kept_scores, self._speculation = parts.kept_scores, parts.speculation
        self._choose = partial(most_likely, native=parts.native)
        if parts.launch_ahead is not None:
            self._choose = parts.launch_ahead.most_likely
        self._speeds, self._profile = parts.speeds, parts.profile
        self._loads, self._stores, self._is_lost = parts.loads, parts.stores, parts.is_lost
        self.swap = parts.swap or Swap(parts.cache)
        self.monitor = parts.monitor
        self._clock = clock
        self.memory_limits = MemoryLimits(parts.cache)
        self.tenants = Tenants(parts.cache, self.memory_limits, tenant_secret)
        self.pins: Pins = parts.cache.pins
        self.pins.use_clock(clock)
        self._validator = RequestValidator(
            model,
            seed=seed,
            clock=clock,
            memory_limits=self.memory_limits,
            tenants=self.tenants,
            pins=self.pins,
        )
        self.max_model_len = model.max_model_len
        self.sessions = SessionRegistry(parts.cache, self.check_requests)
        self.session_receipts: Counter[tuple[str, str]] = Counter()
        """Answers to calls about sessions, by action and outcome."""
        self._outputs = Outputs(model.tokenizer)
        # Called after each reservation and each step; None without monitor and tiers.
        self._on_reserved = None if self.monitor is None and self._stores is None else self.collect
        self.scheduler = self._make_scheduler(limits or StepLimits())
        self._connect()
        self._num_generated_tokens = 0
        self._busy_s = 0.0
        self._prefill, self._decode = _TokenRate(), _TokenRate()

    def _make_scheduler(self, limits: StepLimits) -> Scheduler:
        return Scheduler(
            self._cache,
            max_batch_tokens=limits.max_batch_tokens,
            max_num_seqs=limits.max_num_seqs,
            watermark=limits.watermark,
            long_prefill_tokens=limits.long_prefill_tokens,
            clock=self._clock,
            swap=self.swap,
            loads=self._loads,
            on_reserved=self._on_reserved,
            memory_limits=self.memory_limits,
            launches_ahead=self._launches_ahead,
            kept_scores=self._kept_scores,
            speculation=self._speculation,
        )

    def _connect(self) -> None:
        """Sets the callbacks of the parts."""
        self.tenants.requests = self.scheduler.requests
        self.tenants.check_requests = self.check_requests
        self.tenants.on_removed = self.sessions.forget_tenant
        self.scheduler.on_session_start = self.sessions.start
        self.scheduler.on_session_end = self.sessions.end
        if self._on_reserved is not None:
            self.swap.on_reserved = self._on_reserved
        if self.monitor is not None:
            self.pins.on_expired = self.monitor.pin_expired
            if self.monitor.tier_events is not None:
                self.monitor.tier_events.namespaces = lambda: [
                    *self.tenants.namespaces_of(None),
                    self.tenants.public,
                ]

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    # -- requests in -----------------------------------------------------------------------------------

    def check(self, prompt: Prompt | Any, options: RequestOptions | SamplingParams | None = None) -> Request:
        """The request that `submit` would queue. Nothing changes.

        *raises:* PromptError, ArgumentError, CapacityError: it can never be served, with the numbers.
        """
        return self._validator.request(_prompt(prompt), _options(options))

    def num_cached(self, prompt_token_ids: Any, options: RequestOptions) -> int:
        """Tokens of a request's prompt that memory has, at most all but the last. *raises:* as `submit`."""
        request = self.check(Prompt(None, prompt_token_ids), options)
        return self._cache.match(request.prompt_token_ids, **request.key.content).num_tokens

    def check_tokens(self, prompt_token_ids: Any) -> np.ndarray:
        """A prompt as int32, a copy. *raises:* PromptError: empty, no integers, ids out of range, too long."""
        return self._validator.check_tokens(prompt_token_ids)

    def has_grammar(self, params: SamplingParams) -> bool:
        """True if `compile_grammar` has nothing to build. Any thread may call it."""
        return self._validator.has_grammar(params)

    def compile_grammar(self, params: SamplingParams) -> None:
        """Compiles the grammar of `params` for later `check` and `submit` calls; any thread may call it.

        *raises:* ArgumentError: not usable.
        """
        self._validator.compile_grammar(params)

    def submit(self, prompt: Prompt | Any, options: RequestOptions | SamplingParams | None = None) -> str:
        """Queues a request and returns its id. prompt: a `Prompt` or token ids. options: sampling parameters alone mean
        defaults for the rest.

        *raises:* the errors of `check`; nothing changes then.
        """
        return self.submit_all([(prompt, options)])[0]

    def submit_all(
        self, requests: Sequence[tuple[Prompt | Any, RequestOptions | SamplingParams | None]]
    ) -> list[str]:
        """Queues all requests or none; returns their ids. *raises:* as `submit`."""
        if requests:
            self._begin_work()
        made: list[Request] = []
        for number, (prompt, options) in enumerate(requests):
            try:
                made.append(self._validator.request(_prompt(prompt), _options(options), number=number))
            except QuireError as error:
                if len(requests) > 1:
                    error.args = (f"{error} - in prompt {number} of {len(requests)}",)
                raise
        self._queue(made)
        return [request.request_id for request in made]

    def _begin_work(self) -> None:
        """Calls `on_work` if the engine is idle; before the check, because it may remove pins that the check counts.

        On a lost device the request is taken, and its step ends the engine.
        """
        if self.scheduler.has_work:
            return
        try:
            self.on_work()
        except QuireError:
            raise
        except Exception:
            if not self._is_lost():
                raise

    def check_requests(self) -> None:
        """Checks queued requests after a change of limits or pins. *raises:* CapacityError: one no longer fits."""
        self._validator.check_queued(self.scheduler.requests.values())

    def _queue(self, requests: Sequence[Request]) -> None:
        """Queues requests that `RequestValidator.request` has made since the last step, all or none."""
        taken = set(self.scheduler.requests)
        for request in requests:
            if request.request_id in taken:
                raise ArgumentError(
                    f"expected a new request id, got {request.request_id!r}, which is still running"
                )
            taken.add(request.request_id)
        self._validator.count_arrivals(len(requests))
        for request in requests:
            if request.options.session is not None:
                self.sessions.queue(request)
            self.scheduler.add(request)
            self.pins.touch(request.prompt_token_ids, **request.key.content)

    def start_of(self, request_id: str) -> tuple[int, RequestOutput | None]:
        """Of a queued request: the seed of its draws, and the output of the tokens that were drawn before, None without
        any. Later outputs of deltas do not repeat that one."""
        request = self.scheduler.requests[request_id]
        return request.seed, self._outputs.so_far(request) if request.sequences[0].output_ids else None

    def fork(
        self,
        request_id: str,
        params: SamplingParams | None = None,
        *,
        new_request_id: str | None = None,
        stream: bool | None = None,
    ) -> str:
        """Branches a running request (n=1): a new request continues from its newest token. Returns the new id.

        The new prompt is all tokens so far. Blocks are shared; the first of the two requests that writes to the partial
        block copies it. params: by default the request's, with the rest of its max_tokens and a new seed. stream: by
        default as the request.
        *raises:* the errors of `submit`; ArgumentError: no such request. Nothing changes then.
        """
        parent = self.scheduler.requests.get(request_id)
        if parent is None:
            raise ArgumentError(f"expected a request that has not ended, got {request_id!r} - to fork")
        if len(parent.sequences) > 1:
            raise ArgumentError(
                f"expected a request with n=1 and beam_width=1 to fork, got {request_id!r} with n={parent.params.n} "
                f"and beam_width={parent.params.beam_width}"
            )
        sequence = parent.sequences[0]
        rules = None
        if params is None:
            given, num_output = parent.options.params, len(sequence.output_ids)
            min_tokens = None if given.min_tokens is None else max(0, given.min_tokens - num_output)
            params = replace(
                given,
                max_tokens=parent.max_tokens - num_output,
                min_tokens=min_tokens,
                seed=None,
                prompt_logprobs=None,
                prompt_logprobs_start=0,
            )
            rules = None if parent.rules is None else parent.rules.continued(num_output)
        options = replace(
            parent.options,
            params=params,
            request_id=new_request_id,
            stream=parent.stream if stream is None else stream,
            begun=None,
        )
        prompt = Prompt(None, sequence.token_ids())
        child = self._validator.request(prompt, options, key=parent.key, rules=rules)
        self._queue([child])
        if sequence.matcher is not None and params.forms == parent.params.forms:
            child.sequences[0].matcher = sequence.matcher.copy()
        self.scheduler.branch(sequence, child.sequences[0])
        return child.request_id

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request in any state; returns its last output, None if the id is unknown or has ended."""
        request = self.scheduler.abort(request_id)
        return None if request is None else self._finished(request)

    def pause(self, request_id: str) -> None:
        """Computes no token for a request until `resume`; others may take its blocks. Unknown ids are ignored."""
        self.scheduler.pause(request_id)

    def resume(self, request_id: str) -> None:
        """Undoes `pause`. Unknown ids are ignored."""
        self.scheduler.resume(request_id)

    def abort_all(self) -> None:
        for request_id in list(self.scheduler.requests):
            self.abort(request_id)

    # -- a step ----------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Ends the wait of a step for the tiers. Any thread may call it."""
        if self._loads is not None:
            self._loads.changed.set()

    def collect(self) -> None:
        """Collects the cache's events, so that the tiers store content by their policy."""
        monitor = self.monitor
        if monitor is not None:
            if monitor.cache.num_events or monitor.tier_events is not None:
                monitor.collect()
        elif self._stores is not None:
            self._stores.collect()

    def step(self) -> list[RequestOutput]:
        """Computes one step; returns the outputs of ended requests and of streaming requests with new tokens.

        If no token can be computed before a load from a tier ends, it waits briefly for that instead.
        """
        started = self._clock()
        scheduled: Batch[RequestSequence] | None = None
        profile = self._profile
        if self.pins.next_expiry is not None:
            self.pins.expire()
        if self.sessions.next_expiry is not None:
            self.sessions.expire()
        if profile is not None:
            profile.begin()
        try:
            if self._loads is not None:
                self._loads.changed.clear()  # before the loads are read
            scheduled = self.scheduler.schedule()
            touched = self.scheduler.pop_failed() if self.scheduler.failed else []
            if profile is not None:
                profile.lap("schedule")
            if scheduled is not None:
                num_generated = self._num_generated_tokens
                touched += self._compute(scheduled)
                seconds = self._clock() - started
                if scheduled.is_prompt:
                    self._speeds.add_computation(len(scheduled.input_ids), seconds)
                    self._prefill.add(len(scheduled.input_ids), seconds)
                else:
                    num_drawn = self._num_generated_tokens - num_generated
                    self._decode.add(num_drawn, seconds)
                    if self._speculation is not None and num_drawn:
                        step_s = seconds - self._speculation.proposal_s
                        self._speculation.costs.add(len(scheduled.input_ids), step_s)
            elif self._loads is not None and self.scheduler.waits_for_tiers:
                self._loads.changed.wait(_WAIT_S)
            outputs = self._outputs_of(touched) if touched else []
            if profile is not None:
                profile.lap("detokenize")
            return outputs
        except BaseException:
            self.abort_all()  # E1: after an interruption, or a bug, the blocks are returned here
            raise
        finally:
            if profile is not None:
                profile.end(scheduled)
            self._busy_s += self._clock() - started

    def _compute(self, scheduled: Batch[RequestSequence]) -> list[RequestSequence]:
        """Runs a step; returns the sequences that drew a token or ended."""
        profile = self._profile
        try:
            logits = self._runner.run(scheduled)
            if profile is not None:
                profile.lap("forward")
            tokens = np.zeros(0, np.int64)
            if scheduled.scored:
                score_prompts(logits[scheduled.num_draw_rows :], scheduled.scored)
                logits = logits[: scheduled.num_draw_rows]
            over_drafts: dict[RequestSequence, list[int]] = {}
            if scheduled.drafts:
                tokens, over_drafts = sample_drafted(
                    logits, scheduled.sampled, scheduled.draw_rows, scheduled.drafts, self._choose
                )
                for sequence, run in over_drafts.items():
                    self._cut_at_stop(sequence, run)
            elif scheduled.sampled:
                tokens = sample_tokens(logits, scheduled.sampled, scheduled.draw_rows, self._choose)
            if profile is not None:
                profile.lap("sampling")
        except StepRefusedError as refused:  # E3
            return self.scheduler.refuse(scheduled, refused.__cause__)
        except Exception as error:  # E2: the step's requests end with it
            if self._is_lost():
                raise DeviceLostError(
                    f"expected a card that computes, got one that fails every call ({type(error).__name__}: "
                    f"{' '.join(str(error).split())[:300]}); the engine has ended: start the process again"
                ) from error
            ended = [sequence for s in scheduled.sequences for sequence in s.request.sequences]
            for sequence in ended:
                self.scheduler.finish(sequence, "error", error)
            return ended
        self.scheduler.update(scheduled, tokens, over_drafts)
        if self._on_reserved is not None:
            self._on_reserved()
        if profile is not None:
            profile.lap("update")
        self._num_generated_tokens += len(scheduled.sampled)
        self._num_generated_tokens += sum(max(0, len(run) - 1) for run in over_drafts.values())
        touched: list[RequestSequence] = []
        touched += scheduled.completed
        touched += [sequence for sequence, _ in scheduled.scored if sequence.error is not None]
        for sequence in scheduled.sampled:
            is_whole = sequence.request.beams is None and sequence.error is None
            if sequence.detokenizer is not None and is_whole:
                self._detokenize(sequence, sequence.detokenizer)
            if sequence.request.stream or sequence.state is SequenceStatus.FINISHED:
                touched.append(sequence)
        return touched

    def _cut_at_stop(self, sequence: RequestSequence, run: list[int]) -> None:
        """Ends the tokens that a sequence drew in one step at its stop string, if one is complete before the last."""
        detokenizer, num_before = sequence.detokenizer, len(sequence.output_ids)
        if detokenizer is None:
            return
        for count, token in enumerate(run if sequence.error is not None else run[:-1], 1):
            error: Exception | None = None
            try:
                detokenizer.push([token])
            except Exception as caught:
                error = caught
            if error is not None or detokenizer.stopped:
                del run[count:]
                sequence.error = error
                if sequence.logprobs is not None:
                    del sequence.logprobs[num_before + count :]
                return

    def _detokenize(self, sequence: RequestSequence, detokenizer: Detokenizer) -> None:
        """Turns a sequence's newest token into text and ends the sequence at a stop string."""
        try:
            is_stop_token = sequence.finished and sequence.finish_reason != "length"
            if not is_stop_token or sequence.request.params.include_stop_str_in_output:
                detokenizer.push(sequence.output_ids[-1:])
            if detokenizer.stopped and not is_stop_token:
                self.scheduler.finish(sequence, "stop")
                sequence.finish_reason = "stop"  # not "length", which it may have reached with the same token
                sequence.stop_reason = detokenizer.stop_reason
        except Exception as error:  # ends only this sequence (E2)
            self.scheduler.finish(sequence, "error", error)
            sequence.finish_reason, sequence.error = "error", error

    def resize(self, num_blocks: int, *, reason: str) -> np.ndarray:
        """Resizes the cache to `num_blocks` blocks; returns the removed ids, int32. At most that many are in use, see
        `Scheduler.preempt_to`. reason: see `_collect_lost`."""
        cache = self._check_elastic("resize")
        return self._collect_lost(lambda: cache.resize(num_blocks), reason)

    def trim(self, share_kept: float = 0.0, *, reason: str = "dropped") -> np.ndarray:
        """Drops cached content that no sequence holds, except a share of it; returns the unused ids, int32."""
        cache = self._check_elastic("trim")
        return self._collect_lost(lambda: cache.trim(share_kept), reason)

    def _check_elastic(self, where: str) -> PrefixKVCache:
        if not shares_prefixes(self._cache):
            raise ArgumentError(
                f"expected a cache that can return its memory block by block, got {self._cache!r} in {where}; use "
                "storage paged or virtual"
            )
        return self._cache

    def _collect_lost(self, drop_blocks: Callable[[], np.ndarray], reason: str) -> np.ndarray:
        """Runs `drop_blocks` and collects its events with a reason of `event_dispatcher.LOSS_REASONS`.

        Tiers store the lost content, but no content dropped before the call.
        """
        self.collect()
        block_ids = drop_blocks()
        forgotten = Forgotten(reason, is_kept=True)
        if self.monitor is not None:
            self.monitor.collect(forgotten)
        elif self._stores is not None:
            self._stores.collect(forgotten)
        return block_ids

    def drop_prompt(self, prompt_token_ids: Any, key: PrefixKey) -> Dropped:
        """`drop` of a request's prompt. *raises:* PromptError too."""
        tokens = self.check_tokens(prompt_token_ids)
        return self.drop(tokens, self.tenants.resolve(key, tokens))

    def drop(self, tokens: np.ndarray, key: ResolvedKey = NOBODYS) -> Dropped:
        """Drops all content that begins with these tokens from memory, with events; tiers keep theirs.

        Blocks that requests hold are no longer findable, and free when the requests end. *raises:* ArgumentError: some
        of it is pinned; nothing changes.
        """
        dropped = self.scheduler.drop(tokens, key)
        self.collect()
        return dropped

    # -- outputs ---------------------------------------------------------------------------------------

    def _outputs_of(self, sequences: list[RequestSequence]) -> list[RequestOutput]:
        """One output for each ended or streaming request of `sequences`."""
        outputs: list[RequestOutput] = []
        seen: set[str] = set()
        for sequence in sequences:
            request = sequence.request
            if request.request_id not in seen:
                seen.add(request.request_id)
                if request.finished:
                    outputs.append(self._finished(request))
                elif request.stream:
                    outputs.append(self._outputs.so_far(request))
        return outputs

    def _finished(self, request: Request) -> RequestOutput:
        if self._stores is not None and self._stores.has_readers:
            key, tokens = request.key, request.sequences[0].token_ids()
            self._stores.save_ended(key.namespace, tokens, tuple(sorted((key.extra_keys or {}).items())))
        if not request.options.is_preparation:
            if self.monitor is not None:
                self.monitor.served(request)
            if self.verifier is not None:
                self.verifier.add(request)
        return self._outputs.finished(request)

    # -- counts -----------------------------------------------------------------------------

    def _hit_tokens(self) -> dict[str, int]:
        """Cached tokens of prompts by their place: memory, or the tier they were loaded from. Never decreases."""
        tokens = Counter({"memory": 0}) + self._outputs.hit_tokens
        for request in self.scheduler.requests.values():
            tokens.update(request.hit_tokens())
        return {"memory": 0, **tokens}

    def _session_stats(self) -> dict[str, Any]:
        receipts: dict[str, dict[str, int]] = {}
        for (action, outcome), count in self.session_receipts.items():
            receipts.setdefault(action, {})[outcome] = count
        return {**self.sessions.stats(), "receipts": receipts}

    def stats(self) -> dict[str, Any]:
        """The counts of the cache and the engine since the start. Seconds are time in steps.

        num_withheld_tokens: prompt tokens for which steps had room, and that `long_prefill_tokens` left to later steps.
        tenants: see `Scheduler.stats_by_tenant`. sessions: see `SessionRegistry.stats`; receipts: answers to calls
        about sessions, by action and outcome. num_drafts, ...: of `Speculation`, if the engine
        speculates.
        evicted_blocks: full blocks whose content left memory, for any reason; without a monitor the cache's own count
        of evictions, with partial blocks.
        query_tokens, hit_tokens: tokens of prompts looked up, and found, if prefixes are shared, else 0. A request
        counts once, at its first start: after a preemption its own content is no hit. hit_rate: their quotient.
        prefill_tokens_per_second: tokens computed in steps with prompt tokens, per second of those steps;
        decode_tokens_per_second: tokens generated in the other steps, per second of those. time_to_first_token_s: mean
        over the ended requests, from their arrival. verified_hits, num_verified_tokens: with `verify_hits`, see
        `HitVerifier.stats`. token_gap_s: mean time between two tokens of a sequence.
        """
        scheduler = self.scheduler
        live = [request for request in scheduler.requests.values() if not request.options.is_preparation]
        num_prompt = self._outputs.num_prompt_tokens + sum(
            len(r.prompt_token_ids) for r in live if r.started_s is not None
        )
        num_cached = self._outputs.num_cached_tokens + sum(r.num_cached_tokens for r in live)
        num_query, num_hit = (num_prompt, num_cached) if self._cache.prefix_caching else (0, 0)
        return {
            **self._cache.stats(),
            **({} if self.monitor is None else {"evicted_blocks": self.monitor.history.num_evicted}),
            **({} if self.verifier is None else self.verifier.stats()),
            "query_tokens": num_query,
            "hit_tokens": num_hit,
            "num_running": len(scheduler.running),
            "num_waiting": len(scheduler.waiting) + len(scheduler.paused_waiting),
            "num_unfinished_requests": len(scheduler.requests),
            "num_finished_requests": self._outputs.num_finished,
            "num_prompt_tokens": num_prompt,
            "num_cached_tokens": num_cached,
            "num_computed_tokens": scheduler.num_computed_tokens,
            "num_generated_tokens": self._num_generated_tokens,
            "num_withheld_tokens": scheduler.num_withheld_tokens,
            "tenants": scheduler.stats_by_tenant(),
            "sessions": self._session_stats(),
            "num_steps": scheduler.num_steps,
            "num_preemptions": scheduler.num_preemptions,
            **({} if self._speculation is None else self._speculation.stats()),
            "num_loading": len(scheduler.loading),
            "num_swapped": self.swap.num_swapped,
            "swapped_bytes": self.swap.num_bytes,
            "num_restored_tokens": self.swap.num_restored_tokens,
            "kept_score_bytes": 0 if self._kept_scores is None else self._kept_scores.num_bytes,
            "num_loaded_tokens": self._loads.loaded_tokens.total() if self._loads is not None else 0,
            "hit_tokens_by_tier": self._hit_tokens(),
            "hit_rate": num_hit / num_query if num_query else 0.0,
            "busy_s": self._busy_s,
            "tokens_per_second": self._num_generated_tokens / self._busy_s if self._busy_s else 0.0,
            "prefill_tokens_per_second": self._prefill.per_second,
            "decode_tokens_per_second": self._decode.per_second,
            "time_to_first_token_s": self._outputs.first_tokens_s / (self._outputs.num_first_tokens or 1),
            "num_token_gaps": scheduler.token_gaps.count,
            "token_gap_s": scheduler.token_gaps.mean_s,
            "token_gap_below_s": scheduler.token_gaps.counts_below(),
        }


@dataclass
class _TokenRate:
    """Tokens and time of the steps of one kind."""

    num_tokens: int = 0
    seconds: float = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        self.num_tokens += num_tokens
        self.seconds += seconds

    @property
    def per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0


def _prompt(prompt: Any) -> Prompt:
    return prompt if isinstance(prompt, Prompt) else Prompt(None, prompt)


def _options(options: RequestOptions | SamplingParams | None) -> RequestOptions:
    return options if isinstance(options, RequestOptions) else RequestOptions.of(options)
