"""What somebody who asked a stack of tiers for something holds: a lookup or a load under way.

Invariants
    X1  it ends exactly once, with one outcome; `done` is set and `on_done` called then, and never before its results
        can be read.
    X2  once `Load.cancel` has returned, `into` is not running and is never called again, nor is anything written to
        `places`: what they wrote to may be freed.
    X3  a load delivers segments of its chain, each whole and verified, several at a time and in any order among those;
        it ends at the first that no tier has. `num_loaded` leading ones are there, whatever the outcome; what was
        delivered behind them counts for nothing.
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
_Self = TypeVar("_Self", bound="_Handle")

Outcome = Literal["complete", "missing", "cancelled", "closed", "failed"]


class _Handle(Generic[_Self]):
    """Ends once; may be waited for from any thread."""

    def __init__(self, on_end: Callable[[_Self], None], on_done: Callable[[_Self], None] | None) -> None:
        self.done = threading.Event()
        self.outcome: Outcome | None = None
        self._on_end = on_end  # the stack's book-keeping, before anybody can see the end
        self._on_done = on_done
        self._lock = threading.Lock()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it has ended within `timeout` seconds (None: however long it takes)."""
        return self.done.wait(timeout)

    def _end(self, outcome: Outcome) -> bool:
        """Ends it, unless it has ended before; whether it did. `on_done` runs in the calling thread."""
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


class Lookup(_Handle["Lookup"]):
    """How far tiers have a chain of keys. Read the results when `done` is set.

    found: for each key the name of the topmost tier that has it, None where none has. where: the same of the leading
        keys; ends before the first key that none has. by_tier: how many leading keys each tier that was asked has on
        its own. asked: the tier that was asked last, also while it is under way; None before its turn.
    """

    def __init__(
        self,
        keys: Sequence[bytes],
        on_end: Callable[[Lookup], None],
        on_done: Callable[[Lookup], None] | None,
    ) -> None:
        super().__init__(on_end, on_done)
        self.keys = tuple(keys)
        self.found: tuple[str | None, ...] = (None,) * len(self.keys)
        self.where: tuple[str, ...] = ()
        self.by_tier: dict[str, int] = {}
        self.asked: str | None = None

    @property
    def num_found(self) -> int:
        """Leading keys that can be loaded from one tier or another."""
        return len(self.where)


class Load(_Handle["Load"]):
    """Segments on their way up. All but `cancel` and `wait` are for reading, at any time, from any thread.

    outcome: None while it runs; "complete"; "missing": the segment `num_loaded` is in no tier (or failed its check in
        all); "cancelled"; "closed": the stack was; "failed": `into` raised, see `error`.
    bytes_total, bytes_done: of payload. tiers: the name of the tier that gave each segment loaded.
    payloads: of the segments loaded, uint8, read-only, where no `into` was given.
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
        self.bytes_total = sum(layout.num_bytes(len(name.tokens)) for name in self.chain)
        self.bytes_done = 0
        self.tiers: list[str] = []
        self.payloads: list[np.ndarray] = []
        self.error: Exception | None = None
        self._into = into
        self._places = places
        self._next = 0  # the first segment that nobody has taken
        self._stop = len(self.chain)  # where it ends, as
        self._stop_outcome: Outcome = "complete"
        self._arrived: dict[int, tuple[str, int, np.ndarray | None]] = {}  # delivered, behind one that is not
        self._writing: set[int] = set()  # threads that `into` runs in
        self._written = threading.Condition(self._lock)  # of the one above
        self._ending = False

    @property
    def num_loaded(self) -> int:
        """Leading segments delivered."""
        return len(self.tiers)

    @property
    def num_tokens(self) -> int:
        """Tokens of the segments loaded."""
        return sum(len(name.tokens) for name in self.chain[: self.num_loaded])

    def cancel(self) -> bool:
        """Ends it now, whatever a tier still does; whether it was still under way. Waits for what is being written only
        (`into`, `places`), which waits for no medium; from within an `into` for nothing, and that does not count."""
        return self._end("cancelled")

    def _end(self, outcome: Outcome) -> bool:
        with self._written:
            self._ending = True  # nobody begins to write any more
            if threading.get_ident() not in self._writing:
                self._written.wait_for(lambda: not self._writing)  # X2
        return super()._end(outcome)

    def _take(self, max_bytes: int, num_batches: int) -> range:
        """The next segments to be fetched and delivered, of `max_bytes` of payload together or one alone.

        Fewer towards the end, so that all workers have something to do until then, but not so few that beginning
        a batch takes long beside them.
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
        """Hands a segment over that was taken; False where nobody wants it, or `into` raised. `_settle` is due then."""
        try:
            with self._writing_from(index) as is_wanted:
                if not is_wanted:
                    return False
                if self._into is not None:
                    self._into(index, payload)
                self._arrive(index, payload.nbytes, tier, None if self._into else payload)
        except Exception as error:
            _log.error("a load ended, as what takes its segments failed: %r", error)
            self._stop_at(index, "failed", error)
            return False
        return True

    @contextmanager
    def _writing_from(self, index: int) -> Iterator[bool]:
        """What is written within has ended when `cancel` returns (X2). Whether segments from this one on are wanted."""
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
        """Where a segment's payload goes, within `_writing_from`; None: nowhere, or somebody waits for our end."""
        return None if self._places is None or self._ending else self._places(index)

    def _arrive(self, index: int, num_bytes: int, tier: str, payload: np.ndarray | None = None) -> None:
        """A segment is where it is wanted; nothing happens where the load has ended meanwhile."""
        with self._lock:
            if self.outcome is not None:
                return
            self._arrived[index] = (tier, num_bytes, payload)
            self._count()

    def _count(self) -> None:
        """Counts what lies behind the leading segments without a hole."""
        while (arrived := self._arrived.pop(len(self.tiers), None)) is not None:
            tier, num_bytes, payload = arrived
            if payload is not None:
                self.payloads.append(payload)
            self.bytes_done += num_bytes
            self.tiers.append(tier)

    def _stop_at(self, index: int, outcome: Outcome, error: Exception | None = None) -> None:
        """It will not get beyond this segment; those before it are still delivered."""
        with self._lock:
            if index < self._stop:
                self._stop, self._stop_outcome, self.error = index, outcome, error

    def _settle(self) -> None:
        """Ends it where all has been delivered that will be."""
        if self.num_loaded >= self._stop:
            self._end(self._stop_outcome)
