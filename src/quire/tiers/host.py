"""The host tier: values in this process's memory.

It evicts a value that no other value here continues (the tail of a chain goes first: a tail without its head is of no
use), of those one of the lowest cache priority, of those the one unused for longest. A value is never evicted for a
value of lower cache priority, nor for a value that continues it.

Invariants (T1 to T3, and)
    H1  the bytes of all values are at most `max_bytes` at any time. A value that a caller still refers to lives on
        after its eviction and does not count.

Cost: `store` one copy of the value; `load` and `contains` none; an eviction O(log number of values).
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from quire.errors import ArgumentError
from quire.tiers.tier import Reason, SegmentInfo, TierStats

__all__ = ["HostTier"]


@dataclass
class _Entry:
    value: memoryview
    info: SegmentInfo
    cache_priority: int  # the highest of its stores
    used: int  # the number of its last use


class HostTier:
    """See the module's text. max_bytes: of all values together; 0 stores none."""

    name = "host"

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ArgumentError(f"expected max_bytes of 0 or more for the host tier, got {max_bytes}")
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: dict[bytes, _Entry] = {}
        self._num_continued: dict[
            bytes, int
        ] = {}  # by key, there or not: number of values here that continue it
        # (cache priority, used, key) of every value without a continuation; stale entries are skipped when popped.
        self._evictable: list[tuple[int, int, bytes]] = []
        self._num_uses = 0
        self._stats = TierStats(0, 0)
        self.on_removed: Callable[[Sequence[bytes], Reason], None] = lambda keys, reason: None

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return [key in self._entries for key in keys]

    def load(self, key: bytes) -> memoryview | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                self._add(misses=1)
                return None
            self._add(hits=1)
            self._use(key, entry)
            return entry.value

    def store(self, key: bytes, value: Sequence[memoryview], info: SegmentInfo) -> bool:
        num_bytes = sum(part.nbytes for part in value)
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                entry.cache_priority = max(entry.cache_priority, info.cache_priority)
                self._use(key, entry)
                return True
            # Its parent has a continuation from now on, and so is not evicted for its own child.
            self._add_continuation(info.parent)
            if not self._make_room(num_bytes, info.cache_priority):
                self._remove_continuation(info.parent)
                return False
            entry = _Entry(_joined(value, num_bytes), info, info.cache_priority, 0)
            self._entries[key] = entry
            self._use(key, entry)
            self._add(num_values=1, num_bytes=num_bytes, stored=1)
            return True

    def evict(self, key: bytes) -> bool:
        with self._lock:
            if key not in self._entries:
                return False
            self._remove(key)
            return True

    def evict_bytes(self, num_bytes: int) -> int:
        """Evicts values of at least `num_bytes` together, or all; returns their bytes.

        Ignores cache priorities: the system needs the memory, not another value.
        """
        with self._lock:
            before = self._stats.num_bytes
            keys: list[bytes] = []
            while before - self._stats.num_bytes < num_bytes and (key := self._next_victim(None)) is not None:
                self._remove(key)
                keys.append(key)
            if keys:
                self._add(evicted=len(keys))
                self.on_removed(keys, "evicted")
            return before - self._stats.num_bytes

    def contents(self, roots: Sequence[bytes]) -> list[tuple[bytes, SegmentInfo]]:
        with self._lock:
            return [(key, entry.info) for key, entry in self._entries.items() if entry.info.root in roots]

    def stats(self) -> TierStats:
        return self._stats

    def close(self) -> None:
        with self._lock:
            if self._entries:
                self.on_removed(tuple(self._entries), "cleared")
            self._entries.clear()
            self._num_continued.clear()
            self._evictable.clear()
            self._stats = replace(self._stats, num_values=0, num_bytes=0)
            self.max_bytes = 0

    def _use(self, key: bytes, entry: _Entry) -> None:
        self._num_uses += 1
        entry.used = self._num_uses
        self._push_evictable(key, entry)

    def _push_evictable(self, key: bytes, entry: _Entry) -> None:
        """Makes a value evictable if no value continues it."""
        if key in self._num_continued:
            return
        heapq.heappush(self._evictable, (entry.cache_priority, entry.used, key))
        if len(self._evictable) > 2 * len(self._entries) + 64:
            # Most entries are stale, of values used again and again.
            self._evictable = [
                (other.cache_priority, other.used, name)
                for name, other in self._entries.items()
                if name not in self._num_continued
            ]
            heapq.heapify(self._evictable)

    def _add_continuation(self, parent: bytes) -> None:
        self._num_continued[parent] = self._num_continued.get(parent, 0) + 1

    def _remove_continuation(self, parent: bytes) -> None:
        self._num_continued[parent] -= 1
        if not self._num_continued[parent]:
            del self._num_continued[parent]
            if parent in self._entries:
                self._push_evictable(parent, self._entries[parent])

    def _make_room(self, num_bytes: int, cache_priority: int) -> bool:
        """Evicts for a value of this cache priority; False: it was not enough (the values evicted so far are gone)."""
        if num_bytes > self.max_bytes:
            return False
        while self._stats.num_bytes + num_bytes > self.max_bytes:
            key = self._next_victim(cache_priority)
            if key is None:
                return False
            self._remove(key)
            self._add(evicted=1)
            self.on_removed((key,), "evicted")
        return True

    def _next_victim(self, cache_priority: int | None) -> bytes | None:
        """The next key to evict for a value of this cache priority; None: of any priority."""
        while self._evictable:
            rank, used, key = self._evictable[0]
            entry = self._entries.get(key)
            current = entry is not None and (entry.cache_priority, entry.used) == (rank, used)
            if current and key not in self._num_continued:
                return key if cache_priority is None or rank <= cache_priority else None
            heapq.heappop(self._evictable)
        return None

    def _remove(self, key: bytes) -> None:
        entry = self._entries.pop(key)
        self._add(num_values=-1, num_bytes=-entry.value.nbytes)
        self._remove_continuation(entry.info.parent)

    def _add(self, **counts: int) -> None:
        self._stats = replace(
            self._stats, **{name: getattr(self._stats, name) + by for name, by in counts.items()}
        )


def _joined(parts: Sequence[memoryview], num_bytes: int) -> memoryview:
    whole = np.empty(num_bytes, np.uint8)
    end = 0
    for part in parts:
        begin, end = end, end + part.nbytes
        whole[begin:end] = np.frombuffer(part, np.uint8)
    return whole.data.toreadonly()
