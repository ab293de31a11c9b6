"""`KeptPrefixes`: pins beginnings of computed prompts for a time, for `prompt_caching`.

Invariants
    K1  a pin never fails a request. It is cut to whole blocks where the budget `pin_memory` has no room for all of it;
        without any room, and where its tenant's quota has none, there is none.
    K2  a tenant has at most `max_kept` prompts pinned for a time.
    K3  a longer beginning of a history replaces the pin of a shorter one that lasts no longer.

Cost: O(pins) between two steps for each beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakSet

from quire.cache.pins import Pin
from quire.engine.async_engine import AsyncEngine
from quire.errors import ArgumentError, CapacityError
from quire.server.api_keys import ApiTenant

__all__ = ["KeptCounts", "KeptPrefix", "KeptPrefixes"]


@dataclass(frozen=True)
class KeptPrefix:
    """The first `num_tokens` tokens of a prompt, to be pinned for `seconds` after their last use."""

    num_tokens: int
    seconds: float


@dataclass
class KeptCounts:
    """Tokens of one prompt. num_asked: in its longest beginning to pin. num_pinned: in the longest that is pinned.
    computed: computed and pinned, by the longest time that each was pinned for."""

    num_asked: int = 0
    num_pinned: int = 0
    computed: dict[float, int] = field(default_factory=dict)

    @property
    def num_computed(self) -> int:
        return sum(self.computed.values())

    def report(self) -> dict[str, int]:
        """For the cache's report on the prompt."""
        return {"asked_to_keep": self.num_asked, "kept_tokens": self.num_pinned}


class KeptPrefixes:
    """The timed pins that the requests of one server made. max_kept: of a tenant."""

    def __init__(self, engine: AsyncEngine, max_kept: int) -> None:
        self._engine = engine
        self._max_kept = max_kept
        self._pins: WeakSet[Pin] = WeakSet()

    async def keep(
        self,
        tenant: ApiTenant,
        cache_salt: str | None,
        token_ids: list[int],
        num_cached: int,
        prefixes: Sequence[KeptPrefix],
    ) -> KeptCounts:
        """Pins beginnings of a computed prompt. num_cached: its tokens that were not computed. prefixes: the longest
        first."""
        counts = KeptCounts(num_asked=max((prefix.num_tokens for prefix in prefixes), default=0))
        pinned: list[tuple[int, float]] = []
        for prefix in prefixes:
            beginning, seconds = token_ids[: prefix.num_tokens], prefix.seconds
            pinned.append((await self._pin(tenant, cache_salt, beginning, seconds), seconds))
        counts.num_pinned = max((num_pinned for num_pinned, _ in pinned), default=0)
        num_counted = num_cached
        for num_pinned, seconds in reversed(pinned):
            num_new = max(0, num_pinned - num_counted)
            counts.computed[seconds] = counts.computed.get(seconds, 0) + num_new
            num_counted = max(num_counted, num_pinned)
        return counts

    async def _pin(
        self, tenant: ApiTenant, cache_salt: str | None, token_ids: list[int], seconds: float
    ) -> int:
        """The number of pinned tokens; 0: there was no room."""

        def pin() -> int:
            key, pins = tenant.key(cache_salt), self._engine.pins
            num_tokens = pins.num_tokens_with_room(token_ids, **key)
            if not num_tokens:
                return 0
            owner = tenant.in_engine or ""
            timed = [pin for pin in pins if pin.ttl_s is not None and pin.owner == owner]
            try:
                kept = pins.keep_for(token_ids[:num_tokens], seconds, **key)
            except ArgumentError:  # state layers have a state before a prompt's last token, not behind it
                kept = pins.keep_for(token_ids[: num_tokens - 1], seconds, **key)
            if kept in timed or kept.ttl_s is None:
                return len(kept.tokens)
            replaced = [
                pin
                for pin in timed
                if pin in self._pins
                and pin.namespace == kept.namespace
                and (pin.ttl_s or 0.0) <= seconds
                and pin.is_prefix_of(kept.tokens, kept.extra_keys)
            ]
            if len(timed) - len(replaced) >= self._max_kept:
                pins.remove(kept)
                return 0
            self._pins.add(kept)
            for pin in replaced:
                pins.remove(pin)
            return len(kept.tokens)

        try:
            return await self._engine.between_steps(pin)
        except (ArgumentError, CapacityError):
            return 0
