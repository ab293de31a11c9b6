"""The sequences whose prefix comes from a tier just now: who begins, who has arrived, who is stopped.

Part of the scheduler, which decides who runs. A sequence here has an open cache sequence with its blocks reserved. It
begins while it waits, whether or not there is a seat for it, but takes no block that one before it in the queue would
need, nor one that its own tenant's quota or another's floor keeps from it. One that waits for its own tenant's blocks
delays no other tenant's.

Invariants
    Q1  `sequences` is sorted by `RequestSequence.key`; each is LOADING, with an open sequence and a load.

Cost: `start` O(sequences looked at + their prompts) while some waiting one has something in a tier, else nothing.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable

import numpy as np

from quire.cache.protocol import CacheSequence, KVCache
from quire.errors import CapacityError
from quire.offload.tier_load import TierLoads
from quire.scheduler.request import RequestSequence, SequenceStatus
from quire.scheduler.shared_prefills import SharedPrefills
from quire.scheduler.tenant_quotas import MemoryLimits
from quire.step import StepPlan

__all__ = ["LoadingQueue"]

_MAX_LOOKED_AT = 64  # waiting sequences that one step looks at


class LoadingQueue:
    """See the module's text. on_reserved: called when blocks have been handed out that nothing was written to yet."""

    def __init__(
        self, cache: KVCache, loads: TierLoads, share: MemoryLimits, on_reserved: Callable[[], None] | None
    ) -> None:
        self._cache = cache
        self._share = share
        self._loads = loads
        self._on_reserved = on_reserved
        self.sequences: list[RequestSequence] = []

    def search(self, sequence: RequestSequence) -> None:
        """Begins to look up what the tiers have of a sequence that begins to wait."""
        self._loads.search(sequence)

    def may_start(self, waiting: list[RequestSequence]) -> bool:
        """Whether a tier has something of one of those who wait. Notes which searches are done, for the whole step:
        of one that ends later in it, the sequence would be computed though a tier has it."""
        searches = [one.search for one in waiting[:_MAX_LOOKED_AT] if one.search is not None]
        for search in searches:
            search.is_seen = search.done
        return any(search.is_seen and search.stored for search in searches)

    def start(
        self,
        waiting: list[RequestSequence],
        running: list[RequestSequence],
        promised: int,
        promised_to: Counter[int],
        most: int,
        open_sequence: Callable[[RequestSequence, np.ndarray], CacheSequence],
    ) -> None:
        """Moves waiting sequences here that had better be loaded, at most `most` being here then.

        promised: blocks that are free and not for them: what those who run will need. promised_to: by owner, where
        owners have limits; changed here.
        """
        cache = self._cache
        short: set[int] = set()  # owners of which one waits for blocks: nobody of them overtakes it
        under_way = SharedPrefills(running + self.sequences, cache.block_size)
        for sequence in waiting[:_MAX_LOOKED_AT]:
            if promised >= cache.num_free_blocks or len(self.sequences) >= most:
                return
            if not sequence.is_searched or sequence.waits_for_commit:
                continue
            search, owner_id = sequence.search, sequence.request.owner_id
            alone = cache.num_blocks_for(sequence.num_tokens)
            if owner_id in short:
                continue
            if search is None or sequence.swapped is not None or not search.stored:
                if self._share.waits_for(owner_id, alone, promised_to[owner_id]) == "itself":
                    short.add(owner_id)
                    continue
                promised += alone
                promised_to[owner_id] += alone
                continue
            tokens = sequence.token_ids()
            cache_sequence = open_sequence(sequence, tokens)
            found = cache_sequence.num_computed_tokens
            sequence.waits_for = under_way.find(sequence.request, tokens, found)
            if sequence.waits_for is not None:
                cache.close(cache_sequence)
                continue
            stop = self._loads.num_worth_loading(sequence, found)
            if stop == found:
                sequence.search = None  # better computed
                cache.close(cache_sequence)
                promised += alone
                promised_to[owner_id] += alone
                continue
            is_first = not (running or self.sequences)
            num_blocks = cache.num_blocks_needed([cache_sequence], [stop - found])
            num_blocks += cache.blocks_later(sequence.num_tokens, stop)
            limit = None if is_first else self._share.waits_for(owner_id, num_blocks, promised_to[owner_id])
            if limit is not None:
                cache.close(cache_sequence)
                short.add(owner_id)
                promised += num_blocks if limit == "others" else 0
                continue
            plan = None
            if is_first or promised + num_blocks <= cache.num_free_blocks:
                plan = self._reserve(cache_sequence, stop - found)
            if plan is None:
                cache.close(cache_sequence)
                promised += alone
                promised_to[owner_id] += alone
                continue
            try:
                self._loads.begin(sequence, cache_sequence, plan, stop)
            except (
                CapacityError
            ):  # the system has no memory behind the blocks now: it is computed, if that finds some
                cache.close(cache_sequence)
                sequence.search = None
                return
            waiting.remove(sequence)
            sequence.cache_sequence, sequence.num_computed = cache_sequence, found
            sequence.state = SequenceStatus.LOADING
            insort(self.sequences, sequence, key=lambda other: other.key)
            under_way.add(sequence, tokens)
            later = cache.blocks_later(sequence.num_tokens, stop)
            promised += later
            promised_to[owner_id] += later

    def _reserve(self, cache_sequence: CacheSequence, num_tokens: int) -> StepPlan | None:
        """The plan for so many tokens; None where there is no room."""
        plan = self._cache.reserve([cache_sequence], [num_tokens])
        if plan is not None and self._on_reserved is not None:
            self._on_reserved()
        return plan

    def land(self, num_seats: int) -> list[RequestSequence]:
        """Takes out, in order, at most `num_seats` whose load has ended; what has arrived of each is committed."""
        arrived = [s for s in self.sequences if s.load is not None and s.load.done][: max(0, num_seats)]
        for sequence in arrived:
            self.end(sequence)
        return arrived

    def end(self, sequence: RequestSequence) -> None:
        """Takes a sequence out, its load stopped if it has not ended; its sequence stays open."""
        by_tier = self._loads.finish(sequence)
        self.sequences.remove(sequence)
        if sequence.request.started_s is None:
            sequence.request.num_tier_tokens = by_tier
