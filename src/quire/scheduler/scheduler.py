"""`Scheduler`: chooses the sequences and tokens of each step. Bookkeeping only: no tensors, no text, no model.

Continuous batching with chunked prefill under a token budget: running sequences that decode come first, then running
sequences that still compute their prompt, then waiting ones, each in order of (priority, arrival); `client_fairness`
orders the prompts of several clients. `prompt_chunks` limits the chunks of long prompts. A running prompt leaves the
step to a waiting sequence of better priority, or of a client that is further below its share. A waiting sequence does
not overtake one that was refused for lack of memory, unless only the refused sequence's owner is short of it.

If blocks run out (the cache evicts cached content first), the last running or loading sequence in that order is
preempted: it is swapped out or not (`quire.offload.swap`), its cache sequence is closed, so that its content stays
findable, and it waits to be opened again with prompt and output. A sequence is also preempted for a waiting client if
its own client has more than its share (`client_fairness`), and a prompt for a waiting sequence of better priority.

If a running sequence computes the next tokens of a waiting one, the waiting one waits for that commit. A sequence whose
prefix lies in a tier is LOADING until it is read (`loading_queue`): its blocks are reserved, others overtake it.

A paused request (`pause`) takes part in no step until `resume`: its reader has not taken its last outputs. Its
sequences keep their blocks and places until other sequences need them, and are preempted first.

Invariants
    R1  a sequence has an open cache sequence exactly while it is RUNNING or LOADING.
    R2  `running`, `loading`, `waiting`, `paused_waiting` are sorted by `RequestSequence.key`; no sequence is in two.
        A WAITING sequence is in `paused_waiting` exactly while its request is paused.
    R3  progress: the first running or loading sequence that is not paused is preempted for one of better priority
        alone, and alone it always fits (`RequestValidator`); a load ends by itself.

The clock is an argument; no decision is random. Not thread-safe: one owner.
Cost: `schedule` O(running + examined sequences + new tokens), `update` O(scheduled).
"""

from __future__ import annotations

import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from quire.cache.prefix_key import NOBODYS, ResolvedKey
from quire.cache.protocol import CacheSequence, KVCache
from quire.cache.results import Dropped
from quire.durations import Durations
from quire.errors import CapacityError
from quire.offload.kept_scores import KeptScores
from quire.offload.swap import Swap
from quire.offload.tier_load import TierLoads
from quire.scheduler.admission import MAX_EXAMINED, Admission
from quire.scheduler.batches import make_batch, next_decodes
from quire.scheduler.client_fairness import ClientFairness
from quire.scheduler.loading_queue import LoadingQueue
from quire.scheduler.oom_backoff import OomBackoff
from quire.scheduler.phase import Phase, phase_of
from quire.scheduler.prompt_chunks import PromptChunks, num_left
from quire.scheduler.request import Request, RequestSequence, SequenceStatus
from quire.scheduler.speculation import Speculation
from quire.scheduler.tenant_quotas import MemoryLimits
from quire.step import Batch, Int64Array, StepPlan

__all__ = ["Scheduler"]

# Bounds in seconds for the histogram of the time between two tokens of a sequence.
_TOKEN_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


class Scheduler:
    """Schedules the steps of one engine over one cache.

    cache: a `quire.Cache` with watermark 0: the scheduler applies its own. max_batch_tokens: tokens of a step.
    long_prefill_tokens: tokens of long prompts in a step with sequences of other calls, see `PromptChunks`.
    max_num_seqs: sequences that run at once. watermark: share of the blocks that an admission must leave while others
    run, so that they need not preempt it at once. clock: seconds. swap: swaps preempted sequences out; without it they
    are computed again. loads: loads prefixes from tiers; None without tiers. on_reserved: called after blocks are
    reserved and before they are written. launches_ahead: the runner may launch the step after a batch of plain greedy
    decodes; such a batch is given a lookahead slot for each sequence, if blocks suffice. kept_scores: keeps the scores
    of prompts and outputs beside their keys; None without. speculation: chooses drafts of decodes; None without.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        max_batch_tokens: int = 2048,
        long_prefill_tokens: int = 0,
        max_num_seqs: int = 256,
        watermark: float = 0.01,
        clock: Callable[[], float] = time.monotonic,
        swap: Swap | None = None,
        loads: TierLoads | None = None,
        on_reserved: Callable[[], None] | None = None,
        memory_limits: MemoryLimits | None = None,
        launches_ahead: bool = False,
        kept_scores: KeptScores | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self._cache = cache
        self._memory_limits = memory_limits or MemoryLimits(cache)
        self._swap = swap or Swap(cache)
        self._loading = (
            None if loads is None else LoadingQueue(cache, loads, self._memory_limits, on_reserved)
        )
        self._on_reserved = on_reserved
        self._launches_ahead = launches_ahead
        self._kept_scores = kept_scores
        self.speculation = speculation
        self._admission = Admission(
            cache, self._memory_limits, self._swap, watermark=watermark, open_sequence=self._open
        )
        self.max_batch_tokens = max_batch_tokens
        self._long_prefill_tokens = long_prefill_tokens
        self._calls: Counter[int] = Counter()  # requests of each call that has some
        self.max_num_seqs = max_num_seqs
        self.clock = clock
        self.requests: dict[str, Request] = {}
        self.waiting: list[RequestSequence] = []
        self.paused_waiting: list[RequestSequence] = []  # waiting sequences of paused requests
        self.running: list[RequestSequence] = []
        self._paused: set[str] = set()
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_computed_tokens = 0
        self.num_withheld_tokens = 0  # of long prompts, for which steps had room
        self.token_gaps = Durations(_TOKEN_GAPS)  # between two tokens of a sequence, without pauses
        self.failed: list[RequestSequence] = []  # for `pop_failed`
        self._closed: list[int] = []  # cache sequences closed since the last step
        self._chunk_limit = max_batch_tokens  # lowered while a sequence that runs alone has too little memory
        self._oom_backoff = OomBackoff()
        # The last batch and its drawn tokens, if it had only decodes and all continue: see `_steady_decodes`.
        self._decodes: Batch[RequestSequence] | None = None
        self._drawn: Int64Array = np.empty(0, np.int64)
        self._paired_sequences: list[RequestSequence] = []  # the sequences of `_pairs`, each with 1 token
        self._pairs: list[tuple[RequestSequence, int]] = []
        self._are_plain = (
            False  # the sequences of the last reserved step: all decodes of plain greedy requests
        )
        self._clients = ClientFairness()
        self._num_only_loads = 0  # requests that only load
        self.on_session_start: Callable[[Request], None] = lambda request: None
        """Called when a request of a session first runs."""
        self.on_session_end: Callable[[Request], None] = lambda request: None
        """Called when a request of a session has ended, whether it ran or not."""

    # -- requests in and out ---------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a request made by `RequestValidator.request`: it fits if it runs alone."""
        self.requests[request.request_id] = request
        self._calls[request.call] += 1
        self._num_only_loads += request.options.only_loads
        self._clients.add(request)
        self._wait(request.sequences[0])

    def branch(self, parent: RequestSequence, sequence: RequestSequence) -> bool:
        """Lets a waiting sequence with the parent's tokens run over the parent's blocks; False if it has to wait.

        It has to wait while the parent computes its prompt or has no blocks, or while the largest number of sequences
        runs; at its admission it finds the content that the parent has committed.
        """
        is_decoding = parent.state is SequenceStatus.RUNNING and parent.num_computed + 1 == parent.num_tokens
        may_run = self._cache.can_fork and is_decoding and len(self.running) < self.max_num_seqs
        if not may_run or not self._cache.has_room_to_fork(parent.cache_sequence):
            return False
        self.waiting.remove(sequence)
        self._run_fork(parent, sequence)
        self._record_start([(sequence, 0)])
        return True

    def abort(self, request_id: str) -> Request | None:
        """Ends a request in any state and returns its blocks. None if the id is unknown or has ended."""
        request = self.requests.get(request_id)
        if request is not None:
            for sequence in request.sequences:
                self.finish(sequence, "abort")
            if request.beams is not None:
                request.beams.show_unfinished()
        return request

    def pause(self, request_id: str) -> None:
        """Excludes a request from steps until `resume`. Unknown ids are ignored."""
        request = self.requests.get(request_id)
        if request is not None and not request.is_paused:
            self._paused.add(request_id)
            self._set_paused(request, True)

    def resume(self, request_id: str) -> None:
        """Undoes `pause`; a request that was preempted meanwhile waits for a place. Unknown ids are ignored."""
        request = self.requests.get(request_id)
        if request is not None and request.is_paused:
            self._paused.discard(request_id)
            self._set_paused(request, False)

    def _set_paused(self, request: Request, is_paused: bool) -> None:
        waiting = [sequence for sequence in request.sequences if sequence.state is SequenceStatus.WAITING]
        for sequence in waiting:
            self._waiting_list(sequence).remove(sequence)
        request.is_paused = is_paused
        for sequence in request.sequences:
            sequence.token_s = None
        for sequence in waiting:
            self._wait(sequence)

    def finish(self, sequence: RequestSequence, reason: str, error: BaseException | None = None) -> None:
        """Ends one sequence and returns its blocks. Without effect if it has ended already."""
        state = sequence.state
        if state is SequenceStatus.FINISHED:
            return
        sequence.state = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        sequence.error = error or sequence.error
        self._leave(sequence, state)
        if state is SequenceStatus.RUNNING:
            self._oom_backoff.record_end()
        if self.speculation is not None:
            self.speculation.close(sequence)
        request = sequence.request
        if request.finished:
            request.finished_s = self.clock()
            self._paused.discard(request.request_id)
            if self.requests.pop(request.request_id, None) is not None:
                self._calls -= Counter({request.call: 1})  # without the calls that have ended
                self._num_only_loads -= request.options.only_loads
                self._clients.remove(request)
                if request.options.session is not None:
                    self.on_session_end(request)

    def _leave(self, sequence: RequestSequence, state: SequenceStatus) -> None:
        """Takes a sequence in `state` out of its list and returns its blocks."""
        if state is SequenceStatus.WAITING:
            self._waiting_list(sequence).remove(sequence)
        elif state is SequenceStatus.RUNNING:
            self.running.remove(sequence)
            self._keep_scores(sequence)
            self._close(sequence)
        elif state is SequenceStatus.LOADING:
            self._stop_loading(sequence)
        sequence.search = None
        self._swap.drop(sequence)

    def free(self, sequence: RequestSequence) -> None:
        """Ends a beam that does not go on; its request may use the sequence for another one."""
        self._leave(sequence, sequence.state)
        sequence.state = SequenceStatus.UNFORKED

    def drop(self, tokens: np.ndarray, key: ResolvedKey = NOBODYS) -> Dropped:
        """`Cache.drop`. Preempted sequences with this content continue like running ones: their content of it is no
        longer findable.

        *raises:* ArgumentError: some of it is pinned; nothing has changed.
        """
        dropped = self._cache.drop(tokens, **key.content)
        if self.speculation is not None:
            self.speculation.forget(key.namespace)
        for sequence in (*self.waiting, *self.paused_waiting):
            request = sequence.request
            if request.started_s is None or request.key.namespace != key.namespace:
                continue
            known = sequence.token_ids()
            if len(known) >= len(tokens) and np.array_equal(known[: len(tokens)], tokens):
                own_keys, dropped_keys = request.key.extra_keys or {}, key.extra_keys or {}
                sequence.is_withdrawn |= all(
                    own_keys.get(at) == dropped_keys.get(at)
                    for at in {*own_keys, *dropped_keys}
                    if at < len(tokens)
                )
        return dropped

    def pop_failed(self) -> list[RequestSequence]:
        """Removes and returns the sequences that `schedule` ended: they do not fit even alone, or only load."""
        failed, self.failed = self.failed, []
        return failed

    @property
    def loading(self) -> list[RequestSequence]:
        """The sequences whose prefix is being loaded from a tier."""
        return [] if self._loading is None else self._loading.sequences

    def phase_of(self, sequence: RequestSequence) -> Phase:
        """The phase of a sequence of this scheduler."""
        return phase_of(
            sequence,
            short_owners=self._admission.short_owners,
            is_refused=self._admission.refused is not None,
            is_full=len(self.running) >= self.max_num_seqs,
        )

    def stats_by_tenant(self) -> dict[str, dict[str, int]]:
        """Counts since the start by tenant, "" for requests without one: computed tokens, and tokens of other tenants
        that steps computed while a sequence of it could have joined."""
        self._clients.record_decodes()
        computed, passed_by = self._clients.computed_tokens, self._clients.passed_by_tokens
        return {
            tenant or "": {"computed_tokens": computed[tenant], "passed_by_tokens": passed_by[tenant]}
            for tenant in computed.keys() | passed_by.keys()
        }

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    @property
    def waits_for_tiers(self) -> bool:
        """True if a load or a search is running whose end may make a step possible."""
        return bool(self.loading) or any(not sequence.is_searched for sequence in self.waiting[:MAX_EXAMINED])

    # -- a step ----------------------------------------------------------------------------------------

    def schedule(self) -> Batch[RequestSequence] | None:
        """The next step, its memory reserved; None if there is nothing to run."""
        self._chunk_limit = self.max_batch_tokens
        if self._loading is not None:
            for sequence in self._loading.pop_loaded(self.max_num_seqs - len(self.running)):
                sequence.state = SequenceStatus.RUNNING
                insort(self.running, sequence, key=_key)
                self._record_start([(sequence, 0)])
            if self._loading.may_start(self.waiting):
                running = [(sequence, int(sequence.candidates is None)) for sequence in self.running]
                promised = self._admission.margin + self._admission.blocks_to_come(running)
                promised_to = self._admission.taken_by_owner(running)
                self._loading.start(
                    self.waiting, self.running, promised, promised_to, self.max_num_seqs, self._open
                )
        if self._num_only_loads:
            self._end_only_loads()
        may_admit = True
        while self.running or self.waiting:
            steady = self._steady_decodes()
            chosen, chunks = self._continue_running(steady, may_admit=may_admit)
            admitted: list[tuple[RequestSequence, int]] = []
            if may_admit and self.waiting:
                admitted = self._admit(chosen, chunks)
            elif may_admit:
                self._admission.refused, self._admission.short_owners = None, set()
            if may_admit and self._paused and (paused := self._paused_to_preempt(chosen, admitted)):
                self._record_start(admitted)
                for sequence in paused:
                    self._preempt(sequence)
                continue
            if may_admit and self._admission.short_owners and (beam := self._beam_over_limit()) is not None:
                self._record_start(admitted)
                self._preempt(beam)
                continue
            if may_admit and self._admission.refused is not None:
                last = self._sequence_over_share(self._admission.refused, admitted)
                if last is not None:
                    self._record_start(admitted)
                    self._preempt(last)
                    continue
            if steady is None:
                chosen, admitted = chunks.refill(chosen, admitted)
            if admitted:
                chosen += admitted
                steady = None
            drafts: Mapping[RequestSequence, list[int]] = {}
            if self.speculation is not None and chosen and not admitted:
                drafts = self.speculation.choose(chosen, self.max_batch_tokens)
                steady = None if drafts else steady
            while chosen:
                if steady is not None:
                    ids, num_new = steady.sequence_ids, steady.num_new_tokens
                else:
                    ids = np.array([sequence.cache_sequence.id for sequence, _ in chosen], np.int64)
                    num_new = np.array([n for _, n in chosen], np.int64)
                plan = None
                if drafts:
                    with_drafts = [(s, n + len(drafts.get(s, []))) for s, n in chosen]
                    counts = np.array([n for _, n in with_drafts], np.int64)
                    plan = self._reserve_drafts(ids, counts, drafts)
                    if plan is None:
                        drafts = {}
                    else:
                        chosen, num_new = with_drafts, counts
                if plan is None:
                    plan = self._reserve(chosen, ids, num_new, is_steady=steady is not None)
                if plan is not None:
                    if self._on_reserved is not None:
                        self._on_reserved()
                    if admitted:
                        self._record_start(admitted)
                    self.num_steps += 1
                    num_tokens = int(num_new.sum())
                    self.num_computed_tokens += num_tokens
                    self.num_withheld_tokens += chunks.num_withheld
                    clients = self._clients
                    if steady is not None and not clients.are_several:  # no call in a step of decodes
                        clients.unrecorded += num_tokens
                        clients.unrecorded_of = chosen[0][0].request
                    else:
                        clients.record_step(chosen, num_tokens, self._ready() if clients.are_several else ())
                    closed, self._closed = np.array(self._closed, np.int64), []
                    if steady is not None:
                        return next_decodes(steady, self._drawn, plan, closed)
                    return make_batch(chosen, ids, num_new, plan, closed, drafts)
                if not admitted or len(chosen) == 1:
                    break
                self._return_to_waiting(admitted.pop()[0])
                chosen.pop()
            # The remaining admitted sequences run from now on, although this attempt failed.
            self._record_start(admitted)
            if not self._make_room(chosen):
                return None
            may_admit = not (self.running and chosen)
        return None

    def _end_only_loads(self) -> None:
        """Ends the requests that only load, if their load has ended or did not begin."""
        for sequence in [*self.running, *self.waiting]:
            if sequence.request.options.only_loads and (
                sequence.state is SequenceStatus.RUNNING or sequence.is_searched
            ):
                self.failed.append(sequence)
                self.finish(sequence, "length")

    def _reserve(
        self,
        chosen: list[tuple[RequestSequence, int]],
        ids: Int64Array,
        num_new: Int64Array,
        *,
        is_steady: bool,
    ) -> StepPlan | None:
        """The plan of a step; None: no room. Only a lack of room for the step itself makes it so.

        A lookahead slot is one that the next step needs: no admission has to count it.
        """
        if self._launches_ahead:
            if not is_steady:
                self._are_plain = all(
                    n == 1 and sequence.request.is_plain and sequence.num_computed + 1 == sequence.num_tokens
                    for sequence, n in chosen
                )
            # A step after this one will exist unless all sequences reach their length.
            if self._are_plain and any(
                len(sequence.output_ids) + 1 < sequence.request.max_tokens for sequence, _ in chosen
            ):
                plan = self._cache.reserve_unchecked(ids, num_new, 1)
                if plan is not None:
                    return plan
        return self._cache.reserve_unchecked(ids, num_new)

    def _reserve_drafts(
        self, ids: Int64Array, num_new: Int64Array, drafts: Mapping[RequestSequence, list[int]]
    ) -> StepPlan | None:
        """The plan of a step with drafts, which their sequences know from then on; None: no room, nothing changed."""
        for sequence, tokens in drafts.items():
            self._cache.append_drafts(sequence.cache_sequence, tokens)
        plan = self._cache.reserve_unchecked(ids, num_new)
        if plan is None:
            self._forget_drafts(drafts)
        return plan

    def _forget_drafts(self, drafts: Iterable[RequestSequence]) -> None:
        """Takes the drafts out of sequences that still run."""
        for sequence in drafts:
            if sequence.state is SequenceStatus.RUNNING:
                self._cache.rewind(sequence.cache_sequence, sequence.num_tokens)

    def update(
        self,
        step: Batch[RequestSequence],
        tokens: Sequence[int] | np.ndarray,
        drawn_over_drafts: Mapping[RequestSequence, list[int]] | None = None,
    ) -> None:
        """Applies a computed step, with the token that each of `step.sampled` drew, and all tokens of those with drafts
        (`sampling.drafted`).

        Commits the computed tokens, forks the sequences of new requests, appends the drawn tokens and ends sequences at
        their stop token or length. A sequence with `error` set ends with it.
        """
        cache, now = self._cache, self.clock()
        if self._oom_backoff.steps_to_wait or self._oom_backoff.alone is not None:
            self._oom_backoff.record_computed()
        self._decodes = None
        drawn = np.asarray(tokens, np.int64)
        over_drafts = drawn_over_drafts or {}
        # One call for a batch of decodes (the usual case), unless a sequence has ended since the step began.
        together = step.is_decode and (
            not self._closed or all(s.state is SequenceStatus.RUNNING for s in step.sequences)
        )
        if together:
            cache.advance_unchecked(step.sequence_ids, step.positions + 1, drawn.astype(np.int32))
        else:
            for sequence, n in zip(step.sequences, step.num_new_tokens.tolist(), strict=True):
                if sequence.state is not SequenceStatus.RUNNING:
                    continue
                if (run := over_drafts.get(sequence)) is not None:
                    self._commit_accepted(sequence, n - 1, run)
                    continue
                sequence.num_computed += n
                cache.commit(sequence.cache_sequence, sequence.num_computed)
            for sequence in step.sampled:
                if sequence.state is SequenceStatus.UNFORKED:
                    self.fork(sequence.request.sequences[0], sequence)
            for sequence, _ in step.scored:
                if sequence.error is not None:
                    for ended in (sequence, *sequence.dependents()):
                        self.finish(ended, "error", sequence.error)
                else:
                    self._skip_scored(sequence)
            for sequence in step.completed:
                self.finish(sequence, "length")
        num_ended = 0
        searched: dict[str, Request] = {}  # with beams in this step
        # Time of the previous token, and the number of consecutive sequences that share it.
        since, count = None, 0
        for sequence, token in zip(step.sampled, drawn.tolist(), strict=True):
            if together:
                sequence.num_computed += 1
            elif sequence.state is SequenceStatus.FINISHED:
                continue
            run = over_drafts.get(sequence)
            if run is not None and sequence.error is not None:
                self._append_output(sequence, run)
            if sequence.error is not None:
                for ended in (sequence, *sequence.dependents()):
                    num_ended += 1
                    self.finish(ended, "error", sequence.error)
                continue
            if sequence.request.beams is not None:
                searched[sequence.request.request_id] = sequence.request
                continue
            if sequence.token_s != since:
                if count and since is not None:
                    self.token_gaps.add(now - since, count)
                since, count = sequence.token_s, 0
            count += 1
            if run is not None:  # its tokens come together
                self._append_output(sequence, run[:-1])
                if len(run) > 1:
                    self.token_gaps.add(0.0, len(run) - 1)
                token = run[-1]
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
        for request in searched.values():
            if request.beams is not None and not request.finished and request.beams.is_ready:
                request.first_token_s = request.first_token_s or now
                request.beams.advance(self)

    def _commit_accepted(self, sequence: RequestSequence, num_drafts: int, drawn: list[int]) -> None:
        """Commits the rows of a step that computed the sequence's own text, and takes the other drafts out.

        drawn: its tokens; their number is that of these rows, and with `error` one less.
        """
        num_rows = len(drawn) + (sequence.error is not None)
        sequence.num_computed += min(num_rows, num_drafts + 1)
        self._cache.commit(sequence.cache_sequence, sequence.num_computed)
        if num_rows <= num_drafts:
            self._cache.rewind(sequence.cache_sequence, sequence.num_computed)
        if self.speculation is not None:
            self.speculation.record(sequence, num_drafts, min(num_drafts, num_rows - 1))

    def _append_output(self, sequence: RequestSequence, tokens: list[int]) -> None:
        """Adds drawn tokens that the cache knows as drafts already."""
        if tokens:
            sequence.output_ids += tokens
            sequence.num_tokens += len(tokens)
            sequence.last_token = tokens[-1]

    def _skip_scored(self, sequence: RequestSequence) -> None:
        """Has a sequence opened again behind tokens whose scores are known, if their K and V are cached."""
        scores, at = sequence.request.scores, sequence.num_computed
        if scores is None or sequence.state is not SequenceStatus.RUNNING or scores.skips_from(at) == at:
            return
        if self._cache.match(sequence.token_ids(), **sequence.request.key.content).num_tokens > at:
            self._return_to_waiting(sequence)

    def refuse(self, step: Batch[RequestSequence], error: BaseException | None) -> list[RequestSequence]:
        """Undoes a step that the storage had no memory for, as if blocks had run out; returns the sequences that end.

        The sequences with copies in the step wait again; without any, the last running one does. A sequence that runs
        alone is tried once more, then it ends.
        """
        self._forget_drafts(step.drafts)
        self.num_steps -= 1
        self.num_computed_tokens -= int(step.num_new_tokens.sum())
        self._clients.forget_step(step.sequences, step.num_new_tokens.tolist())
        alone = self.running[0] if len(self.running) == 1 else None
        ended: list[RequestSequence] = []
        if alone is not None and alone is self._oom_backoff.alone:
            ended = [alone, *alone.dependents()]
            for sequence in ended:
                self.finish(sequence, "error", error)
            alone = None
        copying = [sequence for sequence in step.copying if sequence.state is SequenceStatus.RUNNING]
        for sequence in copying:
            self._return_to_waiting(sequence)
        if not copying and len(self.running) > 1:
            self._preempt_last()
        self._oom_backoff.record_refusal(alone)
        return ended

    # -- choosing --------------------------------------------------------------------------------------

    def _steady_decodes(self) -> Batch[RequestSequence] | None:
        """The previous batch, if it had only decodes and exactly its sequences continue: its arrays are reused.

        `_close` forgets it when a sequence ends or is closed, so that only new sequences have to be detected here.
        """
        decodes, clients = self._decodes, self._clients
        clients.step = self.num_steps
        if decodes is None or self._paused or clients.are_several or clients.step < clients.shared_until:
            return None
        if decodes.sequences != self.running or len(self.running) > self.max_batch_tokens:
            return None
        return decodes

    def _continue_running(
        self, steady: Batch[RequestSequence] | None, *, may_admit: bool
    ) -> tuple[list[tuple[RequestSequence, int]], PromptChunks]:
        """The step's running sequences with their numbers of tokens, decodes first; and what the step has left.

        A prompt behind a waiting sequence has 0 tokens before the admission.
        """
        # The prompts of one call wait for each other in any case.
        long_limit = self._long_prefill_tokens if len(self._calls) > 1 else 0
        budget, limits = self.max_batch_tokens, (long_limit, self._chunk_limit)
        if steady is not None:
            if self._paired_sequences is not steady.sequences:
                self._paired_sequences, self._pairs = (
                    steady.sequences,
                    [(sequence, 1) for sequence in steady.sequences],
                )
            return list(self._pairs), PromptChunks(budget - len(self._pairs), *limits, is_shared=True)
        prefills: list[RequestSequence] = []
        decodes: list[RequestSequence] = []
        for sequence in self.running:
            if sequence.request.is_paused or sequence.candidates is not None:
                continue
            (prefills if num_left(sequence) > 1 else decodes).append(sequence)
        clients = self._clients
        if clients.are_several or clients.step < clients.shared_until:
            decodes = clients.select_decodes(decodes)
        chosen = [(sequence, 1) for sequence in decodes[:budget]]
        ready = self._ready()
        is_shared = len(chosen) + len(prefills) + len(ready) > 1
        chunks = PromptChunks(budget - len(chosen), *limits, is_shared=is_shared)
        prefills.sort(key=clients.rank)
        first = min(map(clients.rank, ready), default=None) if may_admit and prefills else None
        for sequence in prefills:
            is_behind = first is not None and first[:2] < clients.rank(sequence)[:2]
            chosen.append((sequence, 0 if is_behind else chunks.take(sequence)))
        if clients.are_several:
            long = [s for s in prefills if chunks.is_long(s)] + [s for s in ready if s.is_long]
            chunks.client_limits = clients.limits_beside(long, long_limit, chosen, ready)
        return chosen, chunks

    def _ready(self) -> list[RequestSequence]:
        """The waiting sequences that may join a step, of those that a step examines."""
        return [s for s in self.waiting[:MAX_EXAMINED] if s.is_searched and not s.waits_for_commit]

    def _admit(
        self, chosen: list[tuple[RequestSequence, int]], chunks: PromptChunks
    ) -> list[tuple[RequestSequence, int]]:
        """Opens the waiting sequences that join the step, see `Admission.admit`."""
        room = self.max_num_seqs - len(self.running)
        if self._oom_backoff.steps_to_wait:
            room = 0 if self.running else 1
        return self._admission.admit(
            self.waiting,
            self._clients.admission_order(self.waiting[:MAX_EXAMINED]),
            self.running,
            chosen,
            is_first=not (self.running or self.loading),
            room=room,
            chunks=chunks,
        )

    def _paused_to_preempt(
        self, chosen: list[tuple[RequestSequence, int]], admitted: list[tuple[RequestSequence, int]]
    ) -> list[RequestSequence]:
        """The paused running sequences, if others wait for a place, a load or memory and the step has room."""
        if not (self.waiting or self.loading):
            return []
        if sum(n for _, n in chosen + admitted) >= self.max_batch_tokens:
            return []  # the step is full anyway
        return self._paused_running()

    def _paused_running(self) -> list[RequestSequence]:
        """The running sequences of paused requests."""
        if not self._paused:
            return []
        return [sequence for sequence in self.running if sequence.request.is_paused]

    def _beam_over_limit(self) -> RequestSequence | None:
        """The last idle beam of an owner that is short of blocks and of whose sequences none computes: they alone hold
        the blocks that its next sequence lacks, and other owners' sequences do not wait for it."""
        live = self._running_and_loading()
        for owner_id in sorted(self._admission.short_owners):
            own = [sequence for sequence in live if sequence.request.owner_id == owner_id]
            if own and all(sequence.candidates is not None for sequence in own):
                return own[-1]
        return None

    def _sequence_over_share(
        self, refused: RequestSequence, admitted: list[tuple[RequestSequence, int]]
    ) -> RequestSequence | None:
        """The sequence to preempt for `refused`, by the shares of their clients, or a prompt of worse priority; None if
        that would not make enough room."""
        if self._oom_backoff.steps_to_wait:
            return None
        new = {id(sequence) for sequence, _ in admitted}
        live = [sequence for sequence in self._running_and_loading() if id(sequence) not in new]
        candidates = self._clients.candidates_over_share(refused, live) or [
            sequence
            for sequence in live
            if sequence.request.priority > refused.request.priority and num_left(sequence) > 1
        ]
        cache = self._cache
        room = cache.num_free_blocks - self._admission.margin
        for sequence in candidates:
            room += cache.num_blocks_for(max(1, sequence.num_computed))
        return candidates[-1] if candidates and cache.num_blocks_for(refused.num_tokens) <= room else None

    def _running_and_loading(self) -> list[RequestSequence]:
        """The running and loading sequences, sorted by key."""
        return sorted(self.running + self.loading, key=_key) if self.loading else self.running

    # -- moving sequences --------------------------------------------------------------------------------

    def _make_room(self, chosen: list[tuple[RequestSequence, int]]) -> bool:
        """Preempts one running sequence, or halves the chunk of the only one. False if all running ones are paused."""
        if not chosen:  # only paused sequences and idle beams run
            return self._preempt_idle_beam()
        if paused := self._paused_running():
            self._preempt(paused[-1])
            return True
        live = self._running_and_loading()
        candidates = self._clients.preemption_candidates(
            self._memory_limits.preemption_candidates(live, chosen), live
        )
        if len(candidates) > 1:
            last = candidates[-1]
            if len(chosen) == 1 and chosen[0][0] is last:  # nothing would compute: an idle beam leaves
                last = next((one for one in reversed(candidates) if one.candidates is not None), last)
            self._preempt(last)
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
        for ended in (sequence, *sequence.dependents()):
            self.failed.append(ended)
            self.finish(ended, "error", error)
        return True

    def _preempt_idle_beam(self) -> bool:
        """Preempts the last running beam that has its candidates, if a waiting sequence lacks a place or memory."""
        idle = [sequence for sequence in self.running if sequence.candidates is not None]
        if self._admission.refused is None or not idle:
            return False
        self._preempt(idle[-1])
        return True

    def preempt_to(self, num_blocks: int) -> None:
        """Preempts running sequences, the last first, until at most `num_blocks` blocks are in use. They are computed
        again later; a sequence that no longer fits ends with a CapacityError at its turn."""
        self.preempt_until(lambda: self._num_used_blocks() <= num_blocks)

    def preempt_until(self, fits: Callable[[], bool]) -> None:
        """Preempts running sequences, the last first, until `fits()` is true."""
        while (self.running or self.loading) and not fits():
            self._preempt_last()

    def _num_used_blocks(self) -> int:
        stats = self._cache.stats()
        return stats["held"] + stats["pinned"] + stats["in_flight"]

    def _preempt_last(self) -> None:
        """Preempts the last running or loading sequence."""
        self._preempt(max(self.running[-1:] + self.loading[-1:], key=_key))

    def _preempt(self, sequence: RequestSequence) -> None:
        if sequence.state is SequenceStatus.LOADING:
            sequence.is_withdrawn = self._is_withdrawn(sequence)
            self._stop_loading(sequence)
            # The loaded tokens are findable; no second search.
            self._wait(sequence, search=False)
            return
        sequence.request.num_preemptions += 1
        self.num_preemptions += 1
        self._swap.swap_out(sequence)
        self._return_to_waiting(sequence)

    def _record_start(self, admitted: Iterable[tuple[RequestSequence, int]]) -> None:
        """Records a request's start and its hit; after a preemption it would find its own content, which is no hit."""
        for sequence, _ in admitted:
            self._swap.drop(sequence)
            sequence.search = None
            request = sequence.request
            if request.started_s is None:
                request.started_s = self.clock()
                request.num_cached_tokens = min(sequence.num_computed, len(request.prompt_token_ids))
                if request.options.session is not None:
                    self.on_session_start(request)

    def _return_to_waiting(self, sequence: RequestSequence) -> None:
        """RUNNING to WAITING; its committed content stays findable."""
        self.running.remove(sequence)
        sequence.is_withdrawn = self._is_withdrawn(sequence)
        self._keep_scores(sequence)
        self._close(sequence)
        self._wait(sequence)

    def _is_withdrawn(self, sequence: RequestSequence) -> bool:
        """True if computed content of a sequence with an open cache sequence was dropped."""
        return self._cache.prefix_caching and not sequence.cache_sequence.is_findable

    def _wait(self, sequence: RequestSequence, *, search: bool = True) -> None:
        sequence.state = SequenceStatus.WAITING
        sequence.num_computed = 0
        sequence.waits_for = None
        if sequence.request.scores is not None:
            sequence.request.scores.is_filled = False
        sequence.is_long = False
        insort(self._waiting_list(sequence), sequence, key=_key)
        if sequence.request.is_paused:
            return  # `resume` starts the search of the tiers
        if self._loading is not None and search and sequence.swapped is None and sequence.search is None:
            self._loading.search(sequence)

    def _waiting_list(self, sequence: RequestSequence) -> list[RequestSequence]:
        """The list in which a WAITING sequence waits."""
        return self.paused_waiting if sequence.request.is_paused else self.waiting

    def _open(self, sequence: RequestSequence, tokens: np.ndarray) -> CacheSequence:
        request = sequence.request
        self._fill_scores(sequence)
        cache_sequence = self._cache.open(
            tokens,
            **request.key.content,
            max_num_tokens=len(request.prompt_token_ids) + request.max_tokens,
            owner_id=request.owner_id,
            cache_priority=request.cache_priority,
            max_cached_tokens=sequence.max_cached_tokens,
        )
        if sequence.is_withdrawn:
            self._cache.withdraw(cache_sequence)
        return cache_sequence

    def _fill_scores(self, sequence: RequestSequence) -> None:
        """Takes the scores that were kept for the sequence's prompt."""
        scores = sequence.request.scores
        if self._kept_scores is not None and scores is not None and not scores.is_filled:
            self._kept_scores.fill(sequence)
            scores.is_filled = True

    def _keep_scores(self, sequence: RequestSequence) -> None:
        """Keeps the scores of the sequence's tokens, if some are known and other sequences find its content."""
        request = sequence.request
        if self._kept_scores is None or (request.scores is None and sequence.logprobs is None):
            return
        if not self._is_withdrawn(sequence):
            self._kept_scores.keep(sequence)

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

    def fork(self, parent: RequestSequence, sequence: RequestSequence) -> None:
        """Lets a sequence of the parent's request run over the parent's blocks, or wait if it cannot."""
        is_shared = self._cache.can_fork or parent.request.beams is not None
        is_running = parent.state is SequenceStatus.RUNNING
        may_run = is_shared and is_running and len(self.running) < self.max_num_seqs
        if not may_run or not self._cache.has_room_to_fork(parent.cache_sequence):
            if parent.cache_sequence is not None:
                sequence.is_withdrawn = self._is_withdrawn(parent)
            self._wait(sequence)  # opened later, over the prompt's blocks if prefixes are shared
            return
        self._run_fork(parent, sequence)

    def _run_fork(self, parent: RequestSequence, sequence: RequestSequence) -> None:
        """Sets a sequence to RUNNING over the parent's blocks."""
        sequence.cache_sequence = self._cache.fork(parent.cache_sequence)
        sequence.num_computed = parent.num_computed
        sequence.state = SequenceStatus.RUNNING
        insort(self.running, sequence, key=_key)


def _key(sequence: RequestSequence) -> tuple[int, int, int]:
    return sequence.key
