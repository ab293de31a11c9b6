"""`IdleTrim`: what an engine without requests gives back to the system.

    memory of blocks and state slots that hold nothing      once after the last step
    values of the host tier, then cached blocks             only while the system is short (`memory.shortage`)

Idle time alone takes no cached content. Where the system is short, as much goes as it misses: of the host tier first,
which holds what was used longest ago, and is in the same memory; then of the cache, the least recently used first. The
tiers below the host tier are handed what the cache gives up; the host tier is not, which would take as much memory.

Cost: O(blocks) after a step, then a reading of the system for each call; what is given up a copy where tiers take it.
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
    """See the module's text. A call is one look, in the engine's thread while no request is there."""

    def __init__(
        self, budget: KVBudget, tiers: OpenTiers | None, shortage: MemoryShortage | None = None
    ) -> None:
        self.shortage = shortage or MemoryShortage()
        self._budget = budget
        self._tiers = tiers
        self._given_back_at: object = None  # the use of the budget when unused memory was given back last

    def __call__(self) -> bool:
        """Whether there is something left that could go, so that another look is of use without a step before it."""
        budget = self._budget
        if self._given_back_at != budget.use:
            budget.give_back_unused()
            self._given_back_at = budget.use
        if not self._may_go:
            return False
        if missing := self.shortage.missing_bytes():
            self._give_back(missing)
        return self._may_go

    @property
    def _may_go(self) -> bool:
        host = None if self._tiers is None else self._tiers.host
        return self._budget.cached_bytes > 0 or (host is not None and host.stats().num_bytes > 0)

    def _give_back(self, num_bytes: int) -> None:
        tiers = self._tiers
        if tiers is not None and tiers.host is not None:
            num_bytes -= tiers.host.evict_bytes(num_bytes)
            give_back_freed()
        if num_bytes > 0 and self._budget.cached_bytes:
            with nullcontext() if tiers is None else tiers.stores.excluding("host"):
                self._budget.give_back_cached(num_bytes)
            self._given_back_at = self._budget.use
