"""`SaltQuota`: the most bytes that the tiers keep under one root, that of a cache salt.

The oldest use is evicted first, and of a prompt its end before its beginning. Segments of an earlier process count as
oldest, in tiers with an index (host memory, a folder).

Cost: O(segments of the root) a prompt; the first use of a root reads its rows of the index, in the tiers' threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from quire.tiers.segment_key import SegmentKey
from quire.tiers.stack import TierStack
from quire.tiers.tier import SegmentInfo

__all__ = ["SaltQuota"]


class SaltQuota:
    """max_bytes: of payloads, in each tier."""

    def __init__(self, stack: TierStack, max_bytes: int) -> None:
        self._stack, self._max_bytes = stack, max_bytes
        self._lock = threading.Lock()
        self._used: dict[bytes, OrderedDict[bytes, int]] = {}  # by root, bytes by key, oldest use first

    def note_use(self, chain: Sequence[SegmentKey]) -> None:
        """The segments of a chain have been stored or loaded; evicts what is too much."""
        if not chain:
            return
        root = chain[0].root
        with self._lock:
            is_new = root not in self._used
            used = self._used.setdefault(root, OrderedDict())
            for key in reversed(chain):
                used[key.hash] = self._stack.layout.num_bytes(len(key.tokens))
                used.move_to_end(key.hash)
        if is_new:
            self._stack.evict_chosen((root,), lambda contents: self._count_stored(root, contents))
        self._evict_oldest(root)

    def _count_stored(self, root: bytes, contents: Sequence[tuple[bytes, SegmentInfo]]) -> list[bytes]:
        """In a tier's thread: counts what it had before. Evicts by itself, in all tiers."""
        with self._lock:
            used = self._used[root]
            for key, info in sorted(
                contents, key=lambda one: one[1].start
            ):  # a prompt's end becomes the oldest
                if key not in used:
                    used[key] = self._stack.layout.num_bytes(len(info.tokens) // 4)
                    used.move_to_end(key, last=False)
        self._evict_oldest(root)
        return []

    def _evict_oldest(self, root: bytes) -> None:
        with self._lock:
            used = self._used[root]
            num_bytes = sum(used.values())
            evicted: list[bytes] = []
            while num_bytes > self._max_bytes:
                key, size = used.popitem(last=False)
                num_bytes -= size
                evicted.append(key)
        if evicted:
            self._stack.evict(evicted)
