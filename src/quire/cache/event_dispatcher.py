"""`EventDispatcher`: takes a cache's events once and hands them to every listener, in one order.

A listener registers before the first event; a later one asks the mirror (`tree_mirror.py`) for the present content.
Without listeners it is off and costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from quire.cache.events import CacheEvent
from quire.cache.protocol import PrefixKVCache

__all__ = ["DROPPED", "LOSS_REASONS", "EventDispatcher", "Forgotten", "Listener"]

LOSS_REASONS = ("space", "quota", "idle", "dropped", "resize")
"""Why content left memory: a request needed blocks while the pool had none (space), or while its tenant was at its
quota (quota); the system was short of memory while the engine was idle (idle); a caller asked for it (`drop`, `trim`,
`reset`); or the cache got fewer blocks (`resize`)."""


@dataclass(frozen=True)
class Forgotten:
    """Why the cache forgot content since the last `collect`, as its owner knows.

    reason: of `LOSS_REASONS`. is_kept: whether tiers store that content, as they do after an eviction by a reservation.
    """

    reason: str = "dropped"
    is_kept: bool = False


Listener: TypeAlias = Callable[[list[CacheEvent], Forgotten], None]
"""Takes events, and the reason for the content that the cache forgot among them."""
DROPPED = Forgotten()


class EventDispatcher:
    """See the module's text. The only caller of `take_events`."""

    def __init__(self, cache: PrefixKVCache) -> None:
        self._cache = cache
        self._listeners: list[Listener] = []

    def listen(self, listener: Listener) -> None:
        if not self._listeners:
            self._cache.record_events(True)
        self._listeners.append(listener)

    def collect(self, forgotten: Forgotten = DROPPED) -> None:
        """Hands on the events since the last call.

        Call it after every reservation, before anything is written to its blocks, and after commits.
        """
        if not self._listeners or not self._cache.num_events:
            return
        events: list[CacheEvent] = list(self._cache.take_events())
        for listener in self._listeners:
            listener(events, forgotten)
