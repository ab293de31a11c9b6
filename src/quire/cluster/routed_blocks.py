"""The router's knowledge of a replica. `RecentWork`: seconds of work sent there lately. `RoutedBlocks`: the blocks that
it is taken to have, those of its newest digest and of prompts sent there since.

A digest is as old as its period; what was routed meanwhile is not in it yet. So each routed prompt counts as cached in
memory for `history_s` seconds, longer than a digest's period, and then only if the digest has it.

Invariant: a block of either source is there only with all blocks before it, as a path's blocks are noted together and a
replica evicts a tail before its head.

Cost: O(1) a look-up; O(blocks) a digest and a routed prompt.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

__all__ = ["HISTORY_S", "RecentWork", "RoutedBlocks"]

HISTORY_S = 5.0  # a routed prompt counts as cached this long; a digest that has it comes sooner
_MEMORY = "memory"


class RecentWork:
    """Seconds of work, each weighted by exp(-age / window_s)."""

    def __init__(self, window_s: float = 60.0) -> None:
        self._window_s = window_s
        self._seconds = self._at = 0.0

    def add(self, seconds: float, now: float) -> None:
        self._seconds = self.seconds(now) + seconds
        self._at = now

    def seconds(self, now: float) -> float:
        return self._seconds * math.exp((self._at - now) / self._window_s)


class RoutedBlocks:
    """See the module's text. history_s: how long a routed prompt counts without a digest that has it."""

    def __init__(self, history_s: float) -> None:
        self.history_s = history_s
        self._digest: Mapping[int, str] = {}
        self._sent_at: dict[int, float] = {}
        self._sent: deque[tuple[float, tuple[int, ...]]] = deque()  # the oldest first

    def get(self, key: int, /) -> str | None:
        """The fastest tier that has the block, or None."""
        return _MEMORY if key in self._sent_at else self._digest.get(key)

    def set_digest(self, digest: Mapping[int, str]) -> None:
        """Takes the replica's report of its blocks in place of the last one. digest: by key, the tier's name."""
        self._digest = digest

    def note_sent(self, block_keys: Sequence[int], now: float) -> None:
        """A prompt of these blocks was sent to the replica."""
        self._sent.append((now, tuple(block_keys)))
        self._sent_at.update(dict.fromkeys(block_keys, now))
        self.expire(now)

    def expire(self, now: float) -> None:
        """Forgets the prompts that were sent more than `history_s` before `now`."""
        while self._sent and self._sent[0][0] < now - self.history_s:
            sent_at, keys = self._sent.popleft()
            for key in keys:
                if self._sent_at.get(key) == sent_at:
                    del self._sent_at[key]
