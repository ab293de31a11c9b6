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

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from quire.cache.pins import Pins
from quire.engine.detokenizer import Detokenizer
from quire.engine.fair_share import FairShare
from quire.engine.intake import Intake
from quire.engine.outputs import Outputs
from quire.engine.preemption import Parking
from quire.engine.profile import NoProfile, Profile
from quire.engine.request import Request, RequestOutput, Sample
from quire.engine.sampling import sample_tokens
from quire.engine.sampling_params import SamplingParams
from quire.engine.scheduled_step import ScheduledStep, StepRefusedError
from quire.engine.scheduler import Scheduler
from quire.engine.speeds import Speeds
from quire.engine.tenants import Place, Retention, Tenants, retention_number
from quire.engine.tier_loads import TierLoads
from quire.engine.tier_stores import TierStores
from quire.engine.watch import Watch
from quire.errors import ArgumentError

__all__ = ["Engine", "StepRunner"]

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
        self._profile = profile or NoProfile()
        self._clock = clock
        self.share = FairShare(cache)
        self.tenants = Tenants(cache, self.share, tenant_secret)
        self.pins: Pins = cache.pins
        self.pins.use_clock(clock)
        self._intake = Intake(
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
    ) -> tuple[np.ndarray, SamplingParams, int, Place]:
        """See `Intake.check`: what is wrong with a request is raised, nothing changes."""
        return self._intake.check(
            prompt_token_ids,
            params,
            tenant=tenant,
            cache_salt=cache_salt,
            namespace=namespace,
            extra_keys=extra_keys,
        )

    def check_tokens(self, prompt_token_ids: Any) -> np.ndarray:
        """A prompt as int32, a copy. *raises:* PromptError: empty, no integers, ids out of range, too long."""
        return self._intake.check_tokens(prompt_token_ids)

    def has_grammar(self, params: SamplingParams) -> bool:
        """Whether `compile_grammar` has nothing to build; any thread may ask."""
        return self._intake.has_grammar(params)

    def compile_grammar(self, params: SamplingParams) -> None:
        """Builds the grammar of `params` ahead of `check` and `submit`, which find it then; any thread may.

        *raises:* ArgumentError: it cannot be used.
        """
        self._intake.compile_grammar(params)

    def use_default_max_tokens(self, num_tokens: int) -> None:
        """Has answers end there (256 if this is not called) where neither the request nor the model says how long."""
        self._intake.default_max_tokens = num_tokens

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

    def _queue(self, *checked: Any, **options: Any) -> Request:
        """A request that `check` has let through, queued. options: of `Intake.request`."""
        request = self._intake.request(*checked, **options)
        if request.request_id in self.scheduler.requests:
            raise ArgumentError(
                f"expected a new request id, got {request.request_id!r}, which is still running"
            )
        self.scheduler.add(request)
        tokens = request.prompt_token_ids
        self.pins.touch(tokens, namespace=request.namespace, extra_keys=request.extra_keys)
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
        tokens, params, max_tokens, _ = self._intake.check(sample.token_ids(), params, place=place)
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
            outputs = self._outputs_of(touched)
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

    def _outputs_of(self, samples: list[Sample]) -> list[RequestOutput]:
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
                    outputs.append(self._outputs.so_far(request))
        return outputs

    def _finished(self, request: Request) -> RequestOutput:
        if self.watch is not None:
            self.watch.served(request)
        return self._outputs.finished(request)

    # -- counts -----------------------------------------------------------------------------

    def _hit_tokens(self) -> dict[str, int]:
        """Cached tokens of prompts by where they were: memory, or the tier that gave them. Never less than before."""
        found = Counter({"memory": 0}) + self._outputs.hit_tokens
        for request in self.scheduler.requests.values():
            found.update(request.hit_tokens())
        return {"memory": 0, **found}

    def stats(self) -> dict[str, Any]:
        """The cache's counts and the engine's, since the start. Seconds are those spent in steps."""
        scheduler = self.scheduler
        live = scheduler.requests.values()
        num_prompt = self._outputs.num_prompt_tokens + sum(
            len(r.prompt_token_ids) for r in live if r.started_s is not None
        )
        num_cached = self._outputs.num_cached_tokens + sum(r.num_cached_tokens for r in live)
        return {
            **self._cache.stats(),
            "num_running": len(scheduler.running),
            "num_waiting": len(scheduler.waiting),
            "num_unfinished_requests": len(scheduler.requests),
            "num_finished_requests": self._outputs.num_finished,
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
            "hit_tokens_by_tier": self._hit_tokens(),
            "hit_rate": num_cached / num_prompt if num_prompt else 0.0,
            "busy_s": self._busy_s,
            "tokens_per_second": self._num_generated_tokens / self._busy_s if self._busy_s else 0.0,
        }
