"""`TierStack`: the tiers below the pool behind one interface. Asynchronous, bounded; a failed tier never fails a step.

A store goes to **every** tier; tiers do not pass values down as they evict. So the disk has a segment before the
process ends, not when host memory happens to be full; an eviction costs nothing and waits for nothing; and a segment
has one path, not one for each pair of tiers. The price: a lower tier holds the values of an upper one as well, so that
capacities do not add up, and every segment is written to each tier once (a key that is there is only refreshed). A load
goes top down, segment by segment; a segment from a lower tier is promoted to the tiers above it.

Not a policy: the engine decides when to store (on eviction, through), and whether to load or to recompute;
`estimate_seconds` helps.

A load has as many fetch batches under way as there are workers: while one waits for the medium another checks or
copies. A batch is one segment, or up to `_BATCH_BYTES` of segments if a tier loads several at once (`LoadsMany`).

Threads: `workers` threads load and look up, one thread for each tier stores; daemons, joined by `close`. workers=0:
every call does its work itself, `on_done` included, in a deterministic order, for the laws and the simulator.
Calls may come from any thread; `into` and `on_done` run in the stack's threads.

Invariants
    S1  a load delivers bytes that were stored for this very key, in order, or ends before (`segment.decode`).
    S2  no failure of a tier raises out of the stack: it is a miss, or a segment that is not stored, is counted, and is
        logged once per kind; the next tier is asked.
    S3  segments waiting to be stored take at most `max_bytes_in_flight` for each tier. A segment that finds the queue
        full is dropped and counted; the caller never waits.
    S4  after `close` no thread, file or connection of the stack is left, except a tier's call that outlives
        the time-out.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, takewhile
from typing import Any

import numpy as np

from quire.errors import ArgumentError
from quire.spec.payload import PayloadLayout
from quire.tiers.segment import Layout, Segment, encode
from quire.tiers.segment_key import SegmentKey
from quire.tiers.tier import LoadsMany, Reason, SegmentInfo, Tier
from quire.tiers.tier_changes import TierChanges
from quire.tiers.tier_worker import Fetched, OutgoingSegment, TierCounts, TierWorker
from quire.tiers.transfer import Load, Lookup
from quire.tiers.workers import Workers

__all__ = ["StackStats", "TierStack"]

# Payload of a fetch batch if a tier loads several values at once, and the part of it that is copied at once.
_BATCH_BYTES, _COPIED_BYTES = 32 << 20, 8 << 20
_MAX_LOSSES = 65536  # evicted values that are remembered


@dataclass(frozen=True)
class StackStats:
    """tiers: top down. num_loads_running: now. The others: counts since the start."""

    tiers: tuple[TierCounts, ...]
    num_loads_running: int
    num_lookups: int
    num_loads: int
    num_loads_complete: int
    num_loads_cancelled: int


class TierStack:
    """See the module's text.

    tiers: top down, fastest first; names all different; the stack closes them. layout: of their payloads.
    promote: store a segment from a lower tier in the tiers above it. check_finite: names of tiers that other processes
    fill; there a value with an infinity or NaN counts as damaged. read_only: names of tiers
    in which nothing is stored. clock: monotonic seconds, for measurements;
    wall_clock: seconds since 1970, written into headers.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        layout: PayloadLayout,
        *,
        workers: int = 2,
        max_bytes_in_flight: int = 64 << 20,
        promote: bool = True,
        check_finite: Collection[str] = (),
        read_only: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        names = [tier.name for tier in tiers]
        if len(set(names)) != len(names):
            raise ArgumentError(f"expected tiers of different names, got {names}")
        if workers < 0 or max_bytes_in_flight < 1:
            raise ArgumentError(
                "expected workers of 0 or more and max_bytes_in_flight of 1 or more, "
                f"got {workers} and {max_bytes_in_flight}"
            )
        self.layout = layout
        self.tier_names = tuple(names)
        self._read_only = tuple(read_only)
        self.writable_names = tuple(name for name in names if name not in self._read_only)
        self._workers = workers
        self._promote = promote
        self.clock = clock
        self._wall_clock = wall_clock
        self.changes = TierChanges()
        """The values that tiers have stored and lost, once recording is on (`TierChanges.record`)."""
        self._tiers = [
            TierWorker(
                tier,
                min(workers, 1),
                max_bytes_in_flight,
                clock,
                self.changes,
                check_finite=tier.name in check_finite,
            )
            for tier in tiers
        ]
        self._batch_bytes = _BATCH_BYTES if any(isinstance(tier, LoadsMany) for tier in tiers) else 0
        self._readers = Workers("quire-tiers", workers, spread=True)
        self._lock = threading.Lock()
        self._losses: OrderedDict[bytes, dict[str, float]] = (
            OrderedDict()
        )  # by key and tier, the time of the eviction
        for tier in tiers:
            tier.on_removed = partial(self._note_removed, tier.name)
        self._running: set[Load | Lookup] = set()
        self._num_lookups = 0
        self._num_loads = 0
        self._num_complete = 0
        self._num_cancelled = 0

    def store(
        self,
        segments: Sequence[tuple[SegmentKey, np.ndarray]],
        *,
        cache_priority: int = 1,
        owner: str = "",
        layout: Layout | None = None,
        excluded: Collection[str] = (),
    ) -> int:
        """Queues segments and their payloads (uint8, `segment` module) for every tier but `excluded`. Returns how many
        segments at least one tier has queued.

        The payloads belong to the stack from now on: the caller must not write to them. Returns at once; queued
        segments can be looked up and loaded from now on. layout: of payloads that are not keys and values.
        """
        num_queued = 0
        for key, payload in segments:
            outgoing = OutgoingSegment(
                key,
                key.info(cache_priority=cache_priority, owner=owner),
                payload,
                partial(self._encode, key, payload, layout or self.layout),
            )
            queued = [tier.store(outgoing) for tier in self._writable(self._tiers, excluded)]
            num_queued += any(queued)
        return num_queued

    def has_tiers_besides(self, excluded: Collection[str]) -> bool:
        """Whether something can be stored in tiers other than `excluded`."""
        return bool(self._writable(self._tiers, excluded))

    def _writable(self, tiers: Sequence[TierWorker], excluded: Collection[str] = ()) -> list[TierWorker]:
        return [one for one in tiers if one.name not in excluded and one.name not in self._read_only]

    def lookup(
        self,
        keys: Sequence[bytes],
        *,
        every_tier: bool = False,
        excluded: Collection[str] = (),
        on_done: Callable[[Lookup], None] | None = None,
    ) -> Lookup:
        """Looks a chain of keys up in the tiers but `excluded`, top down until all are found; every_tier: in all tiers,
        for reports.

        One call of `contains` for each tier; runs before the loads that wait.
        """
        lookup = Lookup(keys, self._note_end, on_done)
        with self._lock:
            self._num_lookups += 1
            self._running.add(lookup)
        if not self._readers.submit(
            partial(self._run, lookup, lambda: self._run_lookup(lookup, every_tier, excluded)), first=True
        ):
            lookup._end("closed")
        return lookup

    def load(
        self,
        chain: Sequence[SegmentKey],
        *,
        into: Callable[[int, np.ndarray], None] | None = None,
        places: Callable[[int], Sequence[Any] | None] | None = None,
        on_done: Callable[[Load], None] | None = None,
        cache_priority: int = 1,
        owner: str = "",
        layout: Layout | None = None,
    ) -> Load:
        """Loads a chain, a few segments at a time, up to the first that no tier has.

        into(index, payload): receives each segment, in threads of the stack, several at once (until when: X2; order:
        X3); the payload is uint8, read-only, and valid while referred to. Without it `Load.payloads` has them.

        places(index): in addition to `into`, writable buffers for this segment's payload, filled one after the other,
        or None. A tier with `LoadsInPlace` reads into them if that needs no waiting; `into` is not called then. The
        buffers of a segment that did not arrive may hold anything. X2 holds for them as for `into`.

        cache_priority, owner: of promoted segments; with cache priority 0 (discard) none is promoted. layout: of
        payloads that are not keys and values. Loads under way take turns, see the module's text.
        """
        load = Load(chain, layout or self.layout, into, places, self._note_end, on_done)
        with self._lock:
            self._num_loads += 1
            self._running.add(load)
        load._end_if_delivered()  # for an empty chain
        for _ in range(self._num_batches(load)):
            self._submit_batch(load, cache_priority, owner)
        return load

    def evict(self, keys: Sequence[bytes]) -> None:
        """Removes values from every tier, after the stores that are queued."""
        for tier in self._tiers:
            tier.evict(tuple(keys))

    def evict_chosen(
        self,
        roots: Sequence[bytes],
        choose: Callable[[Sequence[tuple[bytes, SegmentInfo]]], Collection[bytes]],
    ) -> None:
        """As `evict`, for the keys that `choose` names, given a tier's `contents` under these roots; it runs in the
        tiers' threads. A shared server lists nothing: of it `choose` can only name keys that the caller knows."""
        for tier in self._tiers:
            tier.evict_chosen(roots, choose)

    def submit_job(self, tier: str, operation: str, job: Callable[[], object]) -> None:
        """Has a tier's own thread run `job`, after the stores that are queued and before later ones.

        operation: its name in the log, if it fails.
        """
        for one in self._tiers:
            if one.name == tier:
                one.submit(operation, job)

    def estimate_seconds(self, num_bytes: int, tier: str | None = None, num_segments: int = 1) -> float:
        """Expected seconds of a load of `num_bytes` of payload from a tier (None: the slowest measured).

        From recent loads, delivery included; before the first, the time of a look-up for each of `num_segments`; 0.0
        before that.
        """
        num_turns = -(-num_segments // max(1, self._workers))
        expected = [
            one.estimate_seconds(num_bytes, num_turns) for one in self._tiers if tier in (None, one.name)
        ]
        return max((seconds for seconds in expected if seconds is not None), default=0.0)

    def round_trips(self) -> dict[str, float]:
        """By tier, the recent seconds of a look-up; 0.0 before the first."""
        return {tier.name: tier.round_trip_s for tier in self._tiers}

    def count_not_asked(self, tier: str) -> None:
        """Counts a request that the tier was not asked for, because its look-ups take too long."""
        self._worker(tier).count("not_asked")

    def count_not_loaded(self, tier: str) -> None:
        """Counts a prompt that the tier had and that was computed, because that was expected to be faster."""
        self._worker(tier).count("not_loaded")

    def _worker(self, name: str) -> TierWorker:
        return next(tier for tier in self._tiers if tier.name == name)

    def losses(self, keys: Sequence[bytes]) -> dict[str, float]:
        """By tier that has evicted one of these values, seconds since the latest such eviction; bounded memory."""
        found: dict[str, float] = {}
        now = self.clock()
        with self._lock:
            for key in keys:
                for tier, at in self._losses.get(key, {}).items():
                    found[tier] = min(found.get(tier, now - at), now - at)
        return found

    def _note_removed(self, tier: str, keys: Sequence[bytes], reason: Reason) -> None:
        self.changes.add_lost(tier, keys, reason)
        if reason != "evicted":
            return
        now = self.clock()
        with self._lock:
            for key in keys:
                self._losses.setdefault(key, {})[tier] = now
                self._losses.move_to_end(key)
                if len(self._losses) > _MAX_LOSSES:
                    self._losses.popitem(last=False)

    def contents(self, tier: str, roots: Sequence[bytes]) -> list[tuple[bytes, SegmentInfo]]:
        """Keys and infos of a tier's values under these roots, from its index if it has one; in the caller's thread."""
        return [found for one in self._tiers if one.name == tier for found in one.contents(roots)]

    def stats(self) -> StackStats:
        """Counts of every tier. Makes no round trip to a server, but reads the disk: not for the engine's thread."""
        tiers = tuple(tier.stats() for tier in self._tiers)
        with self._lock:
            return StackStats(
                tiers,
                sum(isinstance(handle, Load) for handle in self._running),
                self._num_lookups,
                self._num_loads,
                self._num_complete,
                self._num_cancelled,
            )

    def num_unanswered(self) -> dict[str, int]:
        """By tier, the number of calls that failed or were skipped after a failure. Calls no tier."""
        return {tier.name: tier.num_unanswered for tier in self._tiers}

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until all queued segments are durable in the tiers; True if that took at most `timeout` seconds."""
        left = _countdown(timeout)
        done = [tier.writer.wait(left()) for tier in self._tiers]
        return all(done)

    def close(self, timeout: float | None = 10.0) -> bool:
        """Ends loads and lookups as "closed", stores the queued segments, joins the threads, closes the tiers.

        True if all was done within `timeout` seconds; the remaining segments are dropped and counted. A second call
        does nothing.
        """
        left = _countdown(timeout)
        with self._lock:
            running = list(self._running)
        for handle in running:
            handle._end("closed")
        in_time, _ = self._readers.close(left())
        return all([in_time, *[tier.close(left()) for tier in self._tiers]])

    def _encode(self, key: SegmentKey, payload: np.ndarray, layout: Layout) -> list[memoryview]:
        segment = Segment(key.hash, key.parent, key.start, key.tokens, payload)
        return encode(segment, layout, made_at=self._wall_clock())

    def _run(self, handle: Load | Lookup, job: Callable[[], None]) -> None:
        """Runs a job of a handle. An error ends the handle, so that no caller waits for ever."""
        if handle.outcome is not None:
            return
        try:
            job()
        except Exception:
            handle._end("failed")
            raise

    def _run_lookup(self, lookup: Lookup, every_tier: bool, excluded: Collection[str]) -> None:
        tiers: list[str | None] = [None] * len(lookup.keys)
        for tier in self._tiers:
            if not every_tier and None not in tiers:
                break
            if tier.name in excluded:
                continue
            lookup.current_tier = tier.name
            started = self.clock()
            found = tier.contains(lookup.keys)
            lookup.seconds[tier.name] = self.clock() - started
            lookup.num_leading[tier.name] = len(list(takewhile(bool, found)))
            tiers = [
                name or (tier.name if is_there else None) for name, is_there in zip(tiers, found, strict=True)
            ]
        lookup.tiers = tuple(tiers)
        lookup.leading_tiers = tuple(name for name in takewhile(bool, tiers) if name)
        lookup._end("complete")

    def _num_batches(self, load: Load) -> int:
        """How many fetch batches of a load run at once."""
        return min(len(load.chain), max(1, self._workers))

    def _submit_batch(self, load: Load, cache_priority: int, owner: str) -> None:
        if not self._readers.submit(
            partial(self._run, load, lambda: self._fetch_batch(load, cache_priority, owner))
        ):
            load._end("closed")

    def _fetch_batch(self, load: Load, cache_priority: int, owner: str) -> None:
        """Fetches one segment of a load, or several if a tier loads many at once."""
        num_batches = self._num_batches(load)
        indices = load._next_batch(self._batch_bytes, num_batches)
        if not indices:
            return
        if self._fetch(load, indices, cache_priority, owner):
            self._submit_batch(load, cache_priority, owner)
        load._end_if_delivered()

    def _fetch(self, load: Load, indices: range, cache_priority: int, owner: str) -> bool:
        """Fetches segments and delivers them; True if all were delivered."""
        num_damaged = self._num_damaged()
        while indices:
            started = self.clock()
            keys = load.chain[indices.start : indices.stop]
            found: list[Fetched] = []
            for depth, tier in enumerate(self._tiers):
                above = self._writable(self._tiers[:depth]) if self._promote and cache_priority else []
                if not above and (count := self._fetch_in_place(load, indices, tier)):
                    break
                count = len(found := tier.fetch_leading(self._copied_at_once(keys, load.layout), load.layout))
                if found:
                    break
                if load.outcome is not None:
                    return False
            else:
                load._limit(indices.start, "missing")
                if self._num_damaged() != num_damaged:
                    self._check_behind_damage(load.chain[indices.start + 1 :], load.layout)
                return False
            if not self._deliver(load, indices, found, tier.name):
                return False
            num_bytes = sum(load.layout.num_bytes(len(key.tokens)) for key in keys[:count])
            num_bytes -= sum(one.payload.nbytes for one in found if one.was_queued)
            if num_bytes:  # concurrent batches share the time
                tier.add_load_time(num_bytes, (self.clock() - started) / self._num_batches(load))
            for key, fetched in zip(keys, found, strict=False):
                info = key.info(cache_priority=cache_priority, owner=owner)
                outgoing = OutgoingSegment(key, info, fetched.payload, fetched.make, fetched.num_bytes)
                for one in above:
                    one.store(outgoing, promoted=True)
            indices = indices[count:]
        return True

    def _num_damaged(self) -> int:
        return sum(tier.num_damaged for tier in self._tiers)

    def _check_behind_damage(self, keys: Sequence[SegmentKey], layout: Layout) -> None:
        """Checks the values behind a damaged one, and removes those that are damaged too; recomputed segments replace
        them. Otherwise each start would find one of them."""
        for tier in self._tiers:
            for key in keys:
                self._readers.submit(partial(tier.remove_if_damaged, key, layout))

    def _copied_at_once(self, keys: Sequence[SegmentKey], layout: Layout) -> Sequence[SegmentKey]:
        """The leading keys with up to `_COPIED_BYTES` of payload, at least one."""
        num_bytes = accumulate(layout.num_bytes(len(key.tokens)) for key in keys)
        return keys[: max(1, sum(count <= _COPIED_BYTES for count in num_bytes))]

    def _fetch_in_place(self, load: Load, indices: range, tier: TierWorker) -> int:
        """How many leading segments a tier has read into the load's buffers, and the load has counted."""
        if load._places is None:
            return 0
        keys = load.chain[indices.start : indices.stop]
        writing = load._writing_from(indices.start)
        count = tier.fetch_in_place(keys, load.layout, writing, lambda at: load._place(indices[at]))
        for index in indices[:count]:
            load._add_arrived(index, load.layout.num_bytes(len(load.chain[index].tokens)), tier.name)
        return count

    def _deliver(self, load: Load, indices: range, found: list[Fetched], tier: str) -> bool:
        """Delivers fetched segments; False if one was not wanted."""
        pairs = zip(indices, found, strict=False)
        return all(load._deliver(index, fetched.payload, tier) for index, fetched in pairs)

    def _note_end(self, handle: Load | Lookup) -> None:
        with self._lock:
            self._running.discard(handle)
            if isinstance(handle, Load):
                self._num_complete += handle.outcome == "complete"
                self._num_cancelled += handle.outcome == "cancelled"


def _countdown(timeout: float | None) -> Callable[[], float | None]:
    """A function that returns the rest of `timeout` seconds at each call."""
    if timeout is None:
        return lambda: None
    deadline = time.monotonic() + timeout
    return lambda: max(0.0, deadline - time.monotonic())
