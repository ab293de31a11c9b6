"""`Engine`, the step loop: requests in, outputs out; every block is returned, also after an error.

`Engine` ties scheduler, runner, sampler and detokenizer together. It owns no thread: its owner calls `step` while
`has_work`. Not thread-safe.

Invariants
    E1  after a request has ended, for any reason, it holds no block and the engine no reference to it.
    E2  an error of one sequence (its logits, its text) ends its own sequence; an error of a step ends the requests
        of that step; requests that wait go on. An interruption ends all requests and is raised.
    E3  a step that the storage has no memory for is as if it had never been; it ends no request but one that is alone.

Cost per step without the model: O(running sequences), text only for those that stream or have stop strings.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from quire.cache.event_dispatcher import Forgotten
from quire.cache.pins import Pins
from quire.cache.prefix_key import NOBODYS, ResolvedKey
from quire.cache.protocol import KVCache, PrefixKVCache, shares_prefixes
from quire.cache.results import Dropped
from quire.engine.monitor import CacheMonitor
from quire.engine.outputs import Outputs
from quire.engine.profile import Profile
from quire.errors import ArgumentError, QuireError
from quire.offload.store import TierStores
from quire.offload.swap import Swap
from quire.offload.throughputs import Throughputs
from quire.offload.tier_load import TierLoads
from quire.sampling.detokenizer import Detokenizer
from quire.sampling.params import SamplingParams
from quire.sampling.sampler import sample_tokens
from quire.scheduler.prompts import Prompt
from quire.scheduler.request import Request, RequestOutput, RequestSequence, SequenceStatus
from quire.scheduler.request_options import RequestOptions
from quire.scheduler.request_validator import RequestValidator
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.tenant_quotas import MemoryLimits
from quire.scheduler.tenants import Tenants
from quire.step import Batch, StepRefusedError

__all__ = ["Engine", "StepRunner"]

_WAIT_S = 0.05  # that a step waits for tiers at most, where nothing else is to be done


class StepRunner(Protocol):
    """Computes a step: `quire.engine.runner.Runner`, or a fake."""

    def run(self, step: Batch[RequestSequence], /) -> Any: ...


class Engine:
    """Requests over one cache and one runner.

    cache: a `quire.Cache` for this engine only. tokenizer: None if only token ids go in and come out.
    max_model_len: longest sequence, prompt and output. sampling_defaults: see `SamplingParams.resolved`.
    seed: of the requests that bring none; the same submissions in the same order then give the same tokens.
    profile: takes the times of every step. preemption, loads, stores: see `LLM` and the classes; speeds: theirs, kept
    up here. tenant_secret: see `Tenants`. monitor: takes the cache's events and what was served (`monitor.py`).
    """

    def __init__(
        self,
        runner: StepRunner,
        cache: KVCache,
        *,
        vocab_size: int,
        max_model_len: int,
        tokenizer: Any = None,
        eos_token_ids: Sequence[int] = (),
        sampling_defaults: Mapping[str, Any] | None = None,
        max_batch_tokens: int = 2048,
        max_num_seqs: int = 256,
        watermark: float = 0.01,
        seed: int = 0,
        profile: Profile | None = None,
        clock: Callable[[], float] = time.monotonic,
        speeds: Throughputs | None = None,
        swap: Swap | None = None,
        loads: TierLoads | None = None,
        stores: TierStores | None = None,
        tenant_secret: bytes | None = None,
        monitor: CacheMonitor | None = None,
        native: Any = None,
    ) -> None:
        self.on_work: Callable[[], None] = lambda: None
        """Called before an idle engine checks a request to take it; what it raises, the request's caller gets."""
        self._runner = runner
        self._speeds = speeds or Throughputs()
        self.swap = swap or Swap(cache)
        self._loads = loads
        self._stores = stores
        self._cache = cache
        self._profile = profile
        self._native = native
        self._clock = clock
        self.share = MemoryLimits(cache)
        self.tenants = Tenants(cache, self.share, tenant_secret)
        self.pins: Pins = cache.pins
        self.pins.use_clock(clock)
        self._validator = RequestValidator(
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            tokenizer=tokenizer,
            eos_token_ids=eos_token_ids,
            sampling_defaults=sampling_defaults,
            seed=seed,
            clock=clock,
            share=self.share,
            tenants=self.tenants,
            pins=self.pins,
        )
        self._outputs = Outputs(tokenizer)
        self.monitor = monitor
        if monitor is not None:
            self.pins.on_expired = monitor.pin_expired
            if monitor.tier_events is not None:
                monitor.tier_events.namespaces = lambda: [
                    *self.tenants.namespaces_of(None),
                    self.tenants.public,
                ]
        # Told after each reservation and each step, where there is a monitor or a tier to tell.
        self._told = None if monitor is None and stores is None else self.collect
        self.scheduler = Scheduler(
            cache,
            max_batch_tokens=max_batch_tokens,
            max_num_seqs=max_num_seqs,
            watermark=watermark,
            clock=clock,
            swap=self.swap,
            loads=loads,
            on_reserved=self._told,
            share=self.share,
        )
        if self._told is not None:
            self.swap.on_reserved = self._told
        self._num_generated_tokens = 0
        self._busy_s = 0.0
        self._prefill, self._decode = _Speed(), _Speed()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    # -- requests in -----------------------------------------------------------------------------------

    def check(self, prompt: Prompt | Any, options: RequestOptions | SamplingParams | None = None) -> Request:
        """The request that `submit` would queue. Nothing changes.

        *raises:* PromptError, ArgumentError, CapacityError: it can never be served, with the numbers.
        """
        return self._validator.request(_prompt(prompt), _options(options))

    def check_tokens(self, prompt_token_ids: Any) -> np.ndarray:
        """A prompt as int32, a copy. *raises:* PromptError: empty, no integers, ids out of range, too long."""
        return self._validator.check_tokens(prompt_token_ids)

    def has_grammar(self, params: SamplingParams) -> bool:
        """True if `compile_grammar` has nothing to build. Any thread may call it."""
        return self._validator.has_grammar(params)

    def compile_grammar(self, params: SamplingParams) -> None:
        """Builds the grammar of `params` ahead of `check` and `submit`, which find it then; any thread may.

        *raises:* ArgumentError: it cannot be used.
        """
        self._validator.compile_grammar(params)

    def use_default_max_tokens(self, num_tokens: int) -> None:
        """Has answers end there (256 if this is not called) where neither the request nor the model says how long."""
        self._validator.default_max_tokens = num_tokens

    def submit(self, prompt: Prompt | Any, options: RequestOptions | SamplingParams | None = None) -> str:
        """Queues a request and returns its id. prompt: a `Prompt` or token ids. options: only the sampling parameters,
        where the rest is as ever.

        *raises:* what `check` raises; nothing was changed then.
        """
        return self.submit_all([(prompt, options)])[0]

    def submit_all(
        self, requests: Sequence[tuple[Prompt | Any, RequestOptions | SamplingParams | None]]
    ) -> list[str]:
        """Queues all or none of them; their ids. *raises:* as `submit`."""
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
        """Before a request is checked: `on_work` may let go of pins that its fit would count on."""
        if not self.scheduler.has_work:
            self.on_work()

    def check_requests(self) -> None:
        """*raises:* CapacityError where a request that is here could not end any more, as limits or pins changed."""
        self._validator.check_again(self.scheduler.requests.values())

    def _queue(self, requests: Sequence[Request]) -> None:
        """Queues what `RequestValidator.request` has made since the last step, all or none."""
        taken = set(self.scheduler.requests)
        for request in requests:
            if request.request_id in taken:
                raise ArgumentError(
                    f"expected a new request id, got {request.request_id!r}, which is still running"
                )
            taken.add(request.request_id)
        self._validator.arrived(len(requests))
        for request in requests:
            self.scheduler.add(request)
            self.pins.touch(request.prompt_token_ids, **request.key.content)

    def fork(
        self,
        request_id: str,
        params: SamplingParams | None = None,
        *,
        new_request_id: str | None = None,
        stream: bool | None = None,
    ) -> str:
        """Branches a request (n=1) that has not ended: a new one goes on from its newest token; the new one's id.

        Its prompt is all that there is so far. Blocks are shared; the partial one is copied when the first of the two
        writes to it. params: those of the request if not given, with what is left of its max_tokens and a seed of its
        own. stream: as the request if not given.
        *raises:* what `submit` raises, ArgumentError where there is no such request; nothing was changed then.
        """
        parent = self.scheduler.requests.get(request_id)
        if parent is None:
            raise ArgumentError(f"expected a request that has not ended, got {request_id!r} - to fork")
        if len(parent.sequences) > 1:
            raise ArgumentError(
                f"expected a request with n=1 to fork, got {request_id!r} with n={len(parent.sequences)}"
            )
        sequence = parent.sequences[0]
        rules = None
        if params is None:
            asked, num_output = parent.options.params, len(sequence.output_ids)
            least = None if asked.min_tokens is None else max(0, asked.min_tokens - num_output)
            params = replace(asked, max_tokens=parent.max_tokens - num_output, min_tokens=least, seed=None)
            rules = None if parent.rules is None else parent.rules.continued(num_output)
        options = replace(
            parent.options,
            params=params,
            request_id=new_request_id,
            stream=parent.stream if stream is None else stream,
        )
        prompt = Prompt(None, sequence.token_ids())
        child = self._validator.request(prompt, options, key=parent.key, rules=rules)
        self._queue([child])
        if sequence.matcher is not None and params.forms == parent.params.forms:
            child.sequences[0].matcher = sequence.matcher.copy()
        self.scheduler.branch(sequence, child.sequences[0])
        return child.request_id

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request in any state; its last output, or None if it is not here (any more)."""
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
        """Ends a step's waiting for the tiers. The one call that may come from any thread."""
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
        """Computes one step; outputs of the requests that ended, and of the streaming ones that grew.

        If no token can be computed until a load from a tier has ended, waits for that a moment instead.
        """
        started = self._clock()
        scheduled: Batch[RequestSequence] | None = None
        profile = self._profile
        if self.pins.next_expiry is not None:
            self.pins.expire()
        if profile is not None:
            profile.begin()
        try:
            if self._loads is not None:
                self._loads.changed.clear()  # before what it tells of is looked at
            scheduled = self.scheduler.schedule()
            touched = self.scheduler.take_failed() if self.scheduler.failed else []
            if profile is not None:
                profile.lap("schedule")
            if scheduled is not None:
                touched += self._compute(scheduled)
                seconds = self._clock() - started
                if scheduled.is_prompt:
                    self._speeds.add_computation(len(scheduled.input_ids), seconds)
                    self._prefill.add(len(scheduled.input_ids), seconds)
                else:
                    self._decode.add(len(scheduled.sampled), seconds)
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
        """Runs a step; the sequences that drew a token or ended."""
        profile = self._profile
        try:
            logits = self._runner.run(scheduled)
            if profile is not None:
                profile.lap("forward")
            tokens = np.zeros(0, np.int64)
            if scheduled.sampled:
                tokens = sample_tokens(logits, scheduled.sampled, scheduled.draw_rows, self._native)
            if profile is not None:
                profile.lap("sampling")
        except StepRefusedError as refused:  # E3
            return self.scheduler.refuse(scheduled, refused.__cause__)
        except Exception as error:  # E2: the step's requests end with it
            ended = [sequence for s in scheduled.sequences for sequence in s.request.sequences]
            for sequence in ended:
                self.scheduler.finish(sequence, "error", error)
            return ended
        self.scheduler.update(scheduled, tokens)
        if self._told is not None:
            self._told()
        if profile is not None:
            profile.lap("update")
        self._num_generated_tokens += len(scheduled.sampled)
        touched: list[RequestSequence] = []
        for sequence in scheduled.sampled:
            if sequence.detokenizer is not None:
                self._read(sequence, sequence.detokenizer)
            if sequence.request.stream or sequence.state is SequenceStatus.FINISHED:
                touched.append(sequence)
        return touched

    def _read(self, sequence: RequestSequence, detokenizer: Detokenizer) -> None:
        """Turns a sequence's newest token into text and ends the sequence at a stop string."""
        try:
            is_stop_token = sequence.finished and sequence.finish_reason != "length"
            if not is_stop_token or sequence.request.params.include_stop_str_in_output:
                detokenizer.push(sequence.output_ids[-1:])
            if detokenizer.stopped and not is_stop_token:
                self.scheduler.finish(sequence, "stop")
                sequence.finish_reason = "stop"  # rather than the length it reached with the same token
                sequence.stop_reason = detokenizer.stop_reason
        except Exception as error:  # of this sequence alone (E2)
            self.scheduler.finish(sequence, "error", error)
            sequence.finish_reason, sequence.error = "error", error

    def resize(self, num_blocks: int, *, reason: str) -> np.ndarray:
        """Has the cache hold `num_blocks` blocks from now on; int32, the ids given up. No more are in use, see
        `Scheduler.preempt_to`. reason: see `_given_up`."""
        cache = self._elastic("resize")
        return self._given_up(lambda: cache.resize(num_blocks), reason)

    def trim(self, share_kept: float = 0.0, *, reason: str = "dropped") -> np.ndarray:
        """The cache forgets unheld content, but for a share of it. Returns the ids that are unused then, int32."""
        cache = self._elastic("trim")
        return self._given_up(lambda: cache.trim(share_kept), reason)

    def _elastic(self, where: str) -> PrefixKVCache:
        if not shares_prefixes(self._cache):
            raise ArgumentError(
                f"expected a cache whose memory can be given up block by block, got {self._cache!r} in {where}; use "
                "storage paged or virtual"
            )
        return self._cache

    def _given_up(self, give_up: Callable[[], np.ndarray], reason: str) -> np.ndarray:
        """Runs a call that gives content up, for a reason of `event_dispatcher.LOSS_REASONS`.

        Tiers store that content, and none that was dropped before the call.
        """
        self.collect()
        block_ids = give_up()
        forgotten = Forgotten(reason, is_kept=True)
        if self.monitor is not None:
            self.monitor.collect(forgotten)
        elif self._stores is not None:
            self._stores.collect(forgotten)
        return block_ids

    def drop(self, tokens: np.ndarray, key: ResolvedKey = NOBODYS) -> Dropped:
        """Drops all content that begins with these tokens from memory, with events; tiers keep theirs.

        Blocks that requests hold are not found from now on, and free when they end. *raises:* ArgumentError: some of
        it is pinned; nothing has changed.
        """
        dropped = self.scheduler.drop(tokens, key)
        self.collect()
        return dropped

    # -- outputs ---------------------------------------------------------------------------------------

    def _outputs_of(self, sequences: list[RequestSequence]) -> list[RequestOutput]:
        """One output for each request that ended, or streams, among those of `sequences`."""
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
        if self.monitor is not None:
            self.monitor.served(request)
        return self._outputs.finished(request)

    # -- counts -----------------------------------------------------------------------------

    def _hit_tokens(self) -> dict[str, int]:
        """Cached tokens of prompts by where they were: memory, or the tier that gave them. Never less than before."""
        found = Counter({"memory": 0}) + self._outputs.hit_tokens
        for request in self.scheduler.requests.values():
            found.update(request.hit_tokens())
        return {"memory": 0, **found}

    def stats(self) -> dict[str, Any]:
        """The cache's counts and the engine's, since the start. Seconds are those spent in steps.

        evicted_blocks: full blocks whose content memory gave up, for any reason; without a monitor the cache's own
        count of what it evicted, partial blocks included.
        query_tokens, hit_tokens: tokens of prompts looked up, and found, where prefixes are shared, else 0. A request
        counts once, at its first start: what a preempted one finds of itself is no hit. hit_rate: their quotient.
        prefill_tokens_per_second: tokens computed in steps that had some of a prompt, by the time of those;
        decode_tokens_per_second: tokens generated in the other steps, by theirs. time_to_first_token_s: mean of the
        requests that have ended, from their arrival. token_gap_s: mean time between two tokens of a sequence.
        """
        scheduler = self.scheduler
        live = scheduler.requests.values()
        num_prompt = self._outputs.num_prompt_tokens + sum(
            len(r.prompt_token_ids) for r in live if r.started_s is not None
        )
        num_cached = self._outputs.num_cached_tokens + sum(r.num_cached_tokens for r in live)
        num_query, num_hit = (num_prompt, num_cached) if self._cache.prefix_caching else (0, 0)
        return {
            **self._cache.stats(),
            **({} if self.monitor is None else {"evicted_blocks": self.monitor.history.num_evicted}),
            "query_tokens": num_query,
            "hit_tokens": num_hit,
            "num_running": len(scheduler.running),
            "num_waiting": len(scheduler.waiting) + len(scheduler.held),
            "num_unfinished_requests": len(scheduler.requests),
            "num_finished_requests": self._outputs.num_finished,
            "num_prompt_tokens": num_prompt,
            "num_cached_tokens": num_cached,
            "num_computed_tokens": scheduler.num_computed_tokens,
            "num_generated_tokens": self._num_generated_tokens,
            "num_steps": scheduler.num_steps,
            "num_preemptions": scheduler.num_preemptions,
            "num_loading": len(scheduler.loading),
            "num_swapped": self.swap.num_swapped,
            "swapped_bytes": self.swap.num_bytes,
            "num_restored_tokens": self.swap.num_restored_tokens,
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
class _Speed:
    """Tokens of steps of one kind, and the time of those."""

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
