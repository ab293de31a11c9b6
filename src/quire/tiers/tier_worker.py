"""`TierWorker`: one tier as the stack uses it. Every call is guarded, counted and timed; stores wait in a queue.

If other processes fill the tier (`check_finite`), a value with an infinite or NaN element counts as damaged.

Invariants
    L1  no call raises, whatever the tier does: a failure is False or None, counted, and logged once per kind.
    L2  `fetch` returns only a payload that `segment.decode` has verified, or one that waits to be stored; a value that
        fails its check is removed and counted.
    L3  a value can be found and fetched from `store` on: from the queue while it waits there, however slow the tier.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from quire.tiers.check_finite import is_payload_finite
from quire.tiers.segment import Layout, SegmentError, check_parts, decode
from quire.tiers.segment_key import SegmentKey
from quire.tiers.throughput import Throughput
from quire.tiers.tier import (
    DamagedError,
    LoadsInPlace,
    LoadsMany,
    SegmentInfo,
    Tier,
    TierStats,
    UnavailableError,
)
from quire.tiers.tier_changes import TierChanges
from quire.tiers.workers import Workers

__all__ = ["Fetched", "OutgoingSegment", "TierCounts", "TierWorker"]

_log = logging.getLogger("quire")
_NICE = 5  # storing can wait, a step should not
_LOADS = ("hits", "misses", "skipped", "not_asked", "not_loaded", "loaded_bytes")
_STORES = ("stored", "stored_bytes", "promoted", "refused", "dropped")
_COUNTED = (*_LOADS, *_STORES, "damaged", "failures")


@dataclass(frozen=True, eq=False)
class Fetched:
    """payload: uint8, read-only. num_bytes, make: of the whole value. was_queued: it came from the queue."""

    payload: np.ndarray
    num_bytes: int
    make: Callable[[], list[memoryview]]
    was_queued: bool = False


class OutgoingSegment:
    """A segment on its way into tiers. Its value is made once for all of them, when the first tier needs it.

    payload: uint8, the content of the value. num_bytes: bytes that the queue counts for it; None: those of the payload.
    """

    def __init__(
        self,
        key: SegmentKey,
        info: SegmentInfo,
        payload: np.ndarray,
        encode: Callable[[], list[memoryview]],
        num_bytes: int | None = None,
    ) -> None:
        self.key = key
        self.info = info
        self.payload = payload.view()
        self.payload.flags.writeable = False
        self.num_bytes = payload.nbytes if num_bytes is None else num_bytes
        self._encode = encode
        self._parts: list[memoryview] | None = None
        self._lock = threading.Lock()

    def parts(self) -> list[memoryview]:
        """The value, as parts to write one after the other. *raises:* SegmentError: a payload of the wrong size."""
        with self._lock:
            if self._parts is None:
                self._parts = self._encode()
            return self._parts


@dataclass(frozen=True)
class TierCounts:
    """One tier's counts since the start, in segments; segments, bytes and waiting_bytes are current.

    `LLM.stats()["tiers"]`, the report and the metrics use these names. segments, bytes: in the whole tier, -1 if
    unknown. hits, misses: of loads; loaded_bytes: of the hits. skipped: calls not made during the pause after a
    failure. not_asked: requests that it was not asked for, because its look-ups take too long; not_loaded: prompts that
    it had and that were computed, because that was expected to be faster. stored, stored_bytes: accepted stores;
    promoted: those from a lower tier. refused: stores that the tier declined. dropped: stores that found the queue
    full, or that `close` gave up. damaged: values that failed their check. failures: calls that raised. evicted: by the
    tier, for lack of room. latency_s, bytes_per_s: recent
    measurements, 0 before the first.
    """

    name: str
    segments: int
    bytes: int
    waiting_bytes: int
    hits: int
    misses: int
    skipped: int
    not_asked: int
    not_loaded: int
    loaded_bytes: int
    stored: int
    stored_bytes: int
    promoted: int
    refused: int
    dropped: int
    damaged: int
    failures: int
    evicted: int
    latency_s: float
    bytes_per_s: float


class TierWorker:
    """See the module's text. num_threads: 1, or 0 to store inside the call. changes: receives values stored and lost.

    check_finite: only for a tier that does not read in place.
    """

    def __init__(
        self,
        tier: Tier,
        num_threads: int,
        max_bytes: int,
        clock: Callable[[], float],
        changes: TierChanges,
        *,
        check_finite: bool = False,
    ) -> None:
        self.tier = tier
        self._check_finite = check_finite
        self.name = tier.name
        self.writer = Workers(f"quire-{tier.name}", num_threads, max_bytes, nice=_NICE)
        self._clock = clock
        self._changes = changes
        self._lock = threading.Lock()
        self._round_trip, self._loading = (
            Throughput(),
            Throughput(),
        )  # seconds of a call; of a byte, checks and delivery included
        self._counts: dict[str, int] = dict.fromkeys(_COUNTED, 0)
        self._waiting: dict[bytes, OutgoingSegment] = {}  # queued stores, by key
        self._refused: bytes | None = None  # the key of the last store that the tier declined
        self._logged: set[tuple[str, ...]] = set()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key True if the tier has it, or it is queued; False for the others if the tier fails."""
        seen = self._changes.mark()
        with self._lock:
            found = {key for key in keys if key in self._waiting}
        rest = [key for key in keys if key not in found]
        if rest or not keys:
            started = self._clock()
            there = self._guard("contains", lambda: self._contains_each(rest))
            if there is not None:
                found.update(key for key, is_there in zip(rest, there, strict=True) if is_there)
                with self._lock:
                    self._round_trip.add(self._clock() - started)
                if self._changes.is_recording:
                    absent = [key for key in rest if key not in found]
                    self._changes.add_lost(self.name, absent, "missing", seen)
        return [key in found for key in keys]

    def _contains_each(self, keys: Sequence[bytes]) -> list[bool]:
        found = [bool(there) for there in self.tier.contains(keys)]
        if len(found) != len(keys):
            raise ValueError(f"expected an answer for each of {len(keys)} keys, got {len(found)}")
        return found

    def fetch(self, key: SegmentKey, layout: Layout) -> Fetched | None:
        """A segment, verified; None: a miss."""
        seen = self._changes.mark()
        with self._lock:
            queued = self._waiting.get(key.hash)
        if queued is not None and queued.payload.nbytes == layout.num_bytes(len(key.tokens)):  # L3
            self.count("hits")
            self.count("loaded_bytes", queued.payload.nbytes)
            return Fetched(queued.payload, queued.num_bytes, queued.parts, was_queued=True)
        try:
            value = self.tier.load(key.hash)
        except Exception as error:
            self.report_failure("load", error)
            if not isinstance(error, UnavailableError):
                self.count("misses")
            if isinstance(error, DamagedError):
                self._changes.add_lost(self.name, (key.hash,), "damaged", seen)
            return None
        if value is None:
            self.count("misses")
            self._changes.add_lost(self.name, (key.hash,), "missing", seen)
            return None
        return self._verify(key, value, layout, seen)

    def fetch_leading(self, keys: Sequence[SegmentKey], layout: Layout) -> list[Fetched]:
        """`fetch` of leading segments, as many as the tier loads at once; empty: the first is a miss."""
        with self._lock:
            is_waiting = any(key.hash in self._waiting for key in keys)
        if len(keys) > 1 and isinstance(self.tier, LoadsMany) and not is_waiting:
            seen = self._changes.mark()
            values: list[memoryview] = []
            try:
                values = self.tier.load_many([key.hash for key in keys])
            except Exception as error:
                self.report_failure("load", error)  # the rest is loaded one by one
            found: list[Fetched] = []
            for key, value in zip(keys, values, strict=False):
                fetched = self._verify(key, value, layout, seen)
                if fetched is None:
                    return found
                found.append(fetched)
            if found:
                return found
        fetched = self.fetch(keys[0], layout)
        return [] if fetched is None else [fetched]

    def fetch_in_place(
        self,
        keys: Sequence[SegmentKey],
        layout: Layout,
        writing: AbstractContextManager[bool],
        place: Callable[[int], Sequence[Any] | None],
    ) -> int:
        """Reads leading segments into the caller's buffers; how many are there and verified. Then try `fetch_leading`.

        writing: context in which `place(index)` may be called for a payload's buffers (None: none) and these written.
        """
        with self._lock:
            is_waiting = any(key.hash in self._waiting for key in keys)
        if is_waiting or not isinstance(self.tier, LoadsInPlace):
            return 0
        seen = self._changes.mark()
        hashes = [key.hash for key in keys]
        try:
            located = self.tier.locate(hashes)
            with writing as is_wanted:
                count = self._read_now(keys, located, place, layout) if is_wanted else 0
            count = self.tier.confirm(hashes, located[:count]) if count else 0
        except Exception as error:
            self.report_failure("load", error)
            return 0
        self.count("hits", count)
        self.count("loaded_bytes", sum(layout.num_bytes(len(key.tokens)) for key in keys[:count]))
        for key in keys[:count]:
            self._changes.add_stored(self.name, key, seen)
        return count

    def _read_now(
        self,
        keys: Sequence[SegmentKey],
        located: Sequence[Any],
        place: Callable[[int], Sequence[Any] | None],
        layout: Layout,
    ) -> int:
        """Reads leading segments that need no waiting into their buffers; how many passed their check."""
        assert isinstance(self.tier, LoadsInPlace)
        parts: list[Sequence[Any]] = []
        while len(parts) < len(located) and (some := place(len(parts))) is not None:
            parts.append(some)
        read = self.tier.read_now(located[: len(parts)], parts)
        for count, (key, some, (front, digest)) in enumerate(zip(keys, parts, read, strict=False)):
            num_bytes = sum(map(len, some))
            try:
                check_parts(
                    front,
                    num_bytes,
                    digest,
                    key=key.hash,
                    tokens=key.tokens,
                    start=key.start,
                    layout=layout,
                )
            except SegmentError:
                return count  # `fetch` counts it and removes it
        return len(read)

    def _verify(self, key: SegmentKey, value: Any, layout: Layout, seen: int) -> Fetched | None:
        """A tier's value as `Fetched`, if it is the segment (L2); else None, a miss."""
        payload = self._verified_payload(key, value, layout, seen)
        if payload is None:
            self.count("misses")
            return None
        self.count("hits")
        self.count("loaded_bytes", payload.nbytes)
        self._changes.add_stored(self.name, key, seen)
        view = memoryview(value).cast("B").toreadonly()
        return Fetched(payload, view.nbytes, partial(list, [view]))

    def _verified_payload(self, key: SegmentKey, value: Any, layout: Layout, seen: int) -> np.ndarray | None:
        """The verified payload of a value; None: the value was damaged, and is counted and removed."""
        try:
            view = memoryview(value).cast("B").toreadonly()
            payload = decode(view, key=key.hash, tokens=key.tokens, start=key.start, layout=layout)
            if self._check_finite and not is_payload_finite(payload, layout):
                raise SegmentError("expected finite keys and values, got infinity or NaN among them")
            return payload
        except Exception as error:
            self.count("damaged")
            self._log_once(("damaged",), f"a value was refused and removed: {error}")
            self._guard("evict", lambda: self.tier.evict(key.hash))
            self._changes.add_lost(self.name, (key.hash,), "damaged", seen)
            return None

    @property
    def num_damaged(self) -> int:
        """Values that have failed their check."""
        return self._counts["damaged"]

    def remove_if_damaged(self, key: SegmentKey, layout: Layout) -> None:
        """Checks a value outside of any load; counts and removes it if it is damaged."""
        seen = self._changes.mark()
        value = self._guard("load", lambda: self.tier.load(key.hash))
        if value is not None:
            self._verified_payload(key, value, layout, seen)

    def add_load_time(self, num_bytes: int, seconds: float) -> None:
        """Adds the seconds of a load, delivery included, to the throughput."""
        with self._lock:
            self._loading.add(seconds, num_bytes)

    def store(self, outgoing: OutgoingSegment, *, promoted: bool = False) -> bool:
        """Queues a store; True if it is queued, now or already. A full queue drops it."""
        value_key, cache_priority = outgoing.key.hash, outgoing.info.cache_priority
        with self._lock:
            queued = self._waiting.get(value_key)
            if queued is not None and queued.info.cache_priority >= cache_priority:
                return True
            self._waiting[value_key] = outgoing
        if self.writer.submit(lambda: self._store_now(outgoing, promoted), outgoing.num_bytes):
            return True
        with self._lock:
            if queued is not None:
                self._waiting[value_key] = queued  # the earlier store, with the lower cache priority
            else:
                self._waiting.pop(value_key, None)
        self.count("dropped")
        return False

    def _store_now(self, outgoing: OutgoingSegment, promoted: bool) -> None:
        key = outgoing.key.hash
        seen = self._changes.mark()
        try:
            if outgoing.key.parent == self._refused:
                # A tier too small for a chain would evict its head for its tail, segment after segment.
                is_stored = False
            else:
                is_stored = self._guard(
                    "store", lambda: bool(self.tier.store(key, outgoing.parts(), outgoing.info))
                )
        finally:
            with self._lock:
                if self._waiting.get(key) is outgoing:  # else it is queued again with a higher cache priority
                    del self._waiting[key]
        if is_stored:
            if self._refused == key:
                self._refused = None  # there is room again, also for the segments behind it
            self.count("stored")
            self.count("stored_bytes", outgoing.num_bytes)
            self.count("promoted", int(promoted))
            self._changes.add_stored(self.name, outgoing.key, seen)
        elif is_stored is not None:
            self._refused = key
            self.count("refused")

    def submit(self, operation: str, job: Callable[[], Any]) -> None:
        """Queues another job of the tier, after the stores that wait and before later ones."""
        self.writer.submit(lambda: self._guard(operation, job))

    def evict(self, keys: Sequence[bytes]) -> None:
        """Queues the removal of values, behind the stores that wait."""
        self.writer.submit(lambda: self._evict_now(keys))

    def evict_chosen(
        self,
        roots: Sequence[bytes],
        choose: Callable[[Sequence[tuple[bytes, SegmentInfo]]], Collection[bytes]],
    ) -> None:
        """As `evict`, for the keys that `choose` names, given `contents` then."""
        self.writer.submit(lambda: self._evict_now(choose(self.contents(roots))))

    def _evict_now(self, keys: Collection[bytes]) -> None:
        for key in keys:
            if self._guard("evict", partial(self.tier.evict, key)) is not None:
                self._changes.add_lost(self.name, (key,), "dropped")

    def contents(self, roots: Sequence[bytes]) -> list[tuple[bytes, SegmentInfo]]:
        """See `Tier.contents`; empty if the tier fails."""
        return self._guard("list", lambda: self.tier.contents(roots)) or []

    def count(self, counter: str, by: int = 1) -> None:
        with self._lock:
            self._counts[counter] += by

    def estimate_seconds(self, num_bytes: int, num_turns: int) -> float | None:
        """Expected seconds of a load; before the first those of a look-up for each turn; None before that."""
        with self._lock:
            each, round_trip = self._loading.seconds_each, self._round_trip.seconds_each
            if each is None:
                return None if round_trip is None else round_trip * num_turns
            return (round_trip or 0.0) + each * num_bytes

    @property
    def round_trip_s(self) -> float:
        """Recent seconds of a look-up; 0.0 before the first."""
        return self._round_trip.seconds_each or 0.0

    @property
    def num_unanswered(self) -> int:
        """Calls that failed, or were skipped after a failure."""
        with self._lock:
            return self._counts["failures"] + self._counts["skipped"]

    def stats(self) -> TierCounts:
        stats = self._guard("stats", self.tier.stats) or TierStats(num_values=-1, num_bytes=-1)
        with self._lock:
            return TierCounts(
                name=self.name,
                segments=stats.num_values,
                bytes=stats.num_bytes,
                evicted=stats.evicted,
                waiting_bytes=self.writer.num_bytes,
                latency_s=self._round_trip.seconds_each or 0.0,
                bytes_per_s=1 / each if (each := self._loading.seconds_each) else 0.0,
                **self._counts,
            )

    def close(self, timeout: float | None) -> bool:
        """Finishes the queued stores, or drops and counts them; closes the tier. True if none was dropped."""
        in_time, num_given_up = self.writer.close(timeout)
        with self._lock:
            self._waiting.clear()
        self.count("dropped", num_given_up)
        self._guard("close", self.tier.close)
        return in_time

    def report_failure(self, operation: str, error: Exception) -> None:
        """Counts an error, and logs it if it is the first of its kind."""
        if isinstance(error, UnavailableError):
            self.count("skipped")
            return
        self.count("damaged" if isinstance(error, DamagedError) else "failures")
        cause = error.__cause__ or error
        kind = (operation, type(error).__name__, type(cause).__name__, str(getattr(cause, "errno", "")))
        self._log_once(kind, f"{operation} failed: {error or type(error).__name__}")

    def _guard(self, operation: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            self.report_failure(operation, error)
            return None

    def _log_once(self, kind: tuple[str, ...], text: str) -> None:
        with self._lock:
            if kind in self._logged:
                return
            self._logged.add(kind)
        line = " ".join(text.split())[:400]
        _log.warning(
            "%s tier: %s (service goes on; further ones of this kind are counted, not logged)",
            self.name,
            line,
        )
