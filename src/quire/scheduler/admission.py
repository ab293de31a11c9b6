"""`Admission`: chooses the waiting sequences that join the next step; counts the blocks that running ones still need.

Part of the scheduler, which decides about preemption. A waiting sequence does not overtake one that was refused for
lack of memory, unless only the refused sequence's owner is short of it. A sequence is skipped while it waits for
another sequence to commit the tokens that it needs, or for a tier's answer.

Invariants
    A1  `waiting` and `running` stay sorted by `RequestSequence.key`; an admitted sequence has an open cache sequence
        and is RUNNING.
    A2  the first sequence may take all free blocks, in smaller chunks if need be; each later one leaves a margin and
        room for the rest of the prompts before it.
    A3  a sequence that its quota holds is admitted when its owner runs nothing else, even if the quota has no block for
        a copy: then it finds whole blocks alone.

Cost: `admit` O(running + examined sequences + their prompts).
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

from quire.cache.protocol import CacheSequence, KVCache
from quire.offload.swap import Swap
from quire.scheduler.prompt_chunks import PromptChunks
from quire.scheduler.request import RequestSequence, SequenceStatus
from quire.scheduler.shared_prefills import SharedPrefills
from quire.scheduler.tenant_quotas import MemoryLimits

__all__ = ["MAX_EXAMINED", "Admission"]

MAX_EXAMINED = 1024  # waiting sequences that one step examines


class Admission:
    """See the module's text. watermark: share of the blocks that an admission must leave while others run.

    open_sequence: opens a cache sequence for a sequence and its tokens.
    """

    def __init__(
        self,
        cache: KVCache,
        memory_limits: MemoryLimits,
        swap: Swap,
        *,
        watermark: float,
        open_sequence: Callable[[RequestSequence, np.ndarray], CacheSequence],
    ) -> None:
        self._cache = cache
        self._memory_limits = memory_limits
        self._swap = swap
        self._watermark = watermark
        self._open = open_sequence
        self.refused: RequestSequence | None = None  # by the last `admit`, for lack of a place or of memory
        self.short_owners: set[int] = set()  # owners with a sequence that lacked blocks in the last `admit`

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
        chunks: PromptChunks,
    ) -> list[tuple[RequestSequence, int]]:
        """Opens the waiting sequences that join the step and moves them to `running`; each with its number of tokens.

        order: the first `MAX_EXAMINED` waiting sequences, in the order of admission. chosen: the running sequences
        of the step and their numbers of tokens. is_first: no sequence runs or loads. room: the most sequences.
        chunks: gives each its tokens.
        """
        self.refused = None
        self.short_owners = short = set()  # no sequence of these owners overtakes the waiting one
        if not waiting or chunks.budget <= 0:
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
            if not room or not chunks.budget:
                break
            request = sequence.request
            owner_id = request.owner_id
            if not sequence.is_searched or sequence.waits_for_commit or owner_id in short:
                continue  # waits for a tier, for another's commit or for its owner's blocks
            if not chunks.has_room(sequence):
                continue
            tokens = sequence.token_ids()
            cache_sequence = self._open(sequence, tokens)
            num_computed = cache_sequence.num_computed_tokens
            # A scored prompt needs its own rows: the K and V of another's do not help it.
            if being_computed is not None and sequence.swapped is None and request.scores is None:
                sequence.waits_for = being_computed.find(request, tokens, num_computed)
                if sequence.waits_for is not None:
                    cache.close(cache_sequence)
                    continue
            # Swapped-out tokens come back in one step, regardless of the budget.
            known = max(num_computed, self._swap.num_tokens(sequence))
            more = chunks.most(sequence, len(tokens) - known)
            if not more:  # other prompts have all tokens, or scored rows, that the step has for such
                sequence.is_long |= chunks.withholds(len(tokens) - known)
                cache.close(cache_sequence)
                continue
            n = known - num_computed + more
            if known > num_computed:
                now = self._swap.num_blocks_needed(sequence, cache_sequence, more)
            else:
                now = cache.num_blocks_needed([cache_sequence], [n])
            num_blocks = now + cache.blocks_later(len(tokens), num_computed + n)
            # Only the first sequence may take all free blocks (A2).
            if admitted or not is_first:
                limit = self._memory_limits.blocking_limit(owner_id, num_blocks, taken_by[owner_id])
                if limit is not None:
                    sequence.is_long = False  # it waits for blocks
                    if limit == "itself" and all(other.request.owner_id != owner_id for other in running):
                        # The copy of the hit's partial block may be the one too many (A3).
                        sequence.most_found = num_computed - num_computed % cache.block_size
                    cache.close(cache_sequence)
                    short.add(owner_id)
                    taken += num_blocks if limit == "others" else 0
                    continue
                if taken + num_blocks + margin > cache.num_free_blocks or now > cache.largest_free_blocks:
                    sequence.is_long = False
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
                n = chunks.most(sequence, len(tokens) - num_computed)
                now = cache.num_blocks_needed([cache_sequence], [n])  # the restored blocks are held by now
                num_blocks = now + cache.blocks_later(len(tokens), num_computed + n)
            taken += num_blocks
            taken_by[owner_id] += num_blocks
            room -= 1
            chunks.charge(sequence, len(tokens) - num_computed, n)
            sequence.cache_sequence = cache_sequence
            sequence.num_computed = num_computed
            sequence.state = SequenceStatus.RUNNING
            if being_computed is not None:
                being_computed.add(sequence, tokens)
            admitted.append((sequence, n))
        if admitted:
            waiting[:MAX_EXAMINED] = [s for s in waiting[:MAX_EXAMINED] if s.state is SequenceStatus.WAITING]
            for sequence, _ in admitted:
                insort(running, sequence, key=lambda other: other.key)
        return admitted

    def blocks_to_come(self, chosen: list[tuple[RequestSequence, int]]) -> int:
        """Blocks that the running sequences need in this step and for the rest of their prompts."""
        if not chosen:
            return 0
        cache, now = self._cache, [(sequence.cache_sequence, n) for sequence, n in chosen if n]
        num_blocks = cache.num_blocks_needed([opened for opened, _ in now], [n for _, n in now])
        return num_blocks + sum(cache.blocks_later(s.num_tokens, s.num_computed + n) for s, n in chosen)

    def taken_by_owner(self, chosen: list[tuple[RequestSequence, int]]) -> Counter[int]:
        """`blocks_to_come` by owner; empty if no owner has limits."""
        taken: Counter[int] = Counter()
        if self._memory_limits.is_limited:
            for owner_id in {sequence.request.owner_id for sequence, _ in chosen}:
                of_owner = [(sequence, n) for sequence, n in chosen if sequence.request.owner_id == owner_id]
                taken[owner_id] = self.blocks_to_come(of_owner)
        return taken
