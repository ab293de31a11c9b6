"""`MemoryLimits`: quotas and floors of owners, and pins, applied to whole requests.

The cache enforces limits block by block (`quire.cache.manager.owners`); the scheduler asks here about requests.

    most blocks     the smaller of quota - own pins, and pool - the floors and pins of other owners
    short           an owner that has its most blocks and needs more: one of its sequences is preempted
    preempted       otherwise the last sequence whose owner is above its floor; never the first of all

Cost: O(owners) per call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    """An owner's floor and quota in blocks; quota -1: none. name: for messages."""

    name: str
    floor: int = 0
    quota: int = -1


class MemoryLimits:
    """See the module's text. Without limits and pins its calls cost O(1)."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._limits: dict[int, Limits] = {}

    def set(
        self, owner_id: int, limits: Limits | None, check_requests: Callable[[], None] = lambda: None
    ) -> None:
        """Sets an owner's limits; None removes them. check_requests: raises if a floor leaves a request no room.

        *raises:* ArgumentError: not in this cache; the error of `check_requests`. Nothing changes then.
        """
        if limits is None:
            self._limits.pop(owner_id, None)
            self._cache.set_limits(owner_id)
            return
        before = self._limits.copy()
        self._limits[owner_id] = limits
        try:
            if limits.floor:
                check_requests()
            if limits.floor or limits.quota >= 0 or owner_id in before:
                self._cache.set_limits(owner_id, limits.floor, limits.quota)
        except BaseException:
            self._limits = before
            raise

    def sum_of_floors(self) -> int:
        return sum(limits.floor for limits in self._limits.values())

    # -- whole requests --------------------------------------------------------------------------------

    def max_blocks(self, owner_id: int) -> int:
        """Blocks that one request of the owner could get if it ran alone, without the owner's pins."""
        pins = self._cache.pins
        others = set(self._limits) | set(pins.owner_ids)
        num_reserved = sum(
            max(self._limits[other].floor if other in self._limits else 0, pins.blocks_of(other))
            for other in others
            if other != owner_id
        )
        num_pinned = pins.blocks_of(owner_id)
        num_blocks = self._cache.num_possible_blocks - num_reserved - num_pinned
        limits = self._limits.get(owner_id)
        if limits is not None and limits.quota >= 0:
            num_blocks = min(num_blocks, limits.quota - num_pinned)
        return num_blocks

    def max_tokens(self, owner_id: int) -> int:
        """Tokens of the longest sequence that fits for the owner, without pins; 0 if none fits."""
        cache = self._cache
        if not self._limits and not len(cache.pins):
            return cache.max_sequence_tokens()
        return max_tokens_for(cache.spec, max(0, self.max_blocks(owner_id)), cache.block_size)

    def check_fits(self, owner_id: int, num_tokens: int, num_shared: int, subject: str) -> None:
        """*raises:* CapacityError if a sequence of `num_tokens` tokens does not fit, even if it ran alone.

        num_shared: needed blocks that pins hold already. subject: names the sequence in the message.
        """
        cache = self._cache
        needed = cache.num_blocks_for(num_tokens) - num_shared
        most_blocks = self.max_blocks(owner_id)
        if needed <= most_blocks:
            return
        block_name, size, num_pinned = cache.block_name, cache.block_bytes, cache.pins.blocks_of(owner_id)
        limits = self._limits.get(owner_id)
        owner = f"of tenant {limits.name!r} " if limits is not None else ""
        numbers = f"got one {owner}of {num_tokens} tokens that needs {needed} {block_name}s of "
        if limits is not None and 0 <= limits.quota < needed + num_pinned:
            raise CapacityError(
                f"expected a request that fits in its tenant's quota, {numbers}{limits.quota} "
                f"({format_size(limits.quota * size)}, {num_pinned} {block_name}s of them pinned) - in {subject}; "
                f"lower max_tokens or shorten the prompt, or raise the quota to "
                f"{format_size((needed + num_pinned) * size)}"
            )
        possible = cache.num_possible_blocks
        num_reserved, stats = possible - most_blocks, cache.stats()
        withheld = f", less {num_reserved} for pins and other tenants' floors" if num_reserved else ""
        raise CapacityError(
            f"expected a request that fits in the KV cache, {numbers}{possible}{withheld} (free "
            f"{stats['free']}, cached {stats['cached']}, held {stats['held']}) - in {subject}; lower max_tokens or "
            f"shorten the prompt to at most {self.max_tokens(owner_id)} tokens in all, or raise kv_memory by a factor "
            f"of {(needed + num_reserved) / possible:.2f}"
        )

    # -- a step ----------------------------------------------------------------------------------------

    @property
    def is_limited(self) -> bool:
        """True if an owner has limits."""
        return bool(self._limits)

    def blocking_limit(
        self, owner_id: int, num_blocks: int, num_taken: int
    ) -> Literal["itself", "others"] | None:
        """The limit that keeps `num_blocks` more blocks from an owner to which `num_taken` are promised already.

        "itself": the owner would exceed its most blocks. "others": the free blocks are reserved for other owners'
        floors. None: no limit; the pool may still lack blocks.
        """
        if not self._limits:
            return None
        counts = self._cache.owner_counts(owner_id)
        if counts.held + counts.in_flight + num_taken + num_blocks > self._cache.max_owner_blocks(owner_id):
            return "itself"
        return "others" if num_taken + num_blocks > self._cache.num_available_blocks(owner_id) else None

    def preemption_candidates(
        self, live: list[RequestSequence], chosen: Iterable[tuple[RequestSequence, int]]
    ) -> list[RequestSequence]:
        """The sequences of `live` (running or loading, sorted) that may be preempted to make room for `chosen`.

        The caller preempts the last of them; the first stays if there are several.
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
