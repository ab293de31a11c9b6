"""`EngineView`: the state of an engine between two steps, for pages and tools that show it. It changes nothing.

Call it in the engine's thread (`AsyncEngine.between_steps`); `known_blocks` alone may be read in another one, a key at
a time. Cost: O(1) a call, except `stats`, and `bytes_committed`: a millisecond for each GiB of the pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.cache.protocol import KVCache
from quire.scheduler.request import RequestSequence
from quire.scheduler.tenants import Tenants

if TYPE_CHECKING:
    from quire.engine.open_engine import OpenEngine
    from quire.observe.history import History
    from quire.observe.tree_mirror import Block

__all__ = ["EngineView"]


class EngineView:
    """See the module's text. history: None if prefixes are not shared."""

    def __init__(self, opened: OpenEngine) -> None:
        self._opened = opened
        self._scheduler = opened.engine.scheduler
        self._records = opened.engine.monitor

    @property
    def cache(self) -> KVCache:
        return self._opened.cache

    @property
    def tenants(self) -> Tenants:
        return self._opened.engine.tenants

    @property
    def history(self) -> History | None:
        return None if self._records is None else self._records.history

    @property
    def known_blocks(self) -> Mapping[int, Block]:
        """The blocks of the cache's mirror by node; empty if prefixes are not shared."""
        return {} if self._records is None else self._records.mirror.by_id

    def update_mirror(self) -> float:
        """Brings the mirror up to date; the time of its clock, 0 without one."""
        if self._records is None:
            return 0.0
        self._records.feed.collect()
        return self._records.mirror.clock()

    @property
    def now(self) -> float:
        """The time of the scheduler's clock, of which arrivals are."""
        return self._scheduler.clock()

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

    def phase_of(self, sequence: RequestSequence) -> str:
        return self._scheduler.phase_of(sequence)

    def stats(self) -> dict[str, Any]:
        return self._opened.engine.stats()

    @property
    def bytes_committed(self) -> int:
        return self._opened.bytes_committed
