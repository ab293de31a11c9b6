"""Which tokens of which sequences run in the next step. Pure bookkeeping: no tensors, no text, no model.

Continuous batching with chunked prefill under a token budget: running sequences that decode come first, then
running ones that still compute their prompt, then waiting ones, each in order of (priority, arrival); waiting ones of
several clients in the order of `clients`. A waiting sequence does not overtake one that was refused for want of memory,
unless that one's own owner alone is short of it.

Out of memory (the cache evicts what is merely cached by itself): the last sequence in that order of those that run or
load is preempted: its bytes are swapped out or not (`preemption`), its sequence is closed, so that its content stays
findable, and it waits to be opened again with prompt and output. So it is for a client that waits, where another one
has more than its share.

A waiting sequence whose next tokens are being computed by a running one waits for that one's commit. One whose prefix
lies in a tier is LOADING meanwhile (`loading`): its blocks are reserved, others overtake it.

A paused request (`pause`) takes no part in a step until `resume`: its reader has not taken what there is. Its sequences
keep their blocks and places while nobody else wants any, and are the first to be preempted. So whoever is read goes on,
whatever is not.

Invariants
    R1  a sequence has an open sequence exactly while it is RUNNING or LOADING.
    R2  `running`, `loading`, `waiting` and `held` are sorted by `RequestSequence.key`; nobody is in two of them.
        Who waits is in `held` exactly while its request is paused.
    R3  progress: the first of those that run or load and are not paused is never preempted, and alone it always fits
        (`RequestValidator`); a load ends by itself.

Not here: the clock is an argument, chance has no place. Not thread-safe: one owner.
Cost: `schedule` O(running + sequences looked at + new tokens), `update` O(scheduled).
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from quire.cache.prefix_key import NOBODYS, ResolvedKey
from quire.cache.protocol import CacheSequence, KVCache
from quire.cache.results import Dropped
from quire.durations import Durations
from quire.errors import CapacityError
from quire.offload.swap import Swap
from quire.offload.tier_load import TierLoads
from quire.scheduler.admission import MAX_LOOKED_AT, Admission
from quire.scheduler.batches import make_batch, next_decodes
from quire.scheduler.client_fairness import ClientFairness
from quire.scheduler.loading_queue import LoadingQueue
from quire.scheduler.oom_backoff import OomBackoff
from quire.scheduler.phase import Phase, phase_of
from quire.scheduler.request import Request, RequestSequence, SequenceStatus
from quire.scheduler.tenant_quotas import MemoryLimits
from quire.step import Batch, Int64Array

__all__ = ["Scheduler"]

# Seconds between two tokens of a sequence, as `Durations` counts them.
_TOKEN_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


class Scheduler:
    """Decides the steps of one engine over one cache.

    cache: a `quire.Cache` (its own watermark 0: the scheduler keeps one). max_batch_tokens: tokens of a step.
    max_num_seqs: sequences that run at once. watermark: share of the blocks an admission must leave while others
    run, so that they do not have to preempt it at once. clock: seconds. swapping: what becomes of preempted sequences;
    without it they are computed again. loads: of prefixes in the tiers, where there are any. on_reserved: called
    whenever blocks have been handed out that nothing was written to yet.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        max_batch_tokens: int = 2048,
        max_num_seqs: int = 256,
        watermark: float = 0.01,
        clock: Callable[[], float] = time.monotonic,
        swap: Swap | None = None,
        loads: TierLoads | None = None,
        on_reserved: Callable[[], None] | None = None,
        share: MemoryLimits | None = None,
    ) -> None:
        self._cache = cache
        self._share = share or MemoryLimits(cache)
        self._swap = swap or Swap(cache)
        self._loading = None if loads is None else LoadingQueue(cache, loads, self._share, on_reserved)
        self._on_reserved = on_reserved
        self._admission = Admission(
            cache, self._share, self._swap, watermark=watermark, open_sequence=self._open
        )
        self.max_batch_tokens = max_batch_tokens
        self.max_num_seqs = max_num_seqs
        self.clock = clock
        self.requests: dict[str, Request] = {}
        self.waiting: list[RequestSequence] = []
        self.held: list[RequestSequence] = []  # those that wait, of requests that are paused
        self.running: list[RequestSequence] = []
        self._paused: set[str] = set()
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_computed_tokens = 0
        self.token_gaps = Durations(
            _TOKEN_GAPS
        )  # between two tokens of a sequence, without pauses of its reader
        self.failed: list[RequestSequence] = []  # for `take_failed`
        self._closed: list[int] = []  # cache sequences closed since the last step
        self._chunk_limit = max_batch_tokens  # lowered while one sequence alone has too little memory
        self._refusals = OomBackoff()
        # The last batch, of decodes that all run on, and the tokens that they drew: see `_steady_decodes`.
        self._decodes: Batch[RequestSequence] | None = None
        self._drawn: Int64Array = np.empty(0, np.int64)
        self._pairs_of: list[RequestSequence] = []  # of which list of decodes `_pairs` are the pairs
        self._pairs: list[tuple[RequestSequence, int]] = []
        self._clients = ClientFairness()

    # -- requests in and out ---------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a request that `RequestValidator.request` made: one that fits alone."""
        self.requests[request.request_id] = request
        self._clients.add(request)
        self._wait(request.sequences[0])

    def branch(self, parent: RequestSequence, sequence: RequestSequence) -> bool:
        """Has a waiting sequence of the parent's very tokens go on over the parent's blocks; whether that can be now.

        Not while the parent computes its prompt, has no blocks, or nobody more may run: the sequence waits then like
        any other, and finds what the parent has committed.
        """
        is_decoding = parent.state is SequenceStatus.RUNNING and parent.num_computed + 1 == parent.num_tokens
        may_run = is_decoding and len(self.running) < self.max_num_seqs
        if not may_run or not self._cache.has_room_to_fork(parent.cache_sequence):
            return False
        self.waiting.remove(sequence)
        self._run_beside(parent, sequence)
        self._start([(sequence, 0)])
        return True

    def abort(self, request_id: str) -> Request | None:
        """Ends a request wherever it is; its blocks are returned. None if it is not here (any more)."""
        request = self.requests.get(request_id)
        if request is not None:
            for sequence in request.sequences:
                self.finish(sequence, "abort")
        return request

    def pause(self, request_id: str) -> None:
        """Has a request take no part in steps until `resume`. Unknown ids are ignored."""
        request = self.requests.get(request_id)
        if request is not None and not request.is_paused:
            self._paused.add(request_id)
            self._set_paused(request, True)

    def resume(self, request_id: str) -> None:
        """Undoes `pause`: a request that has lost its place meanwhile waits for one. Unknown ids are ignored."""
        request = self.requests.get(request_id)
        if request is not None and request.is_paused:
            self._paused.discard(request_id)
            self._set_paused(request, False)

    def _set_paused(self, request: Request, is_paused: bool) -> None:
        waiting = [sequence for sequence in request.sequences if sequence.state is SequenceStatus.WAITING]
        for sequence in waiting:
            self._line(sequence).remove(sequence)
        request.is_paused = is_paused
        for sequence in request.sequences:
            sequence.token_s = None
        for sequence in waiting:
            self._wait(sequence)

    def finish(self, sequence: RequestSequence, reason: str, error: BaseException | None = None) -> None:
        """Ends one sequence and returns its blocks. Nothing happens if it has ended already."""
        state = sequence.state
        if state is SequenceStatus.FINISHED:
            return
        sequence.state = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        sequence.error = error or sequence.error
        if state is SequenceStatus.WAITING:
            self._line(sequence).remove(sequence)
        elif state is SequenceStatus.RUNNING:
            self.running.remove(sequence)
            self._close(sequence)
            self._refusals.ended()
        elif state is SequenceStatus.LOADING:
            self._stop_loading(sequence)
        sequence.search = None
        self._swap.drop(sequence)
        request = sequence.request
        if request.finished:
            request.finished_s = self.clock()
            self._paused.discard(request.request_id)
            if self.requests.pop(request.request_id, None) is not None:
                self._clients.remove(request)

    def drop(self, tokens: np.ndarray, key: ResolvedKey = NOBODYS) -> Dropped:
        """`Cache.drop`. Sequences that were preempted before go on as those that run: nobody finds such content of
        them.

        *raises:* ArgumentError: some of it is pinned; nothing has changed.
        """
        dropped = self._cache.drop(tokens, **key.content)
        for sequence in (*self.waiting, *self.held):
            request = sequence.request
            if request.started_s is None or request.key.namespace != key.namespace:
                continue
            known = sequence.token_ids()
            if len(known) >= len(tokens) and np.array_equal(known[: len(tokens)], tokens):
                own, theirs = request.key.extra_keys or {}, key.extra_keys or {}
                sequence.is_withdrawn |= all(
                    own.get(at) == theirs.get(at) for at in {*own, *theirs} if at < len(tokens)
                )
        return dropped

    def take_failed(self) -> list[RequestSequence]:
        """Sequences that `schedule` itself has ended, there being no room for them even alone."""
        failed, self.failed = self.failed, []
        return failed

    @property
    def loading(self) -> list[RequestSequence]:
        """The sequences whose prefix comes from a tier just now."""
        return [] if self._loading is None else self._loading.sequences

    def phase_of(self, sequence: RequestSequence) -> Phase:
        """What a sequence that is here does, or waits for."""
        return phase_of(
            sequence,
            short_owners=self._admission.short_owners,
            is_refused=self._admission.refused is not None,
            is_full=len(self.running) >= self.max_num_seqs,
        )

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    @property
    def waits_for_tiers(self) -> bool:
        """Whether a load or a search is under way that a step could follow from."""
        return bool(self.loading) or any(
            not sequence.is_searched for sequence in self.waiting[:MAX_LOOKED_AT]
        )

    # -- a step ----------------------------------------------------------------------------------------

    def schedule(self) -> Batch[RequestSequence] | None:
        """The next step, its memory reserved; None if there is nothing to run."""
        self._chunk_limit = self.max_batch_tokens
        if self._loading is not None:
            for sequence in self._loading.land(self.max_num_seqs - len(self.running)):
                sequence.state = SequenceStatus.RUNNING
                insort(self.running, sequence, key=_key)
                self._start([(sequence, 0)])
            if self._loading.may_start(self.waiting):
                running = [(sequence, 1) for sequence in self.running]
                promised = self._admission.margin + self._admission.blocks_to_come(running)
                promised_to = self._admission.taken_by_owner(running)
                self._loading.start(
                    self.waiting, self.running, promised, promised_to, self.max_num_seqs, self._open
                )
        may_admit = True
        while self.running or self.waiting:
            steady = self._steady_decodes()
            chosen, budget = self._continue_running(steady)
            admitted: list[tuple[RequestSequence, int]] = []
            if may_admit and self.waiting:
                admitted = self._admit(chosen, budget)
            elif may_admit:
                self._admission.refused, self._admission.short_owners = None, set()
            if may_admit and self._paused and (paused := self._in_the_way(chosen, admitted)):
                self._start(admitted)
                for sequence in paused:
                    self._preempt(sequence)
                continue
            if may_admit and self._admission.refused is not None:
                last = self._beyond_share(self._admission.refused, admitted)
                if last is not None:
                    self._start(admitted)
                    self._preempt(last)
                    continue
            if admitted:
                chosen += admitted
                steady = None
            while chosen:
                if steady is not None:
                    ids, num_new = steady.sequence_ids, steady.num_new_tokens
                else:
                    ids = np.array([sequence.cache_sequence.id for sequence, _ in chosen], np.int64)
                    num_new = np.array([n for _, n in chosen], np.int64)
                plan = self._cache.reserve_unchecked(ids, num_new)
                if plan is not None:
                    if self._on_reserved is not None:
                        self._on_reserved()
                    if admitted:
                        self._start(admitted)
                    self.num_steps += 1
                    self.num_computed_tokens += int(num_new.sum())
                    closed, self._closed = np.array(self._closed, np.int64), []
                    if steady is not None:
                        return next_decodes(steady, self._drawn, plan, closed)
                    return make_batch(chosen, ids, num_new, plan, closed)
                if not admitted or len(chosen) == 1:
                    break
                self._unadmit(admitted.pop()[0])
                chosen.pop()
            # Who joined and is left runs from now on, though this attempt came to nothing.
            self._start(admitted)
            if not self._make_room(chosen):
                return None
            may_admit = not self.running
        return None

    def update(self, step: Batch[RequestSequence], tokens: Sequence[int] | np.ndarray) -> None:
        """Takes in a step that has been computed, with the token each of `step.sampled` drew.

        Commits what was computed, forks the sequences of new requests, appends the tokens and ends what is at
        its end. A sequence with `error` set ends with it.
        """
        cache, now = self._cache, self.clock()
        if self._refusals.steps_to_wait or self._refusals.alone is not None:
            self._refusals.computed()
        self._decodes = None
        drawn = np.asarray(tokens, np.int64)
        # Nothing but decodes, as it mostly is: one call for all of them. What ended since the step began was closed.
        together = step.is_decode and (
            not self._closed or all(s.state is SequenceStatus.RUNNING for s in step.sequences)
        )
        if together:
            cache.advance_unchecked(step.sequence_ids, step.positions + 1, drawn.astype(np.int32))
        else:
            for sequence, n in zip(step.sequences, step.num_new_tokens.tolist(), strict=True):
                if sequence.state is SequenceStatus.RUNNING:
                    sequence.num_computed += n
                    cache.commit(sequence.cache_sequence, sequence.num_computed)
            for sequence in step.sampled:
                if sequence.state is SequenceStatus.UNBORN:
                    self._fork(sequence)
        num_ended = 0
        since, count = None, 0  # when the token before came, and of how many in a row: mostly all at once
        for sequence, token in zip(step.sampled, drawn.tolist(), strict=True):
            if together:
                sequence.num_computed += 1
            elif sequence.state is SequenceStatus.FINISHED:
                continue
            if sequence.error is not None:
                num_ended += 1
                self.finish(sequence, "error")
                continue
            if sequence.token_s != since:
                if count and since is not None:
                    self.token_gaps.add(now - since, count)
                since, count = sequence.token_s, 0
            count += 1
            request, output_ids = sequence.request, sequence.output_ids
            sequence.token_s = now
            output_ids.append(token)
            sequence.last_token = token
            sequence.num_tokens += 1
            if request.first_token_s is None:
                request.first_token_s = now
            if token in request.stop_ids:
                num_ended += 1
                sequence.stop_reason = None if token in request.end_ids else token
                self.finish(sequence, "stop")
            elif len(output_ids) >= request.max_tokens:
                num_ended += 1
                self.finish(sequence, "length")
            elif not together and sequence.cache_sequence is not None:
                sequence.cache_sequence.append([token])
        if count and since is not None:
            self.token_gaps.add(now - since, count)
        if together and not num_ended:
            self._decodes, self._drawn = step, drawn

    def refuse(self, step: Batch[RequestSequence], error: BaseException | None) -> list[RequestSequence]:
        """Takes back a step that the storage had no memory for, as if there had been too few blocks; who ends with it.

        Who was to be copied waits again, or else the last that runs; one that is alone is tried once more, then ends.
        """
        self.num_steps -= 1
        self.num_computed_tokens -= int(step.num_new_tokens.sum())
        alone = self.running[0] if len(self.running) == 1 else None
        ended: list[RequestSequence] = []
        if alone is not None and alone is self._refusals.alone:
            ended = [alone, *alone.unborn_siblings()]
            for sequence in ended:
                self.finish(sequence, "error", error)
            alone = None
        copying = [sequence for sequence in step.copying if sequence.state is SequenceStatus.RUNNING]
        for sequence in copying:
            self._unadmit(sequence)
        if not copying and len(self.running) > 1:
            self._preempt_last()
        self._refusals.refused(alone)
        return ended

    # -- choosing --------------------------------------------------------------------------------------

    def _steady_decodes(self) -> Batch[RequestSequence] | None:
        """The batch before, where all that it computed run on and nothing else does: what it has of them still holds.

        It is forgotten when one of them ends or is closed (`_close`), so all that is to be seen is that none joined.
        """
        decodes, clients = self._decodes, self._clients
        clients.step = self.num_steps
        if decodes is None or self._paused or clients.are_several or clients.step < clients.shared_until:
            return None
        if decodes.sequences != self.running or len(self.running) > self.max_batch_tokens:
            return None
        return decodes

    def _continue_running(
        self, steady: Batch[RequestSequence] | None
    ) -> tuple[list[tuple[RequestSequence, int]], int]:
        """What the running sequences compute, decodes first, and the token budget that is left."""
        budget = self.max_batch_tokens
        if steady is not None:
            if self._pairs_of is not steady.sequences:
                self._pairs_of, self._pairs = (
                    steady.sequences,
                    [(sequence, 1) for sequence in steady.sequences],
                )
            return list(self._pairs), budget - len(self._pairs)
        chosen: list[tuple[RequestSequence, int]] = []
        prefills: list[RequestSequence] = []
        decodes: list[RequestSequence] = []
        for sequence in self.running:
            if sequence.request.is_paused:
                continue
            (prefills if sequence.num_tokens - sequence.num_computed > 1 else decodes).append(sequence)
        clients = self._clients
        if clients.are_several or clients.step < clients.shared_until:
            decodes = clients.of_step(decodes)
        for sequence in decodes[:budget]:
            chosen.append((sequence, 1))
            budget -= 1
        for sequence in prefills:
            n = min(sequence.num_tokens - sequence.num_computed, budget, self._chunk_limit)
            if n == 0:
                break
            chosen.append((sequence, n))
            budget -= n
        return chosen, budget

    def _admit(
        self, chosen: list[tuple[RequestSequence, int]], budget: int
    ) -> list[tuple[RequestSequence, int]]:
        """Waiting sequences that join the step, opened and moved to `running`."""
        room = self.max_num_seqs - len(self.running)
        if self._refusals.steps_to_wait:
            room = 0 if self.running else 1
        return self._admission.admit(
            self.waiting,
            self._clients.in_order(self.waiting[:MAX_LOOKED_AT], self.running + self.loading),
            self.running,
            chosen,
            is_first=not (self.running or self.loading),
            room=room,
            budget=budget,
            chunk_limit=self._chunk_limit,
        )

    def _in_the_way(
        self, chosen: list[tuple[RequestSequence, int]], admitted: list[tuple[RequestSequence, int]]
    ) -> list[RequestSequence]:
        """The paused ones that run, where somebody still waits whom they may keep from a place, a load or memory."""
        if not (self.waiting or self.loading):
            return []
        if sum(n for _, n in chosen + admitted) >= self.max_batch_tokens:
            return []  # there is no room in this step whatever they hold
        return self._paused_running()

    def _paused_running(self) -> list[RequestSequence]:
        """Those with blocks and a place whose requests are paused."""
        if not self._paused:
            return []
        return [sequence for sequence in self.running if sequence.request.is_paused]

    def _beyond_share(
        self, wanted: RequestSequence, admitted: list[tuple[RequestSequence, int]]
    ) -> RequestSequence | None:
        """The sequence that gives way to the first that waits for room now, if its client has a claim to some, and
        enough would come of it."""
        if not self._clients.are_several or self._refusals.steps_to_wait:
            return None
        new = {id(sequence) for sequence, _ in admitted}
        live = [sequence for sequence in self._live() if id(sequence) not in new]
        beyond = self._clients.beyond_share(wanted, live)
        cache = self._cache
        room = cache.num_free_blocks - self._admission.margin
        for sequence in beyond:
            room += cache.num_blocks_for(max(1, sequence.num_computed))
        return beyond[-1] if beyond and cache.num_blocks_for(wanted.num_tokens) <= room else None

    def _live(self) -> list[RequestSequence]:
        """Those that run or load, sorted."""
        return sorted(self.running + self.loading, key=_key) if self.loading else self.running

    # -- moving sequences --------------------------------------------------------------------------------

    def _make_room(self, chosen: list[tuple[RequestSequence, int]]) -> bool:
        """The running sequences do not fit: preempts one of them, or lets the only one ask for less."""
        if not chosen:  # nobody runs but who is paused
            return False
        if paused := self._paused_running():
            self._preempt(paused[-1])
            return True
        live = self._live()
        candidates = self._clients.may_give_way(self._share.may_give_way(live, chosen), live)
        if len(candidates) > 1:
            self._preempt(candidates[-1])
            return True
        sequence = candidates[0]
        if self._chunk_limit > 1:
            wanted = min(self._chunk_limit, sequence.num_tokens - sequence.num_computed)
            self._chunk_limit = max(1, wanted // 2)
            return True
        needed = self._cache.num_blocks_needed([sequence.cache_sequence], [1])
        error = CapacityError(
            f"expected room for one more token, got none: {needed} {self._cache.block_name}s needed, "
            f"{self._cache.num_free_blocks} of {self._cache.num_possible_blocks} free, and no other request runs - in "
            f"request {sequence.request.request_id!r} at token {sequence.num_computed}"
        )
        for ended in (sequence, *sequence.unborn_siblings()):
            self.failed.append(ended)
            self.finish(ended, "error", error)
        return True

    def preempt_to(self, num_blocks: int) -> None:
        """Preempts running sequences, the last first, until at most `num_blocks` blocks are in use. They are computed
        again later; one that cannot fit any more ends with a CapacityError when its turn comes."""
        self.preempt_until(lambda: self._num_used_blocks() <= num_blocks)

    def preempt_until(self, fits: Callable[[], bool]) -> None:
        """Preempts running sequences, the last first, until it fits."""
        while (self.running or self.loading) and not fits():
            self._preempt_last()

    def _num_used_blocks(self) -> int:
        stats = self._cache.stats()
        return stats["held"] + stats["pinned"] + stats["in_flight"]

    def _preempt_last(self) -> None:
        """Preempts the last of those that run or load."""
        self._preempt(max(self.running[-1:] + self.loading[-1:], key=_key))

    def _preempt(self, sequence: RequestSequence) -> None:
        if sequence.state is SequenceStatus.LOADING:
            sequence.is_withdrawn = self._is_withdrawn(sequence)
            self._stop_loading(sequence)
            # What has arrived is findable; it is not asked for a second time.
            self._wait(sequence, search=False)
            return
        sequence.request.num_preemptions += 1
        self.num_preemptions += 1
        self._swap.swap_out(sequence)
        self._unadmit(sequence)

    def _start(self, admitted: Iterable[tuple[RequestSequence, int]]) -> None:
        """Notes when a request began and what it found; what it finds after a preemption is its own work."""
        for sequence, _ in admitted:
            self._swap.drop(sequence)
            sequence.search = None
            request = sequence.request
            self._clients.joined(request)
            if request.started_s is None:
                request.started_s = self.clock()
                request.num_cached_tokens = sequence.num_computed

    def _unadmit(self, sequence: RequestSequence) -> None:
        """From RUNNING back to WAITING; what it committed stays findable."""
        self.running.remove(sequence)
        sequence.is_withdrawn = self._is_withdrawn(sequence)
        self._close(sequence)
        self._wait(sequence)

    def _is_withdrawn(self, sequence: RequestSequence) -> bool:
        """Whether content that a sequence with an open sequence has computed was dropped."""
        return self._cache.prefix_caching and not sequence.cache_sequence.is_findable

    def _wait(self, sequence: RequestSequence, *, search: bool = True) -> None:
        sequence.state = SequenceStatus.WAITING
        sequence.num_computed = 0
        sequence.waits_for = None
        insort(self._line(sequence), sequence, key=_key)
        if sequence.request.is_paused:
            return  # what the tiers have is asked once it is to go on
        if self._loading is not None and search and sequence.swapped is None and sequence.search is None:
            self._loading.search(sequence)

    def _line(self, sequence: RequestSequence) -> list[RequestSequence]:
        """Where it waits, if it does."""
        return self.held if sequence.request.is_paused else self.waiting

    def _open(self, sequence: RequestSequence, tokens: np.ndarray) -> CacheSequence:
        request = sequence.request
        cache_sequence = self._cache.open(
            tokens,
            **request.key.content,
            max_num_tokens=len(request.prompt_token_ids) + request.max_tokens,
            owner_id=request.owner_id,
            cache_priority=request.cache_priority,
        )
        if sequence.is_withdrawn:
            self._cache.withdraw(cache_sequence)
        return cache_sequence

    def _stop_loading(self, sequence: RequestSequence) -> None:
        assert self._loading is not None
        self._loading.end(sequence)
        self._close(sequence)

    def _close(self, sequence: RequestSequence) -> None:
        cache_sequence = sequence.cache_sequence
        sequence.cache_sequence = None  # type: ignore[assignment]
        self._decodes = None
        self._cache.close(cache_sequence)
        self._closed.append(cache_sequence.id)

    def _fork(self, sequence: RequestSequence) -> None:
        """A sequence of a request whose prompt its first sequence has just computed."""
        parent = sequence.request.sequences[0]
        may_run = parent.state is SequenceStatus.RUNNING and len(self.running) < self.max_num_seqs
        if not may_run or not self._cache.has_room_to_fork(parent.cache_sequence):
            if parent.cache_sequence is not None:
                sequence.is_withdrawn = self._is_withdrawn(parent)
            self._wait(sequence)  # opened later, over the same prompt's blocks where they are shared
            return
        self._run_beside(parent, sequence)

    def _run_beside(self, parent: RequestSequence, sequence: RequestSequence) -> None:
        """To RUNNING, over the parent's blocks."""
        sequence.cache_sequence = self._cache.fork(parent.cache_sequence)
        sequence.num_computed = parent.num_computed
        sequence.state = SequenceStatus.RUNNING
        insort(self.running, sequence, key=_key)


def _key(sequence: RequestSequence) -> tuple[int, int, int]:
    return sequence.key
