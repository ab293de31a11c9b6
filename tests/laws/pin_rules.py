"""Rules for the laws of the cache: pins made, hit and ended at any time; all of them stay found meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from laws.cache_model import WHICH, begins_with, same
from laws.owner_rules import OwnerMachine
from support.fake_storage import Content, num_common

from quire.cache.pins import Pin
from quire.errors import CapacityError


class PinMachine(OwnerMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pinned: list[tuple[list[Pin], Content]] = []

    def tick(self) -> float:
        return self.now

    @precondition(lambda self: self.committed and self.cache.prefix_caching)
    @rule(which=WHICH, cut=st.integers(0, 6), ttl=st.sampled_from([None, 3.0, 8.0]))
    def pin(self, which: int, cut: int, ttl: float | None) -> None:
        content = self.committed[-1 - which % len(self.committed)].cut(cut)
        where: dict[str, Any] = {"namespace": content.namespace, "extra_keys": content.keys}
        for cache in self.caches:
            if not len(cache.pins):
                cache.pins.use_clock(self.tick)
        longer = [*content.tokens, 0]
        found = same(self.call(lambda _, cache: cache.match(longer, **where).num_tokens))
        if found < len(content.tokens) or not content.tokens:
            # More than the pool holds is refused before anybody looks whether it is there.
            errors = (ValueError, CapacityError)
            self.refused(lambda _, cache: cache.pins.add(content.tokens, **where), errors)
            return
        owner_id = self.options.get("owner_id", 0)
        try:
            pins = self.call(
                lambda _, cache: cache.pins.add(content.tokens, owner_id=owner_id, ttl_s=ttl, **where)
            )
        except CapacityError:  # windows are counted as if nothing in them were shared: both refuse alike
            for cache in self.caches:
                with pytest.raises(CapacityError):
                    cache.pins.add(content.tokens, owner_id=owner_id, **where)
            return
        same([pin.block_ids for pin in pins])
        self.pinned.append((pins, content))

    @precondition(lambda self: self.pinned)
    @rule(which=WHICH)
    def unpin(self, which: int) -> None:
        pins, _ = self.pinned.pop(which % len(self.pinned))
        self.call(lambda i, cache: cache.pins.remove(pins[i]))

    @rule(seconds=st.sampled_from([-50.0, 0.5, 2.0, 5.0]))
    def time_goes_by(self, seconds: float) -> None:
        """Backwards too."""
        if hasattr(self, "caches"):
            self.now += seconds
            self.call(lambda _, cache: cache.pins.expire())
            left = same([len(cache.pins) for cache in self.caches])
            there = {id(pin) for pin in self.cache.pins}
            self.pinned = [entry for entry in self.pinned if id(entry[0][0]) in there]
            assert len(self.pinned) == left

    def reset(self, really: bool) -> None:
        while really and self.pinned:
            self.unpin(0)
        super().reset(really)

    def has_nothing_kept(self) -> bool:
        return super().has_nothing_kept() and not self.pinned

    def is_pinned(self, head: Content) -> bool:
        num_before = max(0, len(head.tokens) - 1) // self.size * self.size
        for _, content in self.pinned:
            ends_within = num_common(content, head) == len(content.tokens) > num_before
            if begins_with(content, head) or ends_within:
                return True
        return super().is_pinned(head)

    @invariant()
    def what_is_pinned_is_found(self) -> None:
        for _, content in self.pinned:
            longer = Content(content.namespace, [*content.tokens, 0], content.keys)
            assert self.expect_match(longer) >= len(content.tokens)

    @invariant()
    def the_states_add_up(self) -> None:
        if hasattr(self, "caches"):
            stats = self.cache.stats()
            states = ("free", "cached", "held", "in_flight", "pinned")
            assert sum(stats[state] for state in states) == self.num_blocks
            block_ids = set().union(*(pins[0].block_ids for pins, _ in self.pinned))
            assert stats["pinned"] == len(block_ids)
