"""The tiers below the pool as one thing to talk to: asynchronous, bounded, and never the reason that a step fails.

A store goes to **every** tier, not down from one to the next as they evict. What is to survive the process must be on
disk before the process ends, not when host memory happens to be full; an eviction then costs nothing and waits for
nothing; and a segment has one path, not one for each pair of tiers. The price: a lower tier holds what an upper one
holds as well, so that tiers do not add up, and every segment is written to each of them once (a key that is there is
only refreshed). A load goes top down, segment by segment; what a lower tier gave is promoted to those above it.

What it is not: a policy. When to store (on eviction, through), and whether to load or to recompute, is the engine's
business; `estimate_seconds` helps.

A load has as many fetch batches under way as there are workers: while one waits for the medium another checks or
copies. A batch brings up one segment, or up to `_BATCH_BYTES` of them where a tier gives several at once (`LoadsMany`).

Threads: `workers` of them load and look up, one for each tier stores; daemons, joined by `close`. workers=0: everything
is done inside the call, `on_done` included, in an order that depends on nothing else: for the laws and the simulator.
Calls may come from any thread; `into` and `on_done` run in the stack's.

Invariants
    S1  a load delivers bytes that were stored for this very key, in order, or ends before (`segment.decode`).
    S2  nothing a tier does raises out of here: a failure is a miss or a segment not kept, counted, and logged once per
        kind; the next tier is asked.
    S3  segments waiting to be stored take at most `max_bytes_in_flight` for each tier; what finds it full is dropped
        and counted, and nobody waits.
    S4  after `close` no thread, file or connection of the stack is left, but for a tier's call that outlives
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

# Payload that a fetch batch of a load brings up where a tier gives several values at once, and of that what it copies.
_BATCH_BYTES, _COPIED_BYTES = 32 << 20, 8 << 20
_MAX_LOSSES = 65536  # values given up by tiers that are remembered


@dataclass(frozen=True)
class StackStats:
    """tiers: top down. The rest: counts since the start, and how many loads are under way now."""

    tiers: tuple[TierCounts, ...]
    num_loads_running: int
    num_lookups: int
    num_loads: int
    num_loads_complete: int
    num_loads_cancelled: int


class TierStack:
    """See the module's text.

    tiers: top down, fastest first; names all different; the stack closes them. layout: of their payloads.
    promote: whether what a lower tier gave is stored in those above it. check_finite: the names of tiers that others
    fill, whose values are damaged where a number in them is infinite or NaN. clock: seconds that pass, for
    measurements; wall_clock: seconds since 1970, written into headers.
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
        self._workers = workers
        self._promote = promote
        self._clock = clock
        self._wall_clock = wall_clock
        self.notices = TierChanges()
        """What the tiers hold and lose, for who listens (`TierChanges.listen`)."""
        self._tiers = [
            TierWorker(
                tier,
                min(workers, 1),
                max_bytes_in_flight,
                clock,
                self.notices,
                check_finite=tier.name in check_finite,
            )
            for tier in tiers
        ]
        self._batch_bytes = _BATCH_BYTES if any(isinstance(tier, LoadsMany) for tier in tiers) else 0
        self._readers = Workers("quire-tiers", workers, spread=True)
        self._lock = threading.Lock()
        self._losses: OrderedDict[bytes, dict[str, float]] = OrderedDict()  # when which tier gave a value up
        for tier in tiers:
            tier.on_removed = partial(self._removed, tier.name)
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
        spared: Collection[str] = (),
    ) -> int:
        """Queues segments and their payloads (uint8, `segment` module) for every tier but those spared; how many some
        tier has queued.

        The payloads belong to the stack from now on: nobody writes to them again. Returns at once; what is queued
        can be looked up and loaded from now on. layout: of the payloads, where they are no keys and values.
        """
        num_queued = 0
        for name, payload in segments:
            outgoing = OutgoingSegment(
                name,
                name.info(cache_priority=cache_priority, owner=owner),
                payload,
                partial(self._encode, name, payload, layout or self.layout),
            )
            queued = [tier.store(outgoing) for tier in self._tiers if tier.name not in spared]
            num_queued += any(queued)
        return num_queued

    def has_others(self, spared: Collection[str]) -> bool:
        """Whether there are tiers but these."""
        return any(tier.name not in spared for tier in self._tiers)

    def lookup(
        self,
        keys: Sequence[bytes],
        *,
        every_tier: bool = False,
        on_done: Callable[[Lookup], None] | None = None,
    ) -> Lookup:
        """Asks how far a chain of keys is there: top down, until all are found; every_tier: all tiers, for reports.

        One call of `contains` for each tier asked; goes before the loads that wait.
        """
        lookup = Lookup(keys, self._ended, on_done)
        with self._lock:
            self._num_lookups += 1
            self._running.add(lookup)
        if not self._readers.submit(
            partial(self._try, lookup, lambda: self._look(lookup, every_tier)), first=True
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
        """Loads a chain, a few segments at a time, until one is in no tier.

        into(index, payload): takes each one, in threads of the stack, several at once (X2 says until when, X3 in what
        order); the payload is uint8, read-only, and valid while referred to. Without it they are kept in
        `Load.payloads`.

        places(index): beside `into`, writable buffers that take this segment's payload one after the other, or None. A
        tier that can (`LoadsInPlace`) reads to there what it has at hand, and `into` is not called for it; of a
        segment that did not arrive they may hold anything. X2 holds for them as for `into`.

        cache_priority, owner: of what is promoted; with cache priority 0 (discard) nothing is. layout: of the
        payloads, where they are no keys and values. Loads under way take turns, see the module's text.
        """
        load = Load(chain, layout or self.layout, into, places, self._ended, on_done)
        with self._lock:
            self._num_loads += 1
            self._running.add(load)
        load._settle()  # where the chain is empty
        for _ in range(self._num_batches(load)):
            self._go_on(load, cache_priority, owner)
        return load

    def evict(self, keys: Sequence[bytes]) -> None:
        """Removes values from every tier, after what was queued to be stored before."""
        for tier in self._tiers:
            tier.evict(tuple(keys))

    def queue(self, tier: str, operation: str, job: Callable[[], object]) -> None:
        """Has a tier's own thread do something behind what is queued to be stored there, and before what comes.

        operation: for the log, where it fails.
        """
        for one in self._tiers:
            if one.name == tier:
                one.queue(operation, job)

    def estimate_seconds(self, num_bytes: int, tier: str | None = None) -> float:
        """How long a load of so many bytes of payload is expected to take from a tier (None: the slowest measured).

        Of what was measured lately, the delivery included; 0.0 while nothing was: try it, and it will be.
        """
        expected = [one.seconds(num_bytes) for one in self._tiers if tier in (None, one.name)]
        return max((seconds for seconds in expected if seconds is not None), default=0.0)

    def losses(self, keys: Sequence[bytes]) -> dict[str, float]:
        """Which tiers have given one of these values up, and how many seconds ago the last of them; bounded memory."""
        found: dict[str, float] = {}
        now = self._clock()
        with self._lock:
            for key in keys:
                for tier, at in self._losses.get(key, {}).items():
                    found[tier] = min(found.get(tier, now - at), now - at)
        return found

    def _removed(self, tier: str, keys: Sequence[bytes], reason: Reason) -> None:
        self.notices.gone(tier, keys, reason)
        if reason != "evicted":
            return
        now = self._clock()
        with self._lock:
            for key in keys:
                self._losses.setdefault(key, {})[tier] = now
                self._losses.move_to_end(key)
                if len(self._losses) > _MAX_LOSSES:
                    self._losses.popitem(last=False)

    def contents(self, tier: str, roots: Sequence[bytes]) -> list[tuple[bytes, SegmentInfo]]:
        """What a tier has under these roots, as far as it has an index; read in the caller's thread."""
        return [found for one in self._tiers if one.name == tier for found in one.contents(roots)]

    def stats(self) -> StackStats:
        """Counts of every tier; no round trip to a server, but a disk is read: not for the engine's thread."""
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

    def unanswered(self) -> dict[str, int]:
        """By tier, how many calls have failed, or were not made as it is given a rest. No tier is asked."""
        return {tier.name: tier.num_unanswered for tier in self._tiers}

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until what was queued to be stored is in the tiers, for good; whether that was within `timeout` s."""
        left = _countdown(timeout)
        done = [tier.writer.wait(left()) for tier in self._tiers]
        return all(done)

    def close(self, timeout: float | None = 10.0) -> bool:
        """Ends loads and lookups as "closed", stores what is queued, joins the threads, closes the tiers.

        Whether all that was done within `timeout` seconds; what was not is dropped and counted. Twice does nothing.
        """
        left = _countdown(timeout)
        with self._lock:
            running = list(self._running)
        for handle in running:
            handle._end("closed")
        in_time, _ = self._readers.close(left())
        return all([in_time, *[tier.close(left()) for tier in self._tiers]])

    def _encode(self, name: SegmentKey, payload: np.ndarray, layout: Layout) -> list[memoryview]:
        segment = Segment(name.key, name.parent, name.start, name.tokens, payload)
        return encode(segment, layout, made_at=self._wall_clock())

    def _try(self, handle: Load | Lookup, job: Callable[[], None]) -> None:
        """Whatever happens, nobody waits for ever."""
        if handle.outcome is not None:
            return
        try:
            job()
        except Exception:
            handle._end("failed")
            raise

    def _look(self, lookup: Lookup, every_tier: bool) -> None:
        where: list[str | None] = [None] * len(lookup.keys)
        for tier in self._tiers:
            if not every_tier and None not in where:
                break
            lookup.asked = tier.name
            found = tier.contains(lookup.keys)
            lookup.by_tier[tier.name] = len(list(takewhile(bool, found)))
            where = [name or (tier.name if there else None) for name, there in zip(where, found, strict=True)]
        lookup.found = tuple(where)
        lookup.where = tuple(name for name in takewhile(bool, where) if name)
        lookup._end("complete")

    def _num_batches(self, load: Load) -> int:
        """Fetch batches of a load that are under way at once."""
        return min(len(load.chain), max(1, self._workers))

    def _go_on(self, load: Load, cache_priority: int, owner: str) -> None:
        if not self._readers.submit(
            partial(self._try, load, lambda: self._fetch_batch(load, cache_priority, owner))
        ):
            load._end("closed")

    def _fetch_batch(self, load: Load, cache_priority: int, owner: str) -> None:
        """One segment of a load, or a few where a tier gives several at once."""
        num_batches = self._num_batches(load)
        indices = load._take(self._batch_bytes, num_batches)
        if not indices:
            return
        if self._fetch(load, indices, cache_priority, owner):
            self._go_on(load, cache_priority, owner)
        load._settle()

    def _fetch(self, load: Load, indices: range, cache_priority: int, owner: str) -> bool:
        """Brings segments up; whether all were delivered."""
        num_damaged = self._num_damaged()
        while indices:
            started = self._clock()
            names = load.chain[indices.start : indices.stop]
            found: list[Fetched] = []
            for depth, tier in enumerate(self._tiers):
                above = self._tiers[:depth] if self._promote and cache_priority else []
                if not above and (count := self._fetch_in_place(load, indices, tier)):
                    break
                count = len(found := tier.fetch_some(self._some(names, load.layout), load.layout))
                if found:
                    break
                if load.outcome is not None:
                    return False
            else:
                load._stop_at(indices.start, "missing")
                if self._num_damaged() != num_damaged:
                    self._look_through(load.chain[indices.start + 1 :], load.layout)
                return False
            if not self._hand_over(load, indices, found, tier.name):
                return False
            num_bytes = sum(load.layout.num_bytes(len(name.tokens)) for name in names[:count])
            num_bytes -= sum(one.payload.nbytes for one in found if one.was_queued)
            if num_bytes:  # others of the load have shared the time
                tier.loaded(num_bytes, (self._clock() - started) / self._num_batches(load))
            for name, fetched in zip(names, found, strict=False):
                info = name.info(cache_priority=cache_priority, owner=owner)
                outgoing = OutgoingSegment(name, info, fetched.payload, fetched.make, fetched.num_bytes)
                for one in above:
                    one.store(outgoing, promoted=True)
            indices = indices[count:]
        return True

    def _num_damaged(self) -> int:
        return sum(tier.num_damaged for tier in self._tiers)

    def _look_through(self, names: Sequence[SegmentKey], layout: Layout) -> None:
        """Behind a damaged value: the others that nobody asks for now go if they are damaged too, and are stored anew
        with what is computed in their place. Else each start would find one of them."""
        for tier in self._tiers:
            for name in names:
                self._readers.submit(partial(tier.remove_if_damaged, name, layout))

    def _some(self, names: Sequence[SegmentKey], layout: Layout) -> Sequence[SegmentKey]:
        """The leading ones, of `_COPIED_BYTES` together or one alone."""
        num_bytes = accumulate(layout.num_bytes(len(name.tokens)) for name in names)
        return names[: max(1, sum(count <= _COPIED_BYTES for count in num_bytes))]

    def _fetch_in_place(self, load: Load, indices: range, tier: TierWorker) -> int:
        """How many leading segments a tier has read to where they are wanted, and the load has them."""
        if load._places is None:
            return 0
        names = load.chain[indices.start : indices.stop]
        writing = load._writing_from(indices.start)
        count = tier.fetch_in_place(names, load.layout, writing, lambda at: load._place(indices[at]))
        for index in indices[:count]:
            load._arrive(index, load.layout.num_bytes(len(load.chain[index].tokens)), tier.name)
        return count

    def _hand_over(self, load: Load, indices: range, found: list[Fetched], tier: str) -> bool:
        """Whether all found were wanted."""
        pairs = zip(indices, found, strict=False)
        return all(load._deliver(index, fetched.payload, tier) for index, fetched in pairs)

    def _ended(self, handle: Load | Lookup) -> None:
        with self._lock:
            self._running.discard(handle)
            if isinstance(handle, Load):
                self._num_complete += handle.outcome == "complete"
                self._num_cancelled += handle.outcome == "cancelled"


def _countdown(timeout: float | None) -> Callable[[], float | None]:
    """What is left of so many seconds, at each call."""
    if timeout is None:
        return lambda: None
    deadline = time.monotonic() + timeout
    return lambda: max(0.0, deadline - time.monotonic())
