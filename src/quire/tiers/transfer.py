"""What somebody who asked a stack of tiers for something holds: a lookup or a load under way.

Invariants
    X1  it ends exactly once, with one outcome; `done` is set and `on_done` called then, and never before its results
        can be read.
    X2  once `Load.cancel` has returned, `into` is not running and is never called again: what it wrote to may be freed.
    X3  a load delivers the segments of its chain in order, each whole and verified, and stops at the first that no
        tier has: `num_loaded` of them are there, whatever the outcome.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Generic, Literal, TypeVar

import numpy as np

from quire.tiers.names import SegmentName

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
        # Held while `into` runs and while the end is decided; reentrant, as `into` itself may cancel.
        self._lock = threading.RLock()
        # Set before the lock is waited for: a lock is not fair, and the next segments might all go first.
        self._ending = False

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it has ended within `timeout` seconds (None: however long it takes)."""
        return self.done.wait(timeout)

    def _end(self, outcome: Outcome) -> bool:
        """Ends it, unless it has ended before; whether it did. `on_done` runs in the calling thread."""
        self._ending = True
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
        its own.
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
        chain: Sequence[SegmentName],
        bytes_per_token: int,
        into: Callable[[int, np.ndarray], None] | None,
        on_end: Callable[[Load], None],
        on_done: Callable[[Load], None] | None,
    ) -> None:
        super().__init__(on_end, on_done)
        self.chain = tuple(chain)
        self.bytes_total = bytes_per_token * sum(len(name.tokens) for name in self.chain)
        self.bytes_done = 0
        self.tiers: list[str] = []
        self.payloads: list[np.ndarray] = []
        self.error: Exception | None = None
        self._into = into

    @property
    def num_loaded(self) -> int:
        """Segments delivered."""
        return len(self.tiers)

    @property
    def num_tokens(self) -> int:
        """Tokens of the segments delivered."""
        return sum(len(name.tokens) for name in self.chain[: self.num_loaded])

    def cancel(self) -> bool:
        """Ends it now, whatever a tier still does; whether it was still under way. Waits for a running `into` only."""
        return self._end("cancelled")

    def _deliver(self, payload: np.ndarray, tier: str) -> bool:
        """Hands the next segment over; False where the load has ended meanwhile, or ends here because `into` raised."""
        with self._lock:
            if self._ending:
                return False
            try:
                if self._into is None:
                    self.payloads.append(payload)
                else:
                    self._into(self.num_loaded, payload)
            except Exception as error:
                self.error = error
            else:
                self.bytes_done += payload.nbytes
                self.tiers.append(tier)
                return not self._ending  # `into` may have cancelled
        _log.error("a load ended, as what takes its segments failed: %r", self.error)
        self._end("failed")
        return False
