"""`CacheMonitor`: an engine's records of its cache (mirror, log of losses) and the subscribers to its events.

Cost: see its parts; an engine without a monitor has no cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from quire.cache.event_dispatcher import DROPPED, EventDispatcher, Forgotten
from quire.cache.pins import Pin
from quire.cache.protocol import PrefixKVCache
from quire.cache.steady_clock import SteadyClock
from quire.observe.history import History
from quire.observe.kv_events import KVEventSubscribers
from quire.observe.tree_mirror import TreeMirror
from quire.offload.tier_events import TierEvents
from quire.scheduler.request import Request

__all__ = ["CacheMonitor"]


class CacheMonitor:
    """feed: the cache's dispatcher, which may have other listeners. max_blocks: the most losses in the log.

    mirror: a mirror that listens already; None for a new one. tier_events: events of the tiers below the
    cache, for subscribers. Only the engine's thread may call it.
    """

    def __init__(
        self,
        cache: PrefixKVCache,
        feed: EventDispatcher,
        *,
        max_blocks: int = 65536,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        tier_events: TierEvents | None = None,
        mirror: TreeMirror | None = None,
    ) -> None:
        self.cache = cache
        self.feed = feed
        self.clock = SteadyClock(clock)
        self.tier_events = tier_events
        self.mirror = mirror or TreeMirror(cache)
        self.mirror.clock = self.clock
        self.history = History(self.mirror, max_blocks)
        self.subscribers = KVEventSubscribers(self.mirror, wall_clock, tier_events)
        self._clock = clock
        if mirror is None:
            feed.listen(self.mirror.apply)

    def collect(self, forgotten: Forgotten = DROPPED) -> None:
        """Dispatches the events of the cache (see `EventDispatcher.collect`) and of the tiers since the last call."""
        self.feed.collect(forgotten)
        self.subscribers.collect()

    def served(self, request: Request) -> None:
        """Records an ended request in the history."""
        if request.started_s is None:
            return
        began_at = self.clock() - max(0.0, self._clock() - request.started_s)
        self.history.used(
            request.key.namespace,
            request.sequences[0].token_ids(),
            request.key.extra_keys,
            request.num_cached_tokens,
            began_at,
        )

    def pin_expired(self, pin: Pin) -> None:
        self.history.expired(pin.namespace, pin.tokens, pin.extra_keys)

    def stats(self) -> dict[str, Any]:
        history = self.history
        tiers = {} if self.tier_events is None else {"num_untold_segments": self.tier_events.num_untold}
        count = history.num_evicted
        idle_s, age_s = (
            sum(durations.sum_s for durations in spans.values())
            for spans in (history.evictions, history.eviction_ages)
        )
        return tiers | {
            "num_known_blocks": len(self.mirror.by_id),
            "num_evictions": count,
            "eviction_idle_s": idle_s / count if count else 0.0,
            "eviction_age_s": age_s / count if count else 0.0,
            "evictions_by_reason": {
                reason: {
                    "count": spans.count,
                    "idle_s": spans.mean_s,
                    "idle_below_s": spans.counts_below(),
                    "age_s": history.eviction_ages[reason].mean_s,
                    "age_below_s": history.eviction_ages[reason].counts_below(),
                }
                for reason, spans in history.evictions.items()
            },
            "num_reuses": history.reuse_gaps.count,
            "reuse_gap_s": history.reuse_gaps.mean_s,
            "reuse_gap_below_s": history.reuse_gaps.counts_below(),
        }
