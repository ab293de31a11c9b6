"""Whose memory is short, and who gives way: quotas and floors of owners, pins, as the scheduler needs them.

The cache enforces limits block by block (`quire.cache.manager.owners`); here is what they mean for whole requests.

    can ever have   the smaller of quota - own pins, and pool - what floors and pins keep from it
    short           an owner that holds what it can ever have and needs more: one of its own gives way
    gives way       else the last of those whose owner is above its floor; never the first of all

Cost: O(owners) a question.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from quire.cache.block_counts import max_tokens_for
from quire.cache.protocol import KVCache
from quire.errors import CapacityError
from quire.scheduler.request import RequestSequence
from quire.sizes import format_size

__all__ = ["Limits", "MemoryLimits"]


@dataclass(frozen=True)
class Limits:
    """Of an owner, in blocks; quota -1: none. name: for messages."""

    name: str
    floor: int = 0
    quota: int = -1


class MemoryLimits:
    """See the module's text. without limits and pins its questions cost nothing."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._limits: dict[int, Limits] = {}

    def set(self, owner_id: int, limits: Limits | None) -> None:
        """*raises:* ArgumentError where the cache cannot; nothing was changed."""
        if limits is None:
            self._limits.pop(owner_id, None)
            self._cache.set_limits(owner_id)
            return
        if limits.floor or limits.quota >= 0 or owner_id in self._limits:
            self._cache.set_limits(owner_id, limits.floor, limits.quota)
        self._limits[owner_id] = limits

    def sum_of_floors(self) -> int:
        return sum(limits.floor for limits in self._limits.values())

    # -- whole requests --------------------------------------------------------------------------------

    def can_ever_have(self, owner_id: int) -> int:
        """Blocks that one request of the owner could get if no other ran, pins of its own not counted."""
        pins = self._cache.pins
        others = set(self._limits) | set(pins.owner_ids)
        kept = sum(
            max(self._limits[other].floor if other in self._limits else 0, pins.blocks_of(other))
            for other in others
            if other != owner_id
        )
        own = pins.blocks_of(owner_id)
        num_blocks = self._cache.num_possible_blocks - kept - own
        limits = self._limits.get(owner_id)
        if limits is not None and limits.quota >= 0:
            num_blocks = min(num_blocks, limits.quota - own)
        return num_blocks

    def max_tokens(self, owner_id: int) -> int:
        """The longest sequence that the owner could ever have, pins not counted; 0 for none."""
        cache = self._cache
        if not self._limits and not len(cache.pins):
            return cache.max_sequence_tokens()
        return max_tokens_for(cache.spec, max(0, self.can_ever_have(owner_id)), cache.block_size)

    def check_fits(self, owner_id: int, num_tokens: int, num_shared: int, what: str) -> None:
        """*raises:* CapacityError unless a sequence of so many tokens could be computed in this owner alone.

        num_shared: blocks of those it needs that pins hold for it.
        """
        cache = self._cache
        needed = cache.num_blocks_for(num_tokens) - num_shared
        most = self.can_ever_have(owner_id)
        if needed <= most:
            return
        block_name, size, own = cache.block_name, cache.block_bytes, cache.pins.blocks_of(owner_id)
        limits = self._limits.get(owner_id)
        owner = f"of tenant {limits.name!r} " if limits is not None else ""
        numbers = f"got one {owner}of {num_tokens} tokens that needs {needed} {block_name}s of "
        if limits is not None and 0 <= limits.quota < needed + own:
            raise CapacityError(
                f"expected a request that fits in its tenant's quota, {numbers}{limits.quota} "
                f"({format_size(limits.quota * size)}, {own} {block_name}s of them pinned) - in {what}; lower "
                f"max_tokens or shorten the prompt, or raise the quota to {format_size((needed + own) * size)}"
            )
        possible = cache.num_possible_blocks
        kept, stats = possible - most, cache.stats()
        withheld = f", {kept} of which pins and other tenants' floors keep" if kept else ""
        raise CapacityError(
            f"expected a request that fits in the KV cache, {numbers}{possible}{withheld} (free "
            f"{stats['free']}, cached {stats['cached']}, held {stats['held']}) - in {what}; lower max_tokens or "
            f"shorten the prompt to at most {self.max_tokens(owner_id)} tokens in all, or raise kv_memory by a factor "
            f"of {(needed + kept) / possible:.2f}"
        )

    # -- a step ----------------------------------------------------------------------------------------

    @property
    def is_limited(self) -> bool:
        """Whether some owner has a name here."""
        return bool(self._limits)

    def waits_for(self, owner_id: int, num_blocks: int, num_taken: int) -> Literal["itself", "others"] | None:
        """Whose blocks an owner has to wait for that wants so many beyond `num_taken`, promised to it already.

        "itself": it would have more than it can ever have. "others": what is free now is kept for their floors.
        None: for nobody's; whether the pool has them is another question.
        """
        if not self._limits:
            return None
        counts = self._cache.owner_counts(owner_id)
        if counts.held + counts.in_flight + num_taken + num_blocks > self._cache.max_owner_blocks(owner_id):
            return "itself"
        return "others" if num_taken + num_blocks > self._cache.num_available_blocks(owner_id) else None

    def may_give_way(
        self, live: list[RequestSequence], chosen: Iterable[tuple[RequestSequence, int]]
    ) -> list[RequestSequence]:
        """Of those that run or load (sorted), among whom the last is to give way, as `chosen` has no room.

        The first of them stays, where there is another one.
        """
        if not self._limits:
            return live
        by_owner: dict[int, list[tuple[RequestSequence, int]]] = {}
        for sequence, n in chosen:
            by_owner.setdefault(sequence.request.owner_id, []).append((sequence, n))
        for owner_id, sequences in by_owner.items():
            if owner_id not in self._limits:
                continue
            counts = self._cache.owner_counts(owner_id)
            needed = self._cache.num_blocks_needed(
                [s.cache_sequence for s, _ in sequences], [n for _, n in sequences]
            )
            if counts.held + counts.in_flight + needed > self._cache.max_owner_blocks(owner_id):
                return [sequence for sequence in live if sequence.request.owner_id == owner_id]
        above = [sequence for sequence in live[1:] if self._is_above_floor(sequence.request.owner_id)]
        return live[:1] + (above or live[1:])

    def _is_above_floor(self, owner_id: int) -> bool:
        limits = self._limits.get(owner_id)
        if limits is None or not limits.floor:
            return True
        counts = self._cache.owner_counts(owner_id)
        return counts.held + counts.in_flight > limits.floor
