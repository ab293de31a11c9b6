"""`LoadingQueue`: the sequences whose prefix is being loaded from a tier.

Part of the scheduler, which decides what runs. A sequence here has an open cache sequence with its blocks reserved. A
load begins while the sequence waits, even without a free place in the batch. It takes no block that an earlier sequence
of the queue needs, nor one that its tenant's quota or another tenant's floor forbids. A sequence that waits for its own
tenant's blocks does not delay other tenants.

Invariants
    Q1  `sequences` is sorted by `RequestSequence.key`; each is LOADING, with an open sequence and a load.

Cost: `start` O(examined sequences + their prompts) while a waiting sequence has content in a tier, else nothing.
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

_MAX_EXAMINED = 64  # waiting sequences that one step examines


class LoadingQueue:
    """See the module's text. on_reserved: called after blocks are reserved and before they are written."""

    def __init__(
        self,
        cache: KVCache,
        loads: TierLoads,
        memory_limits: MemoryLimits,
        on_reserved: Callable[[], None] | None,
    ) -> None:
        self._cache = cache
        self._memory_limits = memory_limits
        self._loads = loads
        self._on_reserved = on_reserved
        self.sequences: list[RequestSequence] = []

    def search(self, sequence: RequestSequence) -> None:
        """Starts the search of the tiers for the prefix of a sequence that begins to wait."""
        self._loads.search(sequence, is_wanted=sequence.request.options.only_loads)

    def may_start(self, waiting: list[RequestSequence]) -> bool:
        """True if a tier has content of a waiting sequence. Marks the finished searches as seen, for the whole step: a
        sequence whose search ends later in the step would otherwise be computed although a tier has it."""
        searches = [sequence.search for sequence in waiting[:_MAX_EXAMINED] if sequence.search is not None]
        for search in searches:
            search.is_seen = search.done
        return any(search.is_seen and search.stored for search in searches)

    def start(
        self,
        waiting: list[RequestSequence],
        running: list[RequestSequence],
        promised: int,
        promised_to: Counter[int],
        max_loading: int,
        open_sequence: Callable[[RequestSequence, np.ndarray], CacheSequence],
    ) -> None:
        """Moves the waiting sequences for which a load pays to this queue, up to `max_loading` in all.

        promised: free blocks that running sequences will need. promised_to: the same by owner, if owners have limits;
        changed here.
        """
        cache = self._cache
        short: set[int] = set()  # owners with a sequence that waits for blocks: none of theirs overtakes it
        under_way = SharedPrefills(running + self.sequences, cache.block_size)
        for sequence in waiting[:_MAX_EXAMINED]:
            if promised >= cache.num_free_blocks or len(self.sequences) >= max_loading:
                return
            if not sequence.is_searched or sequence.waits_for_commit:
                continue
            search, owner_id = sequence.search, sequence.request.owner_id
            alone = cache.num_blocks_for(sequence.num_tokens)
            if owner_id in short:
                continue
            if search is None or sequence.swapped is not None or not search.stored:
                if self._memory_limits.blocking_limit(owner_id, alone, promised_to[owner_id]) == "itself":
                    short.add(owner_id)
                    continue
                promised += alone
                promised_to[owner_id] += alone
                continue
            tokens = sequence.token_ids()
            cache_sequence = open_sequence(sequence, tokens)
            found = cache_sequence.num_computed_tokens
            if sequence.request.scores is None:
                sequence.waits_for = under_way.find(sequence.request, tokens, found)
            if sequence.waits_for is not None:
                cache.close(cache_sequence)
                continue
            stop = self._loads.num_worth_loading(
                sequence, found, is_wanted=sequence.request.options.only_loads
            )
            if stop == found:
                sequence.search = None  # computing is faster
                cache.close(cache_sequence)
                promised += alone
                promised_to[owner_id] += alone
                continue
            is_first = not (running or self.sequences)
            num_blocks = cache.num_blocks_needed([cache_sequence], [stop - found])
            num_blocks += cache.blocks_later(sequence.num_tokens, stop)
            limit = (
                None
                if is_first
                else self._memory_limits.blocking_limit(owner_id, num_blocks, promised_to[owner_id])
            )
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
            except CapacityError:  # the system has no memory for the blocks: the sequence is computed instead
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
        """The plan for `num_tokens` tokens; None without room."""
        plan = self._cache.reserve([cache_sequence], [num_tokens])
        if plan is not None and self._on_reserved is not None:
            self._on_reserved()
        return plan

    def pop_loaded(self, num_seats: int) -> list[RequestSequence]:
        """Removes the first `num_seats` sequences whose load has ended; their loaded tokens are committed."""
        arrived = [s for s in self.sequences if s.load is not None and s.load.done][: max(0, num_seats)]
        for sequence in arrived:
            self.end(sequence)
        return arrived

    def end(self, sequence: RequestSequence) -> None:
        """Removes a sequence and stops its load if that still runs; the cache sequence stays open."""
        spans = self._loads.finish(sequence)
        self.sequences.remove(sequence)
        if sequence.request.started_s is None:
            sequence.request.loaded_spans = spans
