"""`TierChanges`: a queue of the values that tiers have stored or lost, filled by any thread, read by one, in order.

While recording is off (`is_recording`) the queue is empty, and a call costs one test of a flag.

Invariants
    N1  changes are numbered, and read in the order of their numbers. A tier reports an eviction while it evicts. A
        caller that reports a value as present or absent gives the number (`mark`) from before it asked the tier, so
        that the reader of the queue does not undo later changes by it.
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
    """The tier holds the segment `stored`; or, if that is None, it has lost the values `lost`. seen: the mark of the
    report."""

    number: int
    tier: str
    seen: int
    stored: SegmentKey | None
    lost: Sequence[bytes] = ()
    reason: Reason | None = None


class TierChanges:
    """See the module's text. Any thread may call any method but `pop_all`, with or without a tier's locks."""

    def __init__(self) -> None:
        self.is_recording = False
        self.on_first: Callable[[], None] = lambda: None
        """Called by the thread that adds the first change to an empty queue; must be quick and call no tier."""
        self._lock = threading.Lock()
        self._queue: deque[TierChange] = deque()
        self._number = 0

    def record(self, is_recording: bool) -> None:
        """Starts recording, or ends it; empties the queue."""
        with self._lock:
            self.is_recording = is_recording
            self._queue.clear()

    def mark(self) -> int:
        """The number of the newest change, for a caller that is about to ask a tier."""
        return self._number

    def add_stored(self, tier: str, key: SegmentKey, seen: int) -> None:
        """The tier has stored the segment, or was found to have it. seen: the mark from before."""
        if self.is_recording:
            self._add(tier, key, (), None, seen)

    def add_lost(self, tier: str, keys: Sequence[bytes], reason: Reason, seen: int | None = None) -> None:
        """The tier does not have these values; it may never have had them. seen: as in `add_stored`; None: now."""
        if self.is_recording and (keys or reason == "cleared"):
            self._add(tier, None, keys, reason, seen)

    def _add(
        self,
        tier: str,
        stored: SegmentKey | None,
        lost: Sequence[bytes],
        reason: Reason | None,
        seen: int | None,
    ) -> None:
        with self._lock:
            if not self.is_recording:
                return
            self._number += 1
            is_first = not self._queue
            mark = self._number if seen is None else seen
            self._queue.append(TierChange(self._number, tier, mark, stored, lost, reason))
        if is_first:
            self.on_first()

    def pop_all(self) -> list[TierChange]:
        if not self._queue:
            return []
        with self._lock:
            changes = list(self._queue)
            self._queue.clear()
        return changes
