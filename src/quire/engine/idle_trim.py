"""`IdleTrim`: gives memory of an engine without requests back to the system.

    memory of unused blocks and state slots         once after the last step
    values of the host tier, then cached blocks     only while the system is short of memory (`memory.shortage`)

Idle time alone evicts no cached content. If the system is short, it evicts as many bytes as are missing: first from the
host tier, which has the content unused for longest, then from the cache, in its order of eviction. The cache's
content goes to the tiers below the host tier, not to the host tier, which would take as much memory again.

Cost: O(blocks) after a step, then a reading of the system for each call; a copy of evicted content that tiers store.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from quire.engine.kv_budget import KVBudget
from quire.memory.heap import give_back_freed
from quire.memory.shortage import MemoryShortage

if TYPE_CHECKING:
    from quire.offload.open_tiers import OpenTiers

__all__ = ["IdleTrim"]


class IdleTrim:
    """See the module's text. Call it in the engine's thread while there are no requests."""

    def __init__(
        self, budget: KVBudget, tiers: OpenTiers | None, shortage: MemoryShortage | None = None
    ) -> None:
        self.shortage = shortage or MemoryShortage()
        self._budget = budget
        self._tiers = tiers
        self._trimmed_use: object = None  # the budget's `usage` at the last return of unused memory

    def __call__(self) -> bool:
        """Trims; True if content is left, so that another call may be of use before the next step."""
        budget = self._budget
        if self._trimmed_use != budget.usage:
            budget.release_unused()
            self._trimmed_use = budget.usage
        if not self._can_trim:
            return False
        if missing := self.shortage.missing_bytes():
            self._evict(missing)
        return self._can_trim

    @property
    def _can_trim(self) -> bool:
        host = None if self._tiers is None else self._tiers.host
        return self._budget.cached_bytes > 0 or (host is not None and host.stats().num_bytes > 0)

    def _evict(self, num_bytes: int) -> None:
        tiers = self._tiers
        if tiers is not None and tiers.host is not None:
            num_bytes -= tiers.host.evict_bytes(num_bytes)
            give_back_freed()
        if num_bytes > 0 and self._budget.cached_bytes:
            with nullcontext() if tiers is None else tiers.stores.excluding("host"):
                self._budget.evict_cached(num_bytes)
            self._trimmed_use = self._budget.usage
