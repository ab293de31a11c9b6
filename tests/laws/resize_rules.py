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
        block_ids = same(lists)
        after = self.cache.stats()
        assert len(block_ids) == max(0, self.num_blocks - wanted)
        assert not self.given_up & set(block_ids)
        assert (after["num_blocks"], after["held"], after["in_flight"]) == (
            wanted,
            before["held"],
            before["in_flight"],
        )
        if len(block_ids) <= before["free"]:
            assert after["evicted_blocks"] == before["evicted_blocks"], "free blocks go first"
        self.lose(block_ids)
        pool = self.caches[self.backends.index("python")]._manager.blocks.pool
        self.given_up = frozenset(pool.given_up)
        slots = self.storage.slots
        grown = np.full((pool.num_ids - len(slots), slots.shape[1]), POISON, np.int64)
        self.storage.slots = np.concatenate([slots, grown])
        self.num_blocks = wanted

    def lose(self, block_ids: list[int]) -> None:
        """Their memory is given back."""
        self.storage.slots[block_ids] = POISON

    @precondition(lambda self: hasattr(self, "caches"))
    @rule(share_kept=st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    def trim(self, share_kept: float) -> None:
        """No more is left than the share of what nobody holds, and all the rest is free."""
        before = self.cache.stats()
        block_ids = same(self.call(lambda _, cache: cache.trim(share_kept).tolist()))
        after = self.cache.stats()
        assert after["cached"] <= int(share_kept * before["cached"])
        assert after["cached"] == before["cached"] or share_kept < 1
        assert after["free"] == len(set(block_ids) - self.given_up)
        assert after["free"] + after["cached"] == before["free"] + before["cached"]
        assert self.given_up <= set(block_ids)
        for state in ("num_blocks", "held", "in_flight", "pinned"):
            assert after[state] == before[state]
        self.has_dropped |= after["cached"] < before["cached"]
        self.lose(block_ids)
