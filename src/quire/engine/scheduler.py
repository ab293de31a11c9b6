"""Which tokens of which samples run in the next step. Pure bookkeeping: no tensors, no text, no model.

Continuous batching with chunked prefill under a token budget: running samples that decode come first, then
running ones that still compute their prompt, then waiting ones, each in order of (priority, arrival). A waiting
sample does not overtake one that was refused for want of memory, unless that one's own account alone is short of it.

Out of memory (the cache evicts what is merely cached by itself): the last sample in that order of those that run or
load is preempted: its bytes are parked or not (`preemption`), its sequence is closed, so that its content stays
findable, and it waits to be opened again with prompt and output.

A waiting sample whose next tokens are being computed by a running one waits for that one's commit. One whose prefix
lies in a tier is LOADING meanwhile (`tier_loads`): its units are reserved, others overtake it.

Invariants
    R1  a sample has an open sequence exactly while it is RUNNING or LOADING.
    R2  `running`, `loading` and `waiting` are sorted by `Sample.key`; nobody is in two of them.
    R3  progress: the first of those that run or load is never preempted, and alone it always fits (`check_fits`);
        a load ends by itself.

Not here: the clock is an argument, chance has no place. Not thread-safe: one owner.
Cost: `schedule` O(running + samples looked at + new tokens), `update` O(scheduled).
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from quire.engine.admission import MAX_LOOKED_AT, Admission
from quire.engine.fair_share import FairShare
from quire.engine.loading import LoadingQueue
from quire.engine.preemption import Parking
from quire.engine.refusals import Refusals
from quire.engine.request import Request, Sample, SampleState
from quire.engine.scheduled_step import ScheduledStep
from quire.engine.tier_loads import TierLoads
from quire.errors import CapacityError

__all__ = ["Scheduler"]


class Scheduler:
    """Decides the steps of one engine over one cache.

    cache: a `quire.Cache` (its own watermark 0: the scheduler keeps one). max_batch_tokens: tokens of a step.
    max_num_seqs: samples that run at once. watermark: share of the units an admission must leave while others
    run, so that they do not have to preempt it at once. clock: seconds. parking: what becomes of preempted samples;
    without it they are computed again. loads: of prefixes in the tiers, where there are any. on_reserved: called
    whenever units have been handed out that nothing was written to yet.
    """

    def __init__(
        self,
        cache: Any,
        *,
        max_batch_tokens: int = 2048,
        max_num_seqs: int = 256,
        watermark: float = 0.01,
        clock: Callable[[], float] = time.monotonic,
        parking: Parking | None = None,
        loads: TierLoads | None = None,
        on_reserved: Callable[[], None] = lambda: None,
        share: FairShare | None = None,
    ) -> None:
        self._cache = cache
        self._share = share or FairShare(cache)
        self._parking = parking or Parking(cache)
        self._loading = None if loads is None else LoadingQueue(cache, loads, self._share, on_reserved)
        self._on_reserved = on_reserved
        self._admission = Admission(
            cache, self._share, self._parking, watermark=watermark, open_sequence=self._open
        )
        self.max_batch_tokens = max_batch_tokens
        self.max_num_seqs = max_num_seqs
        self.clock = clock
        self.requests: dict[str, Request] = {}
        self.waiting: list[Sample] = []
        self.running: list[Sample] = []
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_computed_tokens = 0
        self._failed: list[Sample] = []
        self._closed: list[int] = []  # cache sequences closed since the last step
        self._chunk_limit = max_batch_tokens  # lowered while one sample alone has too little memory
        self._refusals = Refusals()

    # -- requests in and out ---------------------------------------------------------------------------

    def check_fits(self, num_tokens: int, what: str, *, account: int = 0, num_shared: int = 0) -> None:
        """Raises CapacityError unless a sequence of `num_tokens` tokens could be computed here alone.

        account: whose it is. num_shared: units that pins hold of it.
        """
        self._share.check_fits(account, num_tokens, num_shared, what)

    def max_tokens_that_fit(self, account: int = 0) -> int:
        """The longest sequence that can be computed here alone."""
        return self._share.max_tokens(account)

    def check_request(self, request: Request) -> None:
        """*raises:* CapacityError if the request can never fit, with the numbers."""
        num_tokens = len(request.prompt_token_ids) + request.max_tokens - 1  # the last one is never computed
        num_shared = self._cache.pins.units_shared(
            request.prompt_token_ids, namespace=request.namespace, extra_keys=request.extra_keys
        )
        self.check_fits(
            num_tokens, f"request {request.request_id!r}", account=request.account, num_shared=num_shared
        )

    def add(self, request: Request) -> None:
        """Queues a request. *raises:* CapacityError if it can never fit, with the numbers."""
        self.check_request(request)
        self.requests[request.request_id] = request
        self._wait(request.samples[0])

    def branch(self, parent: Sample, sample: Sample) -> bool:
        """Has a waiting sample of the parent's very tokens go on over the parent's blocks; whether that can be now.

        Not while the parent computes its prompt, has no blocks, or nobody more may run: the sample waits then like any
        other, and finds what the parent has committed.
        """
        is_decoding = parent.state is SampleState.RUNNING and parent.num_computed + 1 == parent.num_tokens
        if not (is_decoding and self._cache.can_fork and len(self.running) < self.max_num_seqs):
            return False
        self.waiting.remove(sample)
        self._run_beside(parent, sample)
        self._start([sample])
        return True

    def abort(self, request_id: str) -> Request | None:
        """Ends a request wherever it is; its blocks are returned. None if it is not here (any more)."""
        request = self.requests.get(request_id)
        if request is not None:
            for sample in request.samples:
                self.finish(sample, "abort")
        return request

    def finish(self, sample: Sample, reason: str, error: BaseException | None = None) -> None:
        """Ends one sample and returns its blocks. Nothing happens if it has ended already."""
        state = sample.state
        if state is SampleState.FINISHED:
            return
        sample.state = SampleState.FINISHED
        sample.finish_reason = reason
        sample.error = error or sample.error
        if state is SampleState.WAITING:
            self.waiting.remove(sample)
        elif state is SampleState.RUNNING:
            self.running.remove(sample)
            self._close(sample)
            self._refusals.ended()
        elif state is SampleState.LOADING:
            self._stop_loading(sample)
        sample.search = None
        self._parking.drop(sample)
        request = sample.request
        if request.finished:
            request.finished_s = self.clock()
            self.requests.pop(request.request_id, None)

    def take_failed(self) -> list[Sample]:
        """Samples that `schedule` itself has ended, there being no room for them even alone."""
        failed, self._failed = self._failed, []
        return failed

    @property
    def loading(self) -> list[Sample]:
        """The samples whose prefix comes from a tier just now."""
        return [] if self._loading is None else self._loading.samples

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    @property
    def waits_for_tiers(self) -> bool:
        """Whether a load or a search is under way that a step could follow from."""
        return bool(self.loading) or any(not sample.is_searched for sample in self.waiting[:MAX_LOOKED_AT])

    # -- a step ----------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledStep | None:
        """The next step, its memory reserved; None if there is nothing to run."""
        self._chunk_limit = self.max_batch_tokens
        if self._loading is not None:
            for sample in self._loading.land(self.max_num_seqs - len(self.running)):
                sample.state = SampleState.RUNNING
                insort(self.running, sample, key=_key)
                self._start([sample])
            if self._loading.may_start(self.waiting):
                running = [(sample, 1) for sample in self.running]
                promised = self._admission.margin + self._admission.units_to_come(running)
                promised_to = self._admission.taken_by_account(running)
                self._loading.start(
                    self.waiting, self.running, promised, promised_to, self.max_num_seqs, self._open
                )
        may_admit = True
        while self.running or self.waiting:
            chosen, budget = self._continue_running()
            admitted = self._admit(chosen, budget) if may_admit else []
            chosen += admitted
            while chosen:
                ids = np.array([sample.sequence.id for sample, _ in chosen], np.int64)
                num_new = np.array([n for _, n in chosen], np.int32)
                plan = self._cache.reserve(ids, num_new)
                if plan is not None:
                    self._on_reserved()
                    self._start([sample for sample, _ in admitted])
                    self.num_steps += 1
                    self.num_computed_tokens += int(num_new.sum())
                    closed, self._closed = np.array(self._closed, np.int64), []
                    return ScheduledStep.build(chosen, ids, num_new, plan, closed)
                if not admitted or len(chosen) == 1:
                    break
                self._unadmit(admitted.pop()[0])
                chosen.pop()
            # Who joined and is left runs from now on, though this attempt came to nothing.
            self._start([sample for sample, _ in admitted])
            if not self._make_room(chosen):
                return None
            may_admit = not self.running
        return None

    def update(self, step: ScheduledStep, tokens: Sequence[int] | np.ndarray) -> None:
        """Takes in a step that has been computed, with the token each of `step.sampled` drew.

        Commits what was computed, forks the samples of new requests, appends the tokens and ends what is at
        its end. A sample with `error` set ends with it.
        """
        cache, now = self._cache, self.clock()
        self._refusals.computed()
        # Nothing but decodes, as it mostly is: one call for all of them.
        together = step.is_decode and all(s.state is SampleState.RUNNING for s in step.samples)
        if together:
            cache.advance(step.sequence_ids, step.positions + 1, tokens)
        for sample, n in zip(step.samples, step.num_new_tokens.tolist(), strict=True):
            if sample.state is SampleState.RUNNING:
                sample.num_computed += n
                if not together:
                    cache.commit(sample.sequence, sample.num_computed)
        for sample in step.sampled:
            if sample.state is SampleState.UNBORN:
                self._fork(sample)
        if isinstance(tokens, np.ndarray):
            tokens = tokens.tolist()
        for sample, token in zip(step.sampled, tokens, strict=True):
            if sample.state is SampleState.FINISHED:
                continue
            request = sample.request
            if sample.error is not None:
                self.finish(sample, "error")
                continue
            sample.output_ids.append(token)
            sample.last_token = token
            sample.num_tokens += 1
            if request.first_token_s is None:
                request.first_token_s = now
            if token in request.stop_ids:
                self.finish(sample, "stop")
            elif len(sample.output_ids) >= request.max_tokens:
                self.finish(sample, "length")
            elif sample.sequence is not None and not together:
                sample.sequence.append([token])

    def refuse(self, step: ScheduledStep, error: BaseException | None) -> list[Sample]:
        """Takes back a step that the storage had no memory for, as if there had been too few units; who ends with it.

        Who was to be copied waits again, or else the last that runs; one that is alone is tried once more, then ends.
        """
        self.num_steps -= 1
        self.num_computed_tokens -= int(step.num_new_tokens.sum())
        alone = self.running[0] if len(self.running) == 1 else None
        ended: list[Sample] = []
        if alone is not None and alone is self._refusals.alone:
            ended = [alone, *alone.unborn_siblings()]
            for sample in ended:
                self.finish(sample, "error", error)
            alone = None
        copying = [sample for sample in step.copying if sample.state is SampleState.RUNNING]
        for sample in copying:
            self._unadmit(sample)
        if not copying and len(self.running) > 1:
            self._preempt_last()
        self._refusals.refused(alone)
        return ended

    # -- choosing --------------------------------------------------------------------------------------

    def _continue_running(self) -> tuple[list[tuple[Sample, int]], int]:
        """What the running samples compute, decodes first, and the token budget that is left."""
        budget = self.max_batch_tokens
        chosen: list[tuple[Sample, int]] = []
        prefills: list[Sample] = []
        for sample in self.running:
            if sample.num_tokens - sample.num_computed > 1:
                prefills.append(sample)
            elif budget:
                chosen.append((sample, 1))
                budget -= 1
        for sample in prefills:
            n = min(sample.num_tokens - sample.num_computed, budget, self._chunk_limit)
            if n == 0:
                break
            chosen.append((sample, n))
            budget -= n
        return chosen, budget

    def _admit(self, chosen: list[tuple[Sample, int]], budget: int) -> list[tuple[Sample, int]]:
        """Waiting samples that join the step, opened and moved to `running`."""
        room = self.max_num_seqs - len(self.running)
        if self._refusals.nobody_joins:
            room = 0 if self.running else 1
        return self._admission.admit(
            self.waiting,
            self.running,
            chosen,
            is_first=not (self.running or self.loading),
            room=room,
            budget=budget,
            chunk_limit=self._chunk_limit,
        )

    # -- moving samples --------------------------------------------------------------------------------

    def _make_room(self, chosen: list[tuple[Sample, int]]) -> bool:
        """The running samples do not fit: preempts one of them, or lets the only one ask for less."""
        if not self.running:
            return False
        live = sorted(self.running + self.loading, key=_key) if self.loading else self.running
        candidates = self._share.may_give_way(live, chosen)
        if len(candidates) > 1:
            self._preempt(candidates[-1])
            return True
        sample = candidates[0]
        if self._chunk_limit > 1:
            wanted = min(self._chunk_limit, sample.num_tokens - sample.num_computed)
            self._chunk_limit = max(1, wanted // 2)
            return True
        needed = self._cache.num_blocks_needed([sample.sequence], [1])
        error = CapacityError(
            f"expected room for one more token, got none: {needed} {self._cache.unit}s needed, "
            f"{self._cache.num_free_blocks} of {self._cache.num_blocks} free, and no other request runs - in "
            f"request {sample.request.request_id!r} at token {sample.num_computed}"
        )
        for ended in (sample, *sample.unborn_siblings()):
            self._failed.append(ended)
            self.finish(ended, "error", error)
        return True

    def preempt_to(self, num_blocks: int) -> None:
        """Preempts running samples, the last first, until at most `num_blocks` units are in use."""
        while (
            self.running or self.loading
        ) and self._cache.num_blocks - self._cache.num_free_blocks > num_blocks:
            self._preempt_last()

    def _preempt_last(self) -> None:
        """Preempts the last of those that run or load."""
        self._preempt(max(self.running[-1:] + self.loading[-1:], key=_key))

    def _preempt(self, sample: Sample) -> None:
        if sample.state is SampleState.LOADING:
            self._stop_loading(sample)
            # What has arrived is findable; it is not asked for a second time.
            self._wait(sample, search=False)
            return
        sample.request.num_preemptions += 1
        self.num_preemptions += 1
        self._parking.park(sample)
        self._unadmit(sample)

    def _start(self, admitted: list[Sample]) -> None:
        """Notes when a request began and what it found; what it finds after a preemption is its own work."""
        for sample in admitted:
            self._parking.drop(sample)
            sample.search = None
            request = sample.request
            if request.started_s is None:
                request.started_s = self.clock()
                request.num_cached_tokens = sample.num_computed

    def _unadmit(self, sample: Sample) -> None:
        """From RUNNING back to WAITING; what it committed stays findable."""
        self.running.remove(sample)
        self._close(sample)
        self._wait(sample)

    def _wait(self, sample: Sample, *, search: bool = True) -> None:
        sample.state = SampleState.WAITING
        sample.num_computed = 0
        sample.waits_for = None
        insort(self.waiting, sample, key=_key)
        if self._loading is not None and search and sample.parked is None and sample.search is None:
            self._loading.search(sample)

    def _open(self, sample: Sample, tokens: np.ndarray) -> Any:
        request = sample.request
        return self._cache.open(
            tokens,
            namespace=request.namespace,
            extra_keys=request.extra_keys,
            max_num_tokens=len(request.prompt_token_ids) + request.max_tokens,
            account=request.account,
            retention=request.retention,
        )

    def _stop_loading(self, sample: Sample) -> None:
        assert self._loading is not None
        self._loading.end(sample)
        self._close(sample)

    def _close(self, sample: Sample) -> None:
        sequence, sample.sequence = sample.sequence, None
        self._cache.close(sequence)
        self._closed.append(sequence.id)

    def _fork(self, sample: Sample) -> None:
        """A sample of a request whose prompt its first sample has just computed."""
        parent = sample.request.samples[0]
        may_run = parent.state is SampleState.RUNNING and len(self.running) < self.max_num_seqs
        if not may_run or not self._cache.can_fork:
            self._wait(sample)  # opened later, over the same prompt's blocks where they are shared
            return
        self._run_beside(parent, sample)

    def _run_beside(self, parent: Sample, sample: Sample) -> None:
        """To RUNNING, over the parent's blocks."""
        sample.sequence = self._cache.fork(parent.sequence)
        sample.num_computed = parent.num_computed
        sample.state = SampleState.RUNNING
        insort(self.running, sample, key=_key)


def _key(sample: Sample) -> tuple[int, int, int]:
    return sample.key
