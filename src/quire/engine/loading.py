"""The samples whose prefix comes from a tier just now: who begins, who has arrived, who is stopped.

Part of the scheduler, which decides who runs. A sample here has an open sequence with its units reserved. It begins
while it waits, whether or not there is a seat for it, but takes no unit that one before it in the queue would need, nor
one that its own tenant's quota or another's floor keeps from it. One that waits for its own tenant's units delays no
other tenant's.

Invariants
    Q1  `samples` is sorted by `Sample.key`; each is LOADING, with an open sequence and a load.

Cost: `start` O(samples looked at + their prompts) while some waiting one has something in a tier, else nothing.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from quire.engine.fair_share import FairShare
from quire.engine.prefixes_under_way import PrefixesUnderWay
from quire.engine.request import Sample, SampleState
from quire.engine.tier_loads import TierLoads
from quire.errors import CapacityError

__all__ = ["LoadingQueue"]

_MAX_LOOKED_AT = 64  # waiting samples that one step looks at


class LoadingQueue:
    """See the module's text. on_reserved: called when units have been handed out that nothing was written to yet."""

    def __init__(
        self, cache: Any, loads: TierLoads, share: FairShare, on_reserved: Callable[[], None]
    ) -> None:
        self._cache = cache
        self._share = share
        self._loads = loads
        self._on_reserved = on_reserved
        self.samples: list[Sample] = []

    def search(self, sample: Sample) -> None:
        """Begins to look up what the tiers have of a sample that begins to wait."""
        self._loads.search(sample)

    def may_start(self, waiting: list[Sample]) -> bool:
        """Whether a tier has something of one of those who wait."""
        return any(
            sample.search is not None and sample.search.done and sample.search.stored
            for sample in waiting[:_MAX_LOOKED_AT]
        )

    def start(
        self,
        waiting: list[Sample],
        running: list[Sample],
        promised: int,
        promised_to: Counter[int],
        most: int,
        open_sequence: Callable[[Sample, np.ndarray], Any],
    ) -> None:
        """Moves waiting samples here that had better be loaded, at most `most` being here then.

        promised: units that are free and not for them: what those who run will need. promised_to: by account, where
        accounts have limits; changed here.
        """
        cache = self._cache
        short: set[int] = set()  # accounts of which one waits for units: nobody of them overtakes it
        under_way = PrefixesUnderWay(running + self.samples, cache.block_size)
        for sample in waiting[:_MAX_LOOKED_AT]:
            if promised >= cache.num_free_blocks or len(self.samples) >= most:
                return
            if not sample.is_searched or sample.waits_for_commit:
                continue
            search, account = sample.search, sample.request.account
            alone = cache.units_alone(sample.num_tokens)
            if account in short:
                continue
            if search is None or sample.parked is not None or not search.stored:
                if self._share.waits_for(account, alone, promised_to[account]) == "itself":
                    short.add(account)
                    continue
                promised += alone
                promised_to[account] += alone
                continue
            tokens = sample.token_ids()
            sequence = open_sequence(sample, tokens)
            found = sequence.num_computed_tokens
            sample.waits_for = under_way.find(sample.request, tokens, found)
            if sample.waits_for is not None:
                cache.close(sequence)
                continue
            stop = self._loads.num_worth_loading(sample, found)
            if stop == found:
                sample.search = None  # better computed
                cache.close(sequence)
                promised += alone
                promised_to[account] += alone
                continue
            is_first = not (running or self.samples)
            units = cache.num_blocks_needed([sequence], [stop - found])
            units += cache.units_later(sample.num_tokens, stop)
            limit = None if is_first else self._share.waits_for(account, units, promised_to[account])
            if limit is not None:
                cache.close(sequence)
                short.add(account)
                promised += units if limit == "others" else 0
                continue
            plan = None
            if is_first or promised + units <= cache.num_free_blocks:
                plan = self._reserve(sequence, stop - found)
            if plan is None:
                cache.close(sequence)
                promised += alone
                promised_to[account] += alone
                continue
            try:
                self._loads.begin(sample, sequence, plan, stop)
            except (
                CapacityError
            ):  # the system has no memory behind the units now: it is computed, if that finds some
                cache.close(sequence)
                sample.search = None
                return
            waiting.remove(sample)
            sample.sequence, sample.num_computed = sequence, found
            sample.state = SampleState.LOADING
            insort(self.samples, sample, key=lambda other: other.key)
            under_way.add(sample, tokens)
            later = cache.units_later(sample.num_tokens, stop)
            promised += later
            promised_to[account] += later

    def _reserve(self, sequence: Any, num_tokens: int) -> Any:
        """The plan for so many tokens; None where there is no room."""
        plan = self._cache.reserve([sequence], [num_tokens])
        if plan is not None:
            self._on_reserved()
        return plan

    def land(self, num_seats: int) -> list[Sample]:
        """Takes out, in order, at most `num_seats` whose load has ended; what has arrived of each is committed."""
        arrived = [s for s in self.samples if s.load is not None and s.load.done][: max(0, num_seats)]
        for sample in arrived:
            self.end(sample)
        return arrived

    def end(self, sample: Sample) -> None:
        """Takes a sample out, its load stopped if it has not ended; its sequence stays open."""
        by_tier = self._loads.finish(sample)
        self.samples.remove(sample)
        if sample.request.started_s is None:
            sample.request.num_tier_tokens = by_tier
