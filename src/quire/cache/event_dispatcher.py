"""A cache's events, taken once and handed to everybody who wants them, in one order.

Whoever listens does so from before anything happens: later ones ask the mirror (`tree_mirror.py`) for what there is.
Off, and free, while nobody listens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from quire.cache.events import CacheEvent
from quire.cache.protocol import PrefixKVCache

__all__ = ["DROPPED", "LOSS_REASONS", "EventDispatcher", "Forgotten", "Listener"]

LOSS_REASONS = ("space", "quota", "idle", "dropped", "resize")
"""Why content left memory: a request needed blocks while the pool had none, or while its tenant was at its quota, the
system was short while the engine was idle, a caller asked for it (`drop`, `trim`, `reset`), or the cache got fewer
blocks (`resize`)."""


@dataclass(frozen=True)
class Forgotten:
    """Why the cache has forgotten what it has forgotten since the last look, as its owner knows.

    reason: of `LOSS_REASONS`. is_kept: whether tiers store it, as they do what a reservation evicts.
    """

    reason: str = "dropped"
    is_kept: bool = False


Listener: TypeAlias = Callable[[list[CacheEvent], Forgotten], None]
"""Takes events, and why what the cache forgot among them was forgotten."""
DROPPED = Forgotten()


class EventDispatcher:
    """See the module's text. The only one that calls `take_events`."""

    def __init__(self, cache: PrefixKVCache) -> None:
        self._cache = cache
        self._listeners: list[Listener] = []

    def listen(self, listener: Listener) -> None:
        if not self._listeners:
            self._cache.record_events(True)
        self._listeners.append(listener)

    def collect(self, forgotten: Forgotten = DROPPED) -> None:
        """Hands on what has happened since the last call.

        To be called after every reservation, before anything is written to its blocks, and after commits.
        """
        if not self._listeners or not self._cache.num_events:
            return
        events: list[CacheEvent] = list(self._cache.take_events())
        for listener in self._listeners:
            listener(events, forgotten)
