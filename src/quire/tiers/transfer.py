"""`Lookup` and `Load`: handles of a request to a stack of tiers that is under way.

Invariants
    X1  a handle ends exactly once, with one outcome. Its results can be read before `done` is set and `on_done` called.
    X2  once `Load.cancel` has returned, `into` is not running and is never called again, and nothing is written to
        `places`: the memory that they wrote to may be freed.
    X3  a load delivers whole, verified segments of its chain, several at a time and these in any order. It ends at the
        first segment that no tier has. The leading `num_loaded` segments are there, whatever the outcome; segments
        delivered behind them do not count.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from quire.tiers.segment import Layout
from quire.tiers.segment_key import SegmentKey

__all__ = ["Load", "Lookup", "Outcome"]

_log = logging.getLogger("quire")
_Handle = TypeVar("_Handle", bound="TransferHandle")

Outcome = Literal["complete", "missing", "cancelled", "closed", "failed"]


class TransferHandle(Generic[_Handle]):
    """A transfer that ends once; any thread may wait for it."""

    def __init__(self, on_end: Callable[[_Handle], None], on_done: Callable[[_Handle], None] | None) -> None:
        self.done = threading.Event()
        self.outcome: Outcome | None = None
        self._on_end = on_end  # the stack's bookkeeping, before the end is visible
        self._on_done = on_done
        self._lock = threading.Lock()

    def wait(self, timeout: float | None = None) -> bool:
        """True if it has ended within `timeout` seconds (None: no limit)."""
        return self.done.wait(timeout)

    def _end(self, outcome: Outcome) -> bool:
        """Ends it; False if it had ended before. `on_done` runs in the calling thread."""
        with self._lock:
            if self.outcome is not None:
                return False
            self.outcome = outcome
        self._on_end(self)  # type: ignore[arg-type]
        self.done.set()
        if self._on_done is not None:
            try:
                self._on_done(self)  # type: ignore[arg-type]
            except Exception:
                _log.exception("on_done of a %s failed", type(self).__name__.lower())
        return True


class Lookup(TransferHandle["Lookup"]):
    """How much of a chain of keys the tiers have. Read the results when `done` is set.

    tiers: for each key the name of the topmost tier that has it, or None. leading_tiers: the same for the leading keys
        up to the first that no tier has. num_leading: by tier asked, how many leading keys it has by itself.
        current_tier: the tier asked last, also while the lookup runs; None before its turn. seconds: by tier asked.
    """

    def __init__(
        self,
        keys: Sequence[bytes],
        on_end: Callable[[Lookup], None],
        on_done: Callable[[Lookup], None] | None,
    ) -> None:
        super().__init__(on_end, on_done)
        self.keys = tuple(keys)
        self.tiers: tuple[str | None, ...] = (None,) * len(self.keys)
        self.leading_tiers: tuple[str, ...] = ()
        self.num_leading: dict[str, int] = {}
        self.current_tier: str | None = None
        self.seconds: dict[str, float] = {}

    @property
    def num_found(self) -> int:
        """Leading keys that some tier has."""
        return len(self.leading_tiers)


class Load(TransferHandle["Load"]):
    """Segments on their way up. Any thread may read the attributes at any time.

    outcome: None while it runs; "complete"; "missing": the segment `num_loaded` is in no tier (or failed its check in
        all); "cancelled"; "closed": the stack was closed; "failed": `into` raised, see `error`.
    bytes_total, bytes_done: of payload. tiers: for each segment loaded the name of the tier that had it.
    payloads: without `into`, the payloads of the segments loaded, uint8, read-only.
    """

    def __init__(
        self,
        chain: Sequence[SegmentKey],
        layout: Layout,
        into: Callable[[int, np.ndarray], None] | None,
        places: Callable[[int], Sequence[Any] | None] | None,
        on_end: Callable[[Load], None],
        on_done: Callable[[Load], None] | None,
    ) -> None:
        super().__init__(on_end, on_done)
        self.chain = tuple(chain)
        self.layout = layout
        self.bytes_total = sum(layout.num_bytes(len(key.tokens)) for key in self.chain)
        self.bytes_done = 0
        self.tiers: list[str] = []
        self.payloads: list[np.ndarray] = []
        self.error: Exception | None = None
        self._into = into
        self._places = places
        self._next = 0  # the first segment in no batch yet
        self._stop = len(self.chain)  # the load ends here, with this outcome
        self._stop_outcome: Outcome = "complete"
        self._arrived: dict[int, tuple[str, int, np.ndarray | None]] = {}  # delivered behind a gap
        self._writing: set[int] = set()  # ids of threads that write
        self._written = threading.Condition(self._lock)  # `_writing` has changed
        self._ending = False

    @property
    def num_loaded(self) -> int:
        """Leading segments delivered."""
        return len(self.tiers)

    @property
    def num_tokens(self) -> int:
        """Tokens of the segments loaded."""
        return sum(len(key.tokens) for key in self.chain[: self.num_loaded])

    def cancel(self) -> bool:
        """Ends the load now, even while a tier is reading; False if it had ended. Waits only for writes under way
        (`into`, `places`), which wait for no medium; if called from an `into`, not for that one."""
        return self._end("cancelled")

    def _end(self, outcome: Outcome) -> bool:
        with self._written:
            self._ending = True  # no new write begins
            if threading.get_ident() not in self._writing:
                self._written.wait_for(lambda: not self._writing)  # X2
        return super()._end(outcome)

    def _next_batch(self, max_bytes: int, num_batches: int) -> range:
        """The next segments to fetch and deliver: up to `max_bytes` of payload, at least one segment.

        Batches are smaller towards the end, to keep all workers busy, but large enough to make their start cheap.
        """
        with self._lock:
            first = self._next
            if self._ending or first >= self._stop:
                return range(0)
            share = first + (self._stop - first) // (2 * num_batches)
            num_bytes = 0
            while self._next < self._stop:
                num_bytes += self.layout.num_bytes(len(self.chain[self._next].tokens))
                if self._next > first and num_bytes > (max_bytes if self._next < share else max_bytes // 8):
                    break
                self._next += 1
            return range(first, self._next)

    def _deliver(self, index: int, payload: np.ndarray, tier: str) -> bool:
        """Hands a fetched segment over; False if it is not wanted or `into` raised. Call `_end_if_delivered` then."""
        try:
            with self._writing_from(index) as is_wanted:
                if not is_wanted:
                    return False
                if self._into is not None:
                    self._into(index, payload)
                self._add_arrived(index, payload.nbytes, tier, None if self._into else payload)
        except Exception as error:
            _log.error("a load ended because the receiver of its segments failed: %r", error)
            self._limit(index, "failed", error)
            return False
        return True

    @contextmanager
    def _writing_from(self, index: int) -> Iterator[bool]:
        """Registers a write, for which `cancel` waits (X2). Yields whether segments from this one on are wanted."""
        with self._lock:
            is_wanted = not self._ending and index < self._stop
            if is_wanted:
                self._writing.add(threading.get_ident())
        try:
            yield is_wanted
        finally:
            with self._written:
                self._writing.discard(threading.get_ident())
                self._written.notify_all()

    def _place(self, index: int) -> Sequence[Any] | None:
        """Buffers for a segment's payload, within `_writing_from`; None: there are none, or the load is ending."""
        return None if self._places is None or self._ending else self._places(index)

    def _add_arrived(self, index: int, num_bytes: int, tier: str, payload: np.ndarray | None = None) -> None:
        """Notes that a segment is in place; does nothing if the load has ended meanwhile."""
        with self._lock:
            if self.outcome is not None:
                return
            self._arrived[index] = (tier, num_bytes, payload)
            self._count_leading()

    def _count_leading(self) -> None:
        """Counts the arrived segments that follow the leading ones without a gap."""
        while (arrived := self._arrived.pop(len(self.tiers), None)) is not None:
            tier, num_bytes, payload = arrived
            if payload is not None:
                self.payloads.append(payload)
            self.bytes_done += num_bytes
            self.tiers.append(tier)

    def _limit(self, index: int, outcome: Outcome, error: Exception | None = None) -> None:
        """Ends the load at this segment, with `outcome`, once the segments before it are delivered."""
        with self._lock:
            if index < self._stop:
                self._stop, self._stop_outcome, self.error = index, outcome, error

    def _end_if_delivered(self) -> None:
        """Ends the load if all segments before its end have been delivered."""
        if self.num_loaded >= self._stop:
            self._end(self._stop_outcome)
