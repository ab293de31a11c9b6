"""`Admission`: which waiting samples join the next step, and the room that those who run need for what they have begun.

Part of the scheduler, which decides who is preempted. A waiting sample does not overtake one that was refused for want
of memory, unless that one's own account alone is short of it. Who waits for another's commit of the very tokens that
it needs, or for a tier's answer, is passed over.

Invariants
    A1  `waiting` and `running` stay sorted by `Sample.key`; who is admitted has an open sequence and is RUNNING.
    A2  the first of all may take what there is, in smaller chunks if need be; any other leaves a margin, and room for
        the rest of the prompts of those before it.

Cost: `admit` O(running + samples looked at + their prompts).
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from quire.engine.fair_share import FairShare
from quire.engine.preemption import Parking
from quire.engine.prefixes_under_way import PrefixesUnderWay
from quire.engine.request import Sample, SampleState

__all__ = ["MAX_LOOKED_AT", "Admission"]

MAX_LOOKED_AT = 1024  # waiting samples that one step looks at


class Admission:
    """See the module's text. watermark: share of the units an admission must leave while others run.

    open_sequence: of a sample and its tokens, in the cache.
    """

    def __init__(
        self,
        cache: Any,
        share: FairShare,
        parking: Parking,
        *,
        watermark: float,
        open_sequence: Callable[[Sample, np.ndarray], Any],
    ) -> None:
        self._cache = cache
        self._share = share
        self._parking = parking
        self._watermark = watermark
        self._open = open_sequence

    @property
    def margin(self) -> int:
        """Units that an admission must leave while others run."""
        return self._cache.margin(self._watermark)

    def admit(
        self,
        waiting: list[Sample],
        running: list[Sample],
        chosen: list[tuple[Sample, int]],
        *,
        is_first: bool,
        room: int,
        budget: int,
        chunk_limit: int,
    ) -> list[tuple[Sample, int]]:
        """Waiting samples that join the step, opened and moved to `running`, each with the tokens it computes.

        chosen: the running ones and their tokens in it. is_first: nobody runs or loads. room: samples at most. budget:
        tokens at most, chunk_limit: of one.
        """
        if not waiting or room <= 0 or budget <= 0:
            return []
        cache, margin = self._cache, self.margin
        taken = self.units_to_come(chosen)
        being_computed = PrefixesUnderWay(running, cache.block_size) if cache.prefix_caching else None
        admitted: list[tuple[Sample, int]] = []
        passed: list[Sample] = []  # wait for another's commit, or for their own account's units
        taken_by = self.taken_by_account(chosen)
        short: set[int] = set()  # accounts of which one waits for units: nobody of them overtakes it
        num_looked_at = 0
        for sample in waiting[:MAX_LOOKED_AT]:
            if not room or not budget:
                break
            num_looked_at += 1
            request = sample.request
            account = request.account
            if not sample.is_searched or sample.waits_for_commit or account in short:
                passed.append(sample)
                continue
            tokens = sample.token_ids()
            sequence = self._open(sample, tokens)
            num_computed = sequence.num_computed_tokens
            if being_computed is not None and sample.parked is None:
                sample.waits_for = being_computed.find(request, tokens, num_computed)
                if sample.waits_for is not None:
                    cache.close(sequence)
                    passed.append(sample)
                    continue
            # What was parked comes back at once, whatever the budget.
            known = max(num_computed, self._parking.num_tokens(sample))
            more = min(len(tokens) - known, budget, chunk_limit)
            n = known - num_computed + more
            if known > num_computed:
                now = self._parking.num_blocks_needed(sample, sequence, more)
            else:
                now = cache.num_blocks_needed([sequence], [n])
            units = now + cache.units_later(len(tokens), num_computed + n)
            # The very first may take what there is, in smaller chunks if need be; others leave a margin (A2).
            if admitted or not is_first:
                waits_for = self._share.waits_for(account, units, taken_by[account])
                if waits_for is not None:
                    cache.close(sequence)
                    short.add(account)
                    passed.append(sample)
                    taken += units if waits_for == "others" else 0
                    continue
                if taken + units + margin > cache.num_free_blocks or now > cache.largest_free_blocks:
                    cache.close(sequence)
                    num_looked_at -= 1
                    break
            if known > num_computed:
                restored = self._parking.restore(sample, sequence)
                if restored is None:
                    cache.close(sequence)
                    sequence = self._open(sample, tokens)
                    restored = sequence.num_computed_tokens
                num_computed = restored
                n = min(len(tokens) - num_computed, budget, chunk_limit)
                now = cache.num_blocks_needed([sequence], [n])  # what has come back is held by now
                units = now + cache.units_later(len(tokens), num_computed + n)
            taken += units
            taken_by[account] += units
            room -= 1
            budget -= n
            sample.sequence = sequence
            sample.num_computed = num_computed
            sample.state = SampleState.RUNNING
            if being_computed is not None:
                being_computed.add(sample, tokens)
            admitted.append((sample, n))
        if admitted:
            waiting[:num_looked_at] = passed
            for sample, _ in admitted:
                insort(running, sample, key=lambda other: other.key)
        return admitted

    def units_to_come(self, chosen: list[tuple[Sample, int]]) -> int:
        """Units that this step of the running samples takes, and that the rest of their prompts will."""
        if not chosen:
            return 0
        sequences = [sample.sequence for sample, _ in chosen]
        cache = self._cache
        units = cache.num_blocks_needed(sequences, [n for _, n in chosen])
        return units + sum(cache.units_later(s.num_tokens, s.num_computed + n) for s, n in chosen)

    def taken_by_account(self, chosen: list[tuple[Sample, int]]) -> Counter[int]:
        """`units_to_come` of each account, where accounts have limits."""
        taken: Counter[int] = Counter()
        if self._share.is_limited:
            for account in {sample.request.account for sample, _ in chosen}:
                own = [(sample, n) for sample, n in chosen if sample.request.account == account]
                taken[account] = self.units_to_come(own)
        return taken
