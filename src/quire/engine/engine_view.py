"""`EngineView`: the state of an engine between two steps, for pages and tools that show it. It changes nothing.

Call it in the engine's thread (`AsyncEngine.between_steps`); `known_blocks` alone may be read in another one, a key at
a time. Cost: O(1) a call, except `stats`, and `bytes_committed`: a millisecond for each GiB of the pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from quire.cache.protocol import KVCache
from quire.scheduler.request import RequestSequence
from quire.scheduler.tenants import Tenants

if TYPE_CHECKING:
    from quire.engine.open_engine import OpenEngine
    from quire.observe.history import History
    from quire.observe.tree_mirror import Block

__all__ = ["EngineView"]


class EngineView:
    """See the module's text.

    history: None if prefixes are not shared; known_blocks: those of the cache's mirror by node, empty then. stats,
    phase_of: as of `Engine` and `Scheduler`. now: the time of the scheduler's clock, of which arrivals are.
    """

    def __init__(self, opened: OpenEngine) -> None:
        engine, scheduler, records = opened.engine, opened.engine.scheduler, opened.engine.monitor
        self.cache: KVCache = opened.cache
        self.tenants: Tenants = engine.tenants
        self.history: History | None = None if records is None else records.history
        self.known_blocks: Mapping[int, Block] = {} if records is None else records.mirror.by_id
        self.stats, self.phase_of, self.now = engine.stats, scheduler.phase_of, scheduler.clock
        self._opened, self._scheduler, self._records = opened, scheduler, records

    def update_mirror(self) -> float:
        """Brings the mirror up to date; the time of its clock, 0 without one."""
        if self._records is None:
            return 0.0
        self._records.feed.collect()
        return self._records.mirror.clock()

    @property
    def running(self) -> list[RequestSequence]:
        """The running sequences that have blocks."""
        return [sequence for sequence in self._scheduler.running if sequence.cache_sequence is not None]

    @property
    def loading(self) -> list[RequestSequence]:
        """The sequences with blocks whose content a tier is loading."""
        return [sequence for sequence in self._scheduler.loading if sequence.cache_sequence is not None]

    def waiting(self, max_count: int) -> list[RequestSequence]:
        """The first waiting sequences; paused ones are last."""
        scheduler = self._scheduler
        return [*scheduler.waiting[:max_count], *scheduler.paused_waiting[:max_count]][:max_count]

    @property
    def bytes_committed(self) -> int:
        """Memory that the cache has taken from the system."""
        return self._opened.bytes_committed
