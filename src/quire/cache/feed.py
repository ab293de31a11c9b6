"""A cache's events, taken once and handed to everybody who wants them, in one order.

Whoever listens does so from before anything happens: later ones ask the mirror (`mirror.py`) for what there is. Off,
and free, while nobody listens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from quire.cache.events import CacheEvent
from quire.cache.protocol import PrefixKVCache

__all__ = ["EventFeed", "Listener"]

Listener: TypeAlias = Callable[[list[CacheEvent], bool], None]
"""Takes events, and whether what the cache forgot among them was given up for want of memory alone."""


class EventFeed:
    """See the module's text. The only one that calls `take_events`."""

    def __init__(self, cache: PrefixKVCache) -> None:
        self._cache = cache
        self._listeners: list[Listener] = []

    def listen(self, listener: Listener) -> None:
        if not self._listeners:
            self._cache.record_events(True)
        self._listeners.append(listener)

    def collect(self, *, keep_forgotten: bool = False) -> None:
        """Hands on what has happened since the last call.

        To be called after every reservation, before anything is written to its blocks, and after commits.
        """
        if not self._listeners or not self._cache.num_events:
            return
        events: list[CacheEvent] = list(self._cache.take_events())
        for listener in self._listeners:
            listener(events, keep_forgotten)
