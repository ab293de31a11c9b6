"""A rule for the laws of the cache: the pool grows and shrinks between any two other calls."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from laws.cache_machine import CacheMachine
from laws.cache_model import same
from support.fake_storage import POISON


class ResizingMachine(CacheMachine):
    given_up: frozenset[int] = frozenset()

    @precondition(lambda self: hasattr(self, "caches"))
    @rule(change=st.sampled_from([-400, -7, -2, -1, -1, 0, 1, 1, 2, 7]))
    def resize(self, change: int) -> None:
        """What is in use stays; what is given up is named by nobody until the pool grows again."""
        before = self.cache.stats()
        wanted = max(1, self.num_blocks + change)
        if self.num_blocks - wanted > before["free"] + before["cached"]:
            self.refused(lambda _, cache: cache.resize(wanted))
            return
        lists = self.call(lambda _, cache: cache.resize(wanted).tolist())
        units = same(lists)
        after = self.cache.stats()
        assert len(units) == max(0, self.num_blocks - wanted)
        assert not self.given_up & set(units)
        assert (after["num_blocks"], after["held"], after["leased"]) == (
            wanted,
            before["held"],
            before["leased"],
        )
        if len(units) <= before["free"]:
            assert after["evicted_blocks"] == before["evicted_blocks"], "free units go first"
        slots = self.storage.slots.reshape(-1, self.size)
        slots[units] = POISON
        pool = self.caches[self.backends.index("python")]._manager.blocks.pool
        self.given_up = frozenset(pool.given_up)
        grown = np.full((pool.num_ids - len(slots), self.size), POISON, np.int64)
        self.storage.slots = np.concatenate([slots, grown]).reshape(-1)
        self.num_blocks = wanted
