"""One tier as the stack uses it: every call guarded, counted and timed, with a queue of its own for what is stored.

Where a tier is filled by others (`check_finite`), a value whose keys and values are not all finite counts as damaged.

Invariants
    L1  no call raises, whatever the tier does: a failure is False or None, counted, and logged once per kind.
    L2  `fetch` returns only what `segment.decode` has verified, or what was handed in and waits to be stored; a value
        that fails its check is removed and counted.
    L3  from `store` on a value can be found and fetched: while it waits in the queue from there, however slow the tier.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
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
_LOADS = ("hits", "misses", "skipped", "loaded_bytes")
_STORES = ("stored", "stored_bytes", "promoted", "refused", "dropped")
_COUNTED = (*_LOADS, *_STORES, "damaged", "failures")


@dataclass(frozen=True, eq=False)
class Fetched:
    """payload: uint8, read-only. num_bytes, make: of the whole value. was_queued: not asked of the tier itself."""

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
        name: SegmentKey,
        info: SegmentInfo,
        payload: np.ndarray,
        encode: Callable[[], list[memoryview]],
        num_bytes: int | None = None,
    ) -> None:
        self.name = name
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
    """One tier's counts since the start, in segments; segments, bytes and waiting_bytes are now.

    These names are those of `LLM.stats()["tiers"]`, the report and the metrics. segments, bytes: of all of the tier,
    -1 where it cannot say. hits, misses: of loads; loaded_bytes: of the hits. skipped: calls not made, as the
    tier is given a rest after a failure. stored, stored_bytes: what it took; promoted: of that, what a lower one gave.
    refused: stores the tier said no to. dropped: stores that found the queue full, or were given up by `close`.
    damaged: values that failed their check. failures: calls that did. evicted: by the tier, for want of room.
    latency_s, bytes_per_s: measured lately, 0 before.
    """

    name: str
    segments: int
    bytes: int
    waiting_bytes: int
    hits: int
    misses: int
    skipped: int
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
    """See the module's text. num_threads: 1, or 0 for everything inline. notices: are told what it has, and has not.

    check_finite: of a tier that does not read in place.
    """

    def __init__(
        self,
        tier: Tier,
        num_threads: int,
        max_bytes: int,
        clock: Callable[[], float],
        notices: TierChanges,
        *,
        check_finite: bool = False,
    ) -> None:
        self.tier = tier
        self._check_finite = check_finite
        self.name = tier.name
        self.writer = Workers(f"quire-{tier.name}", num_threads, max_bytes, nice=_NICE)
        self._clock = clock
        self._notices = notices
        self._lock = threading.Lock()
        self._round_trip, self._loading = (
            Throughput(),
            Throughput(),
        )  # each; of a byte, checks and delivery included
        self._counts: dict[str, int] = dict.fromkeys(_COUNTED, 0)
        self._waiting: dict[bytes, OutgoingSegment] = {}  # what is queued
        self._refused: bytes | None = None  # the last one the tier said no to
        self._logged: set[tuple[str, ...]] = set()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of them are there, or queued; of the others none where the tier fails."""
        seen = self._notices.mark()
        with self._lock:
            found = {key for key in keys if key in self._waiting}
        rest = [key for key in keys if key not in found]
        if rest or not keys:
            started = self._clock()
            there = self._guard("contains", lambda: self._ask(rest))
            if there is not None:
                found.update(key for key, is_there in zip(rest, there, strict=True) if is_there)
                with self._lock:
                    self._round_trip.add(self._clock() - started)
                if self._notices.is_on:
                    absent = [key for key in rest if key not in found]
                    self._notices.gone(self.name, absent, "missing", seen)
        return [key in found for key in keys]

    def _ask(self, keys: Sequence[bytes]) -> list[bool]:
        found = [bool(there) for there in self.tier.contains(keys)]
        if len(found) != len(keys):
            raise ValueError(f"expected an answer for each of {len(keys)} keys, got {len(found)}")
        return found

    def fetch(self, name: SegmentKey, layout: Layout) -> Fetched | None:
        """A segment, verified; None: a miss."""
        seen = self._notices.mark()
        with self._lock:
            queued = self._waiting.get(name.key)
        if queued is not None and queued.payload.nbytes == layout.num_bytes(len(name.tokens)):  # L3
            self.count("hits")
            self.count("loaded_bytes", queued.payload.nbytes)
            return Fetched(queued.payload, queued.num_bytes, queued.parts, was_queued=True)
        try:
            value = self.tier.load(name.key)
        except Exception as error:
            self.report_failure("load", error)
            if not isinstance(error, UnavailableError):
                self.count("misses")
            if isinstance(error, DamagedError):
                self._notices.gone(self.name, (name.key,), "damaged", seen)
            return None
        if value is None:
            self.count("misses")
            self._notices.gone(self.name, (name.key,), "missing", seen)
            return None
        return self._checked(name, value, layout, seen)

    def fetch_some(self, names: Sequence[SegmentKey], layout: Layout) -> list[Fetched]:
        """`fetch` of the leading ones, of as many as the tier gives at once; none: the first is a miss."""
        with self._lock:
            is_waiting = any(name.key in self._waiting for name in names)
        if len(names) > 1 and isinstance(self.tier, LoadsMany) and not is_waiting:
            seen = self._notices.mark()
            values: list[memoryview] = []
            try:
                values = self.tier.load_many([name.key for name in names])
            except Exception as error:
                self.report_failure("load", error)  # and one by one, as far as that goes
            found: list[Fetched] = []
            for name, value in zip(names, values, strict=False):
                fetched = self._checked(name, value, layout, seen)
                if fetched is None:
                    return found
                found.append(fetched)
            if found:
                return found
        fetched = self.fetch(names[0], layout)
        return [] if fetched is None else [fetched]

    def fetch_in_place(
        self,
        names: Sequence[SegmentKey],
        layout: Layout,
        writing: AbstractContextManager[bool],
        place: Callable[[int], Sequence[Any] | None],
    ) -> int:
        """How many of the leading ones lie where they are wanted now, verified; `fetch_some` tells of the next.

        writing: within it `place` may be asked where the payload of each goes (None: nowhere), and that be written to.
        """
        with self._lock:
            is_waiting = any(name.key in self._waiting for name in names)
        if is_waiting or not isinstance(self.tier, LoadsInPlace):
            return 0
        seen = self._notices.mark()
        keys = [name.key for name in names]
        try:
            located = self.tier.locate(keys)
            with writing as is_wanted:
                count = self._read_now(names, located, place, layout) if is_wanted else 0
            count = self.tier.confirm(keys, located[:count]) if count else 0
        except Exception as error:
            self.report_failure("load", error)
            return 0
        self.count("hits", count)
        self.count("loaded_bytes", sum(layout.num_bytes(len(name.tokens)) for name in names[:count]))
        for name in names[:count]:
            self._notices.held(self.name, name, seen)
        return count

    def _read_now(
        self,
        names: Sequence[SegmentKey],
        located: Sequence[Any],
        place: Callable[[int], Sequence[Any] | None],
        layout: Layout,
    ) -> int:
        """How many of the leading segments were at hand, are where they are wanted, and are whole."""
        assert isinstance(self.tier, LoadsInPlace)
        parts: list[Sequence[Any]] = []
        while len(parts) < len(located) and (some := place(len(parts))) is not None:
            parts.append(some)
        read = self.tier.read_now(located[: len(parts)], parts)
        for count, (name, some, (front, digest)) in enumerate(zip(names, parts, read, strict=False)):
            num_bytes = sum(map(len, some))
            try:
                check_parts(
                    front,
                    num_bytes,
                    digest,
                    key=name.key,
                    tokens=name.tokens,
                    start=name.start,
                    layout=layout,
                )
            except SegmentError:
                return count  # `fetch` sees it too, counts it and has it removed
        return len(read)

    def _checked(self, name: SegmentKey, value: Any, layout: Layout, seen: int) -> Fetched | None:
        """What a tier gave, if it is the segment (L2)."""
        payload = self._payload(name, value, layout, seen)
        if payload is None:
            self.count("misses")
            return None
        self.count("hits")
        self.count("loaded_bytes", payload.nbytes)
        self._notices.held(self.name, name, seen)
        view = memoryview(value).cast("B").toreadonly()
        return Fetched(payload, view.nbytes, partial(list, [view]))

    def _payload(self, name: SegmentKey, value: Any, layout: Layout, seen: int) -> np.ndarray | None:
        """What is in a value, verified; None: it was damaged, which is counted, and is removed."""
        try:
            view = memoryview(value).cast("B").toreadonly()
            payload = decode(view, key=name.key, tokens=name.tokens, start=name.start, layout=layout)
            if self._check_finite and not is_payload_finite(payload, layout):
                raise SegmentError("expected finite keys and values, got infinity or NaN among them")
            return payload
        except Exception as error:
            self.count("damaged")
            self._log_once(("damaged",), f"a value was refused and removed: {error}")
            self._guard("evict", lambda: self.tier.evict(name.key))
            self._notices.gone(self.name, (name.key,), "damaged", seen)
            return None

    @property
    def num_damaged(self) -> int:
        """Values that failed their check so far."""
        return self._counts["damaged"]

    def remove_if_damaged(self, name: SegmentKey, layout: Layout) -> None:
        """Looks at a value that nobody waits for; what fails its check is counted and removed."""
        seen = self._notices.mark()
        value = self._guard("load", lambda: self.tier.load(name.key))
        if value is not None:
            self._payload(name, value, layout, seen)

    def loaded(self, num_bytes: int, seconds: float) -> None:
        """A load took so long, delivery included."""
        with self._lock:
            self._loading.add(seconds, num_bytes)

    def store(self, outgoing: OutgoingSegment, *, promoted: bool = False) -> bool:
        """Queues it; whether it is queued, now or already. A full queue drops it."""
        key, cache_priority = outgoing.name.key, outgoing.info.cache_priority
        with self._lock:
            queued = self._waiting.get(key)
            if queued is not None and queued.info.cache_priority >= cache_priority:
                return True
            self._waiting[key] = outgoing
        if self.writer.submit(lambda: self._store_now(outgoing, promoted), outgoing.num_bytes):
            return True
        with self._lock:
            if queued is not None:
                self._waiting[key] = queued  # with the lower cache priority, but there
            else:
                self._waiting.pop(key, None)
        self.count("dropped")
        return False

    def _store_now(self, outgoing: OutgoingSegment, promoted: bool) -> None:
        key = outgoing.name.key
        seen = self._notices.mark()
        try:
            if outgoing.name.parent == self._refused:
                # A tier too small for a chain would give up its head for the tail, segment after segment.
                kept = False
            else:
                kept = self._guard(
                    "store", lambda: bool(self.tier.store(key, outgoing.parts(), outgoing.info))
                )
        finally:
            with self._lock:
                if self._waiting.get(key) is outgoing:  # else it is queued once more, to be kept longer
                    del self._waiting[key]
        if kept:
            if self._refused == key:
                self._refused = None  # it has room for it now, and so for what continues it
            self.count("stored")
            self.count("stored_bytes", outgoing.num_bytes)
            self.count("promoted", int(promoted))
            self._notices.held(self.name, outgoing.name, seen)
        elif kept is not None:
            self._refused = key
            self.count("refused")

    def queue(self, operation: str, job: Callable[[], Any]) -> None:
        """Something else to be done with the tier, behind the stores that wait and before those that come."""
        self.writer.submit(lambda: self._guard(operation, job))

    def evict(self, keys: Sequence[bytes]) -> None:
        """Queues the removal of values, behind the stores that wait."""
        self.writer.submit(lambda: self._evict_now(keys))

    def _evict_now(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if self._guard("evict", partial(self.tier.evict, key)) is not None:
                self._notices.gone(self.name, (key,), "dropped")

    def contents(self, roots: Sequence[bytes]) -> list[tuple[bytes, SegmentInfo]]:
        """See `Tier.contents`; nothing where the tier fails."""
        return self._guard("list", lambda: self.tier.contents(roots)) or []

    def count(self, what: str, by: int = 1) -> None:
        with self._lock:
            self._counts[what] += by

    def seconds(self, num_bytes: int) -> float | None:
        with self._lock:
            each = self._loading.seconds_each
            return None if each is None else (self._round_trip.seconds_each or 0.0) + each * num_bytes

    @property
    def num_unanswered(self) -> int:
        """Calls that failed, or were not made as the tier is given a rest."""
        with self._lock:
            return self._counts["failures"] + self._counts["skipped"]

    def stats(self) -> TierCounts:
        own = self._guard("stats", self.tier.stats) or TierStats(num_values=-1, num_bytes=-1)
        with self._lock:
            return TierCounts(
                name=self.name,
                segments=own.num_values,
                bytes=own.num_bytes,
                evicted=own.evicted,
                waiting_bytes=self.writer.num_bytes,
                latency_s=self._round_trip.seconds_each or 0.0,
                bytes_per_s=1 / each if (each := self._loading.seconds_each) else 0.0,
                **self._counts,
            )

    def close(self, timeout: float | None) -> bool:
        """Ends what is queued, or gives it up and counts it; closes the tier. Whether nothing was left undone."""
        in_time, num_given_up = self.writer.close(timeout)
        with self._lock:
            self._waiting.clear()
        self.count("dropped", num_given_up)
        self._guard("close", self.tier.close)
        return in_time

    def report_failure(self, operation: str, error: Exception) -> None:
        """Counts what went wrong, and logs it if it is the first of its kind."""
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
            "%s tier: %s (service goes on; more of this kind is counted, not logged)", self.name, line
        )
