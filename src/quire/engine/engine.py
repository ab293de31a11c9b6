"""The step loop: requests in, outputs out, every block returned whatever happens.

`Engine` ties scheduler, runner, sampler and detokenizer together. It owns no thread: somebody calls `step` while
`has_work`. Not thread-safe.

Invariants
    E1  after a request has ended, by whatever way, it holds no block and the engine no reference to it.
    E2  an error of one sample (its logits, its text) ends its own sample; an error of a step ends the requests
        of that step; requests that wait go on. An interruption ends all requests and is raised.
    E3  a step that the storage has no memory for is as if it had never been; it ends no request but one that is alone.

Cost per step beside the model: O(running samples), text only for those that stream or have stop strings.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from quire.cache.pins import Pins
from quire.engine.detokenizer import Detokenizer, decode
from quire.engine.fair_share import FairShare
from quire.engine.preemption import Parking
from quire.engine.profile import NoProfile, Profile
from quire.engine.request import CompletionOutput, Request, RequestOutput, Sample, Timings
from quire.engine.sampling import sample_tokens
from quire.engine.sampling_params import SamplingParams
from quire.engine.scheduled_step import ScheduledStep, StepRefusedError
from quire.engine.scheduler import Scheduler
from quire.engine.speeds import Speeds
from quire.engine.structured import Grammars
from quire.engine.tenants import Place, Retention, Tenants, retention_number
from quire.engine.tier_loads import TierLoads
from quire.engine.tier_stores import TierStores
from quire.engine.watch import Watch
from quire.errors import ArgumentError, PromptError

__all__ = ["Engine", "StepRunner"]

_DEFAULT_MAX_TOKENS = 256
_MAX_ID = 2**31 - 1
_WAIT_S = 0.05  # that a step waits for tiers at most, where nothing else is to be done


class StepRunner(Protocol):
    """What computes a step: `quire.engine.runner.Runner`, or a fake."""

    def run(self, step: ScheduledStep) -> Any: ...


class Engine:
    """Requests over one cache and one runner.

    cache: a `quire.Cache` nobody else uses. tokenizer: None if only token ids go in and come out.
    max_model_len: longest sequence, prompt and output. sampling_defaults: see `SamplingParams.resolved`.
    seed: of the requests that bring none; the same submissions in the same order then give the same tokens.
    profile: takes the times of every step. preemption, loads, stores: see `LLM` and the classes; speeds: theirs, kept
    up here. tenant_secret: see `Tenants`. watch: takes the cache's events and what was served (`watch.py`).
    """

    def __init__(
        self,
        runner: StepRunner,
        cache: Any,
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
        speeds: Speeds | None = None,
        parking: Parking | None = None,
        loads: TierLoads | None = None,
        stores: TierStores | None = None,
        tenant_secret: bytes | None = None,
        watch: Watch | None = None,
    ) -> None:
        self._runner = runner
        self._speeds = speeds or Speeds()
        self.parking = parking or Parking(cache)
        self._loads = loads
        self._stores = stores
        self._cache = cache
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._grammars = Grammars(tokenizer, vocab_size, sorted(self._eos_token_ids))
        self._sampling_defaults = sampling_defaults
        self._seed = seed
        self._profile = profile or NoProfile()
        self._clock = clock
        self._arrivals = itertools.count()
        self.max_model_len = max_model_len
        self.share = FairShare(cache)
        self.tenants = Tenants(cache, self.share, tenant_secret)
        self.pins: Pins = cache.pins
        self.pins.use_clock(clock)
        self.watch = watch
        if watch is not None:
            self.pins.on_expired = watch.pin_expired
            if watch.tier_events is not None:
                watch.tier_events.namespaces = lambda: [
                    *self.tenants.namespaces_of(None),
                    self.tenants.public,
                ]
        self.scheduler = Scheduler(
            cache,
            max_batch_tokens=max_batch_tokens,
            max_num_seqs=max_num_seqs,
            watermark=watermark,
            clock=clock,
            parking=self.parking,
            loads=loads,
            on_reserved=self._collect,
            share=self.share,
        )
        self.parking.on_reserved = self._collect
        self._num_finished = 0
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_generated_tokens = 0
        self._busy_s = 0.0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    # -- requests in -----------------------------------------------------------------------------------

    def check(
        self,
        prompt_token_ids: Any,
        params: SamplingParams,
        *,
        tenant: str | None = None,
        cache_salt: str | None = None,
        namespace: bytes = b"",
        extra_keys: Mapping[int, bytes] | None = None,
        place: Place | None = None,
    ) -> tuple[np.ndarray, SamplingParams, int, Place]:
        """The prompt as int32, the parameters resolved, the tokens to generate at most, where its content lives.

        Changes nothing. place: where, if that is known already.
        *raises:* PromptError, ArgumentError, CapacityError: this request cannot be served, with the numbers.
        """
        tokens = self.check_tokens(prompt_token_ids)
        place = place or self.tenants.place(
            tokens, tenant=tenant, cache_salt=cache_salt, namespace=namespace, extra_keys=extra_keys
        )
        if not isinstance(params, SamplingParams):
            raise ArgumentError(f"expected SamplingParams, got {type(params).__name__}")
        params = params.resolved(self._sampling_defaults)
        for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            beyond = [token for token in ids if token >= self._vocab_size]
            if beyond:
                raise ArgumentError(
                    f"expected token ids below the vocabulary of {self._vocab_size}, got {beyond[0]} - in `{name}`"
                )
        if params.stop and self._tokenizer is None:
            raise ArgumentError(
                "expected a model with a tokenizer, got none - for `stop`; use stop_token_ids"
            )
        self._grammars.compile(params)
        room = self.max_model_len - len(tokens)
        if params.max_tokens is None:
            fits = self.scheduler.max_tokens_that_fit(place.account) + 1 - len(tokens)
            max_tokens = max(1, min(_DEFAULT_MAX_TOKENS, room, fits))
        else:
            max_tokens = min(params.max_tokens, room)
        self.scheduler.check_fits(
            len(tokens) + max_tokens - 1,
            f"a prompt of {len(tokens)} tokens with max_tokens {max_tokens}",
            account=place.account,
            num_shared=self.pins.units_shared(tokens, namespace=place.namespace, extra_keys=place.extra_keys),
        )
        return tokens, params, max_tokens, place

    def submit(
        self,
        prompt_token_ids: Any,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        prompt: str | None = None,
        priority: int = 0,
        stream: bool = False,
        deltas: bool = False,
        namespace: bytes = b"",
        extra_keys: Mapping[int, bytes] | None = None,
        tenant: str | None = None,
        cache_salt: str | None = None,
        retention: Retention = "normal",
    ) -> str:
        """Queues a request and returns its id.

        priority: smaller is served first. stream: an output per step instead of one at the end; deltas: each with what
        is new only. namespace, extra_keys: part of the identity of its cached content, see `quire.Cache`. tenant: whose
        it is, of those that were added; cache_salt: text that divides the tenant's content further. retention: how its
        content is kept once it has ended: "keep" goes last, "discard" first.
        *raises:* what `check` raises; nothing was changed then.
        """
        kept_as = retention_number(retention)
        checked = self.check(
            prompt_token_ids,
            params or SamplingParams(),
            tenant=tenant,
            cache_salt=cache_salt,
            namespace=namespace,
            extra_keys=extra_keys,
        )
        return self._queue(
            *checked,
            request_id=request_id,
            prompt=prompt,
            priority=checked[3].priority + priority,
            stream=stream,
            deltas=deltas,
            retention=kept_as,
            tenant=tenant,
        ).request_id

    def _queue(
        self,
        tokens: np.ndarray,
        params: SamplingParams,
        max_tokens: int,
        place: Place,
        *,
        request_id: str | None,
        prompt: str | None,
        priority: int,
        stream: bool,
        deltas: bool,
        retention: int,
        tenant: str | None,
    ) -> Request:
        """A request that `check` has let through."""
        arrival = next(self._arrivals)
        if request_id is None:
            request_id = f"request-{arrival}"
        if request_id in self.scheduler.requests:
            raise ArgumentError(f"expected a new request id, got {request_id!r}, which is still running")
        seed = params.seed
        if seed is None:
            seed = int(np.random.SeedSequence([self._seed, arrival]).generate_state(1, np.uint64)[0])
        stop_ids = frozenset(params.stop_token_ids)
        request = Request(
            request_id,
            tokens,
            params,
            max_tokens=max_tokens,
            stop_ids=stop_ids if params.ignore_eos else stop_ids | self._eos_token_ids,
            arrival=arrival,
            priority=priority,
            seed=seed,
            arrival_s=self._clock(),
            prompt=prompt,
            stream=stream,
            deltas=deltas,
            namespace=place.namespace,
            extra_keys=place.extra_keys,
            account=place.account,
            retention=retention,
            tenant=tenant,
        )
        if self._tokenizer is not None and (stream or params.stop):
            for sample in request.samples:
                sample.detokenizer = Detokenizer(self._tokenizer, tokens[-8:].tolist(), params.stop)  # type: ignore[arg-type]
        if (grammar := self._grammars.compile(params)) is not None:
            for sample in request.samples:
                sample.matcher = self._grammars.matcher(grammar)
        self.scheduler.add(request)
        self.pins.touch(tokens, namespace=place.namespace, extra_keys=place.extra_keys)
        return request

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
        if len(parent.samples) > 1:
            raise ArgumentError(
                f"expected a request with n=1 to fork, got {request_id!r} with n={len(parent.samples)}"
            )
        sample = parent.samples[0]
        if params is None:
            left = parent.max_tokens - len(sample.output_ids)
            params = replace(parent.params, max_tokens=left, seed=None)
        place = Place(parent.namespace, parent.extra_keys, parent.account)
        tokens, params, max_tokens, _ = self.check(sample.token_ids(), params, place=place)
        child = self._queue(
            tokens,
            params,
            max_tokens,
            place,
            request_id=new_request_id,
            prompt=None,
            priority=parent.priority,
            stream=parent.stream if stream is None else stream,
            deltas=parent.deltas,
            retention=parent.retention,
            tenant=parent.tenant,
        )
        if sample.matcher is not None and params.forms == parent.params.forms:
            child.samples[0].matcher = sample.matcher.copy()
        self.scheduler.branch(sample, child.samples[0])
        return child.request_id

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request in any state; its last output, or None if it is not here (any more)."""
        request = self.scheduler.abort(request_id)
        return None if request is None else self._finished(request)

    def abort_all(self) -> None:
        for request_id in list(self.scheduler.requests):
            self.abort(request_id)

    # -- a step ----------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Ends a step's waiting for the tiers. The one call that may come from any thread."""
        if self._loads is not None:
            self._loads.changed.set()

    def _collect(self) -> None:
        """Has what memory gave up, or gained, stored in the tiers as far as their policy says so."""
        if self.watch is not None:
            self.watch.collect()
        elif self._stores is not None:
            self._stores.collect()

    def step(self) -> list[RequestOutput]:
        """Computes one step; outputs of the requests that ended, and of the streaming ones that grew.

        Where nothing can be computed until a load from a tier has ended, waits for that a moment instead.
        """
        started = self._clock()
        scheduled: ScheduledStep | None = None
        self.pins.expire()
        self._profile.begin()
        try:
            if self._loads is not None:
                self._loads.changed.clear()  # before what it tells of is looked at
            scheduled = self.scheduler.schedule()
            touched = self.scheduler.take_failed()
            self._profile.lap("schedule")
            if scheduled is not None:
                touched += self._compute(scheduled)
                if scheduled.is_prompt:
                    self._speeds.computed(len(scheduled.input_ids), self._clock() - started)
            elif self._loads is not None and self.scheduler.waits_for_tiers:
                self._loads.changed.wait(_WAIT_S)
            outputs = self._outputs(touched)
            self._profile.lap("detokenize")
            return outputs
        except BaseException:
            self.abort_all()  # E1: an interruption, or a bug; nobody is left to return the blocks
            raise
        finally:
            self._profile.end(scheduled)
            self._busy_s += self._clock() - started

    def _compute(self, scheduled: ScheduledStep) -> list[Sample]:
        """Runs a step; the samples that drew a token or ended."""
        try:
            logits = self._runner.run(scheduled)
            self._profile.lap("forward")
            tokens = np.zeros(0, np.int64)
            if scheduled.sampled:
                tokens = sample_tokens(logits, scheduled.sampled, scheduled.draw_rows)
            self._profile.lap("sampling")
        except StepRefusedError as refused:  # E3
            return self.scheduler.refuse(scheduled, refused.__cause__)
        except Exception as error:  # E2: the step's requests end with it
            ended = [sample for s in scheduled.samples for sample in s.request.samples]
            for sample in ended:
                self.scheduler.finish(sample, "error", error)
            return ended
        self.scheduler.update(scheduled, tokens)
        self._collect()
        self._profile.lap("update")
        self._num_generated_tokens += len(scheduled.sampled)
        for sample in scheduled.sampled:
            if sample.detokenizer is not None:
                self._read(sample, sample.detokenizer)
        return [sample for sample in scheduled.sampled if sample.request.stream or sample.finished]

    def _read(self, sample: Sample, detokenizer: Detokenizer) -> None:
        """Turns a sample's newest token into text and ends the sample at a stop string."""
        try:
            if not (sample.finished and sample.finish_reason != "length"):
                detokenizer.push(sample.output_ids[-1:])
            if detokenizer.stopped:
                self.scheduler.finish(sample, "stop")
                sample.finish_reason = "stop"  # rather than the length it reached with the same token
        except Exception as error:  # of this sample alone (E2)
            self.scheduler.finish(sample, "error", error)
            sample.finish_reason, sample.error = "error", error

    def resize(self, num_blocks: int) -> np.ndarray:
        """Has the cache hold `num_blocks` units from now on; int32, the ids given up. Running requests go on.

        Where more units are in use, requests are preempted, the last first, and computed again later. One that cannot
        fit any more ends with a CapacityError when its turn comes.
        """
        self.scheduler.preempt_to(num_blocks)
        given_up = self._cache.resize(num_blocks)
        if self.watch is not None:
            self.watch.collect(keep_forgotten=True)
        elif self._stores is not None:
            self._stores.collect(keep_forgotten=True)
        return given_up

    # -- outputs ---------------------------------------------------------------------------------------

    def _outputs(self, samples: list[Sample]) -> list[RequestOutput]:
        """One output for each request that ended, or streams, among those of `samples`."""
        outputs: list[RequestOutput] = []
        seen: set[str] = set()
        for sample in samples:
            request = sample.request
            if request.request_id not in seen:
                seen.add(request.request_id)
                if request.finished:
                    outputs.append(self._finished(request))
                elif request.stream:
                    outputs.append(self._output(request))
        return outputs

    def _finished(self, request: Request) -> RequestOutput:
        self._num_finished += 1
        self._num_prompt_tokens += len(request.prompt_token_ids)
        self._num_cached_tokens += request.num_cached_tokens
        if self.watch is not None:
            self.watch.served(request)
        return self._output(request)

    def _output(self, request: Request) -> RequestOutput:
        arrival = request.arrival_s
        times = (request.started_s, request.first_token_s, request.finished_s)
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_list,
            num_cached_tokens=request.num_cached_tokens,
            outputs=[self._completion(sample) for sample in request.samples],
            finished=request.finished,
            timings=Timings(*(None if at is None else at - arrival for at in times)),
            num_tier_tokens=dict(request.num_tier_tokens),
        )

    def _completion(self, sample: Sample) -> CompletionOutput:
        text, new_text = "", ""
        try:
            text, new_text = self._text(sample)
        except Exception as error:  # a tokenizer that cannot decode what the model wrote (E2)
            sample.finish_reason, sample.error = "error", error
        shown = 0
        if sample.request.deltas:
            text, shown, sample.num_shown = new_text, sample.num_shown, len(sample.output_ids)
        return CompletionOutput(
            index=sample.index,
            text=text,
            token_ids=sample.output_ids[shown:],
            finish_reason=sample.finish_reason,
            logprobs=None if sample.logprobs is None else sample.logprobs[shown:],
            new_text=new_text,
            error=sample.error,
        )

    def _text(self, sample: Sample) -> tuple[str, str]:
        """The text so far, and what of it no output has shown yet."""
        detokenizer = sample.detokenizer
        if detokenizer is not None:
            if sample.finished:
                detokenizer.finish()
            return detokenizer.text, detokenizer.take_new()
        if self._tokenizer is None or not sample.finished:
            return "", ""
        ids = sample.output_ids
        if sample.finish_reason == "stop":
            ids = ids[:-1]  # the stop token
        text = decode(self._tokenizer, ids, sample.request.prompt_token_ids[-8:].tolist())
        return text, text

    # -- checks and counts -----------------------------------------------------------------------------

    def check_tokens(self, prompt_token_ids: Any) -> np.ndarray:
        """A prompt as int32, a copy. *raises:* PromptError: empty, no integers, ids out of range, too long."""
        tokens = np.asarray(prompt_token_ids)
        if tokens.size == 0:
            raise PromptError("expected a prompt of at least one token, got an empty one")
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise PromptError(
                f"expected a prompt of integer token ids in one dimension, got {tokens.dtype} {tokens.shape}"
            )
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= min(self._vocab_size, _MAX_ID):
            bad = low if low < 0 else high
            raise PromptError(
                f"expected token ids of 0 to {self._vocab_size - 1}, got {bad} at position "
                f"{int(np.flatnonzero(tokens == bad)[0])} of the prompt"
            )
        if len(tokens) >= self.max_model_len:
            raise PromptError(
                f"expected a prompt of at most {self.max_model_len - 1} tokens (the longest sequence is "
                f"{self.max_model_len}, one of it to generate), got {len(tokens)}; shorten it or raise max_model_len"
            )
        return tokens.astype(np.int32)  # a copy: the caller may go on with its own

    def stats(self) -> dict[str, Any]:
        """The cache's counts and the engine's, since the start. Seconds are those spent in steps."""
        scheduler = self.scheduler
        live = scheduler.requests.values()
        num_prompt = self._num_prompt_tokens + sum(
            len(r.prompt_token_ids) for r in live if r.started_s is not None
        )
        num_cached = self._num_cached_tokens + sum(r.num_cached_tokens for r in live)
        return {
            **self._cache.stats(),
            "num_running": len(scheduler.running),
            "num_waiting": len(scheduler.waiting),
            "num_unfinished_requests": len(scheduler.requests),
            "num_finished_requests": self._num_finished,
            "num_prompt_tokens": num_prompt,
            "num_cached_tokens": num_cached,
            "num_computed_tokens": scheduler.num_computed_tokens,
            "num_generated_tokens": self._num_generated_tokens,
            "num_steps": scheduler.num_steps,
            "num_preemptions": scheduler.num_preemptions,
            "num_loading": len(scheduler.loading),
            "num_parked": self.parking.num_parked,
            "parked_bytes": self.parking.num_bytes,
            "num_restored_tokens": self.parking.num_restored_tokens,
            "num_loaded_tokens": self._loads.loaded_tokens.total() if self._loads is not None else 0,
            "hit_rate": num_cached / num_prompt if num_prompt else 0.0,
            "busy_s": self._busy_s,
            "tokens_per_second": self._num_generated_tokens / self._busy_s if self._busy_s else 0.0,
        }
