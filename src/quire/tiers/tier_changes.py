"""What tiers have come to hold and have lost: told by whatever thread saw it, taken by one, in one order.

Nothing is kept while nobody listens (`is_on`), and a call costs one look at a flag then.

Invariants
    N1  notices are numbered, and taken in the order of their numbers. A tier tells of what it gives up while it does
        so; who says that a value is there, or is not, says as of which number (`mark`, before the tier was asked), so
        that whoever takes the notices does not undo by it what has changed since.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.tiers.segment_key import SegmentKey
from quire.tiers.tier import Reason

__all__ = ["TierChange", "TierChanges"]


@dataclass(frozen=True, slots=True)
class TierChange:
    """The tier holds the segment `name`; or, where that is None, the values `keys` are gone. seen: as of when."""

    number: int
    tier: str
    seen: int
    name: SegmentKey | None
    keys: Sequence[bytes] = ()
    reason: Reason | None = None


class TierChanges:
    """See the module's text. All but `take` from any thread, tiers' locks held or not."""

    def __init__(self) -> None:
        self.is_on = False
        self.on_first: Callable[[], None] = lambda: None
        """Called by the thread that ends the emptiness of the queue; quick, and calls no tier."""
        self._lock = threading.Lock()
        self._queue: deque[TierChange] = deque()
        self._number = 0

    def listen(self, is_on: bool) -> None:
        """Begins to keep notices, or ends it and drops those there are."""
        with self._lock:
            self.is_on = is_on
            self._queue.clear()

    def mark(self) -> int:
        """The number of the newest notice: what is looked at from now on is seen as of it."""
        return self._number

    def held(self, tier: str, name: SegmentKey, seen: int) -> None:
        """The tier has it: it has stored it, or it was found there. seen: the mark from before."""
        if self.is_on:
            self._add(tier, name, (), None, seen)

    def gone(self, tier: str, keys: Sequence[bytes], reason: Reason, seen: int | None = None) -> None:
        """The tier does not have them; those it never had do no harm. seen: as in `held`; without, just now."""
        if self.is_on and (keys or reason == "cleared"):
            self._add(tier, None, keys, reason, seen)

    def _add(
        self,
        tier: str,
        name: SegmentKey | None,
        keys: Sequence[bytes],
        reason: Reason | None,
        seen: int | None,
    ) -> None:
        with self._lock:
            if not self.is_on:
                return
            self._number += 1
            is_first = not self._queue
            as_of = self._number if seen is None else seen
            self._queue.append(TierChange(self._number, tier, as_of, name, keys, reason))
        if is_first:
            self.on_first()

    def take(self) -> list[TierChange]:
        if not self._queue:
            return []
        with self._lock:
            taken = list(self._queue)
            self._queue.clear()
        return taken
