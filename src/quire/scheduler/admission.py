"""`Admission`: which waiting sequences join the next step, and the room that those who run need for what they have
begun.

Part of the scheduler, which decides who is preempted. A waiting sequence does not overtake one that was refused for
want of memory, unless that one's own owner alone is short of it. Who waits for another's commit of the very tokens that
it needs, or for a tier's answer, is passed over.

Invariants
    A1  `waiting` and `running` stay sorted by `RequestSequence.key`; who is admitted has an open sequence and is
    RUNNING.
    A2  the first of all may take what there is, in smaller chunks if need be; any other leaves a margin, and room for
        the rest of the prompts of those before it.

Cost: `admit` O(running + sequences looked at + their prompts).
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

from quire.cache.protocol import CacheSequence, KVCache
from quire.offload.swap import Swap
from quire.scheduler.request import RequestSequence, SequenceStatus
from quire.scheduler.shared_prefills import SharedPrefills
from quire.scheduler.tenant_quotas import MemoryLimits

__all__ = ["MAX_LOOKED_AT", "Admission"]

MAX_LOOKED_AT = 1024  # waiting sequences that one step looks at


class Admission:
    """See the module's text. watermark: share of the blocks an admission must leave while others run.

    open_sequence: of a sequence and its tokens, in the cache.
    """

    def __init__(
        self,
        cache: KVCache,
        share: MemoryLimits,
        swap: Swap,
        *,
        watermark: float,
        open_sequence: Callable[[RequestSequence, np.ndarray], CacheSequence],
    ) -> None:
        self._cache = cache
        self._share = share
        self._swap = swap
        self._watermark = watermark
        self._open = open_sequence
        self.refused: RequestSequence | None = None  # by the last `admit`, for want of a place or of memory
        self.short_owners: set[int] = set()  # of which one waits for blocks since the last `admit`

    @property
    def margin(self) -> int:
        """Blocks that an admission must leave while others run."""
        return self._cache.margin(self._watermark)

    def admit(
        self,
        waiting: list[RequestSequence],
        order: Iterable[RequestSequence],
        running: list[RequestSequence],
        chosen: list[tuple[RequestSequence, int]],
        *,
        is_first: bool,
        room: int,
        budget: int,
        chunk_limit: int,
    ) -> list[tuple[RequestSequence, int]]:
        """Waiting sequences that join the step, opened and moved to `running`, each with the tokens it computes.

        order: the first `MAX_LOOKED_AT` of the waiting ones, in the order in which they are to join. chosen: the
        running ones and their tokens in it. is_first: nobody runs or loads. room: sequences at most.
        budget: tokens at most, chunk_limit: of one.
        """
        self.refused = None
        self.short_owners = short = set()  # nobody of them overtakes the one that waits
        if not waiting or budget <= 0:
            return []
        if room <= 0:
            ready = (sequence for sequence in order if sequence.is_searched and not sequence.waits_for_commit)
            self.refused = next(ready, None)
            return []
        cache, margin = self._cache, self.margin
        taken = self.blocks_to_come(chosen)
        being_computed = SharedPrefills(running, cache.block_size) if cache.prefix_caching else None
        admitted: list[tuple[RequestSequence, int]] = []
        taken_by = self.taken_by_owner(chosen)
        for sequence in order:
            if not room or not budget:
                break
            request = sequence.request
            owner_id = request.owner_id
            if not sequence.is_searched or sequence.waits_for_commit or owner_id in short:
                continue  # passed over: for another's commit, or for its own owner's blocks
            tokens = sequence.token_ids()
            cache_sequence = self._open(sequence, tokens)
            num_computed = cache_sequence.num_computed_tokens
            if being_computed is not None and sequence.swapped is None:
                sequence.waits_for = being_computed.find(request, tokens, num_computed)
                if sequence.waits_for is not None:
                    cache.close(cache_sequence)
                    continue
            # What was swapped out comes back at once, whatever the budget.
            known = max(num_computed, self._swap.num_tokens(sequence))
            more = min(len(tokens) - known, budget, chunk_limit)
            n = known - num_computed + more
            if known > num_computed:
                now = self._swap.num_blocks_needed(sequence, cache_sequence, more)
            else:
                now = cache.num_blocks_needed([cache_sequence], [n])
            num_blocks = now + cache.blocks_later(len(tokens), num_computed + n)
            # The very first may take what there is, in smaller chunks if need be; others leave a margin (A2).
            if admitted or not is_first:
                waits_for = self._share.waits_for(owner_id, num_blocks, taken_by[owner_id])
                if waits_for is not None:
                    cache.close(cache_sequence)
                    short.add(owner_id)
                    taken += num_blocks if waits_for == "others" else 0
                    continue
                if taken + num_blocks + margin > cache.num_free_blocks or now > cache.largest_free_blocks:
                    cache.close(cache_sequence)
                    self.refused = sequence
                    break
            if known > num_computed:
                restored = self._swap.restore(sequence, cache_sequence)
                if restored is None:
                    cache.close(cache_sequence)
                    cache_sequence = self._open(sequence, tokens)
                    restored = cache_sequence.num_computed_tokens
                num_computed = restored
                n = min(len(tokens) - num_computed, budget, chunk_limit)
                now = cache.num_blocks_needed([cache_sequence], [n])  # what has come back is held by now
                num_blocks = now + cache.blocks_later(len(tokens), num_computed + n)
            taken += num_blocks
            taken_by[owner_id] += num_blocks
            room -= 1
            budget -= n
            sequence.cache_sequence = cache_sequence
            sequence.num_computed = num_computed
            sequence.state = SequenceStatus.RUNNING
            if being_computed is not None:
                being_computed.add(sequence, tokens)
            admitted.append((sequence, n))
        if admitted:
            waiting[:MAX_LOOKED_AT] = [
                s for s in waiting[:MAX_LOOKED_AT] if s.state is SequenceStatus.WAITING
            ]
            for sequence, _ in admitted:
                insort(running, sequence, key=lambda other: other.key)
        return admitted

    def blocks_to_come(self, chosen: list[tuple[RequestSequence, int]]) -> int:
        """Blocks that this step of the running sequences takes, and that the rest of their prompts will."""
        if not chosen:
            return 0
        cache_sequences = [sequence.cache_sequence for sequence, _ in chosen]
        cache = self._cache
        num_blocks = cache.num_blocks_needed(cache_sequences, [n for _, n in chosen])
        return num_blocks + sum(cache.blocks_later(s.num_tokens, s.num_computed + n) for s, n in chosen)

    def taken_by_owner(self, chosen: list[tuple[RequestSequence, int]]) -> Counter[int]:
        """`blocks_to_come` of each owner, where owners have limits."""
        taken: Counter[int] = Counter()
        if self._share.is_limited:
            for owner_id in {sequence.request.owner_id for sequence, _ in chosen}:
                own = [(sequence, n) for sequence, n in chosen if sequence.request.owner_id == owner_id]
                taken[owner_id] = self.blocks_to_come(own)
        return taken
