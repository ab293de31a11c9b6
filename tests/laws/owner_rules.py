"""Rules for the laws of the cache: owners and spans, limits changed at any time, events, drop, explain, tree."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from laws.cache_model import TOKENS, WHICH, Open, same
from laws.resize_rules import ResizingMachine

from quire.cache.events import CacheEvent, CacheEvents
from quire.cache.tree_view import STATES, TreeView

ACCOUNTS = range(4)


@dataclass
class Limits:
    floor: int = 0
    quota: int = -1


class OwnerMachine(ResizingMachine):
    def __init__(self) -> None:
        super().__init__()
        self.options: dict[str, int] = {}
        self.limits = {owner_id: Limits() for owner_id in ACCOUNTS}
        self.is_watched = False  # somebody has asked for node ids
        # Full nodes by the events: (parent, namespace, tokens, keys, blocks); None while off.
        self.stored: dict[int, tuple[Any, ...]] | None = None

    # Whose sequences are

    @rule(owner_id=st.sampled_from(ACCOUNTS), cache_priority=st.sampled_from([0, 1, 1, 2]))
    def serve_as(self, owner_id: int, cache_priority: int) -> None:
        """Sequences opened from now on."""
        self.options = {"owner_id": owner_id, "cache_priority": cache_priority}

    def open_options(self) -> dict[str, int]:
        return self.options

    @precondition(lambda self: hasattr(self, "caches"))
    @rule(
        owner_id=st.sampled_from(ACCOUNTS[1:]),
        floor=st.sampled_from([0, 0, 1, 2, 5, 30]),
        more=st.sampled_from([None, None, 0, 1, 4, 40]),
    )
    def set_limits(self, owner_id: int, floor: int, more: int | None) -> None:
        quota = -1 if more is None else max(1, floor + more)
        others = sum(limits.floor for number, limits in self.limits.items() if number != owner_id)
        if others + floor > self.num_blocks:
            self.refused(lambda _, cache: cache.set_limits(owner_id, floor, quota))
            return
        self.call(lambda _, cache: cache.set_limits(owner_id, floor, quota))
        self.limits[owner_id] = Limits(floor, quota)

    @precondition(lambda self: self.history)
    @rule(
        which=WHICH,
        cut=st.integers(0, 12),
        tokens=TOKENS,
        cache_priority=st.sampled_from([0, 1, 2]),
        start=st.sampled_from([0, 0, 3, 8]),
    )
    def set_cache_priority(
        self, which: int, cut: int, tokens: list[int], cache_priority: int, start: int
    ) -> None:
        """Only levels change: no block's content, state or owner."""
        content = self.similar(which, cut, tokens)
        start = min(start, len(content.tokens))
        before = self.cache.stats()
        trees = [self.cache.tree()] if self.is_watched else []
        changes = self.call(
            lambda _, cache: cache.set_cache_priority(
                content.tokens,
                cache_priority,
                start=start,
                namespace=content.namespace,
                extra_keys=content.keys,
            )
        )
        change = same([tuple(change) for change in changes])
        assert self.cache.stats() == before
        if not trees:
            return
        trees.append(self.cache.tree())
        for field in fields(TreeView):
            if field.name != "cache_priorities":
                same([getattr(tree, field.name) for tree in trees])
        old, new = (tree.cache_priorities for tree in trees)
        assert (old != new).sum() == change[0]
        assert (new[old != new] >= np.minimum(old, cache_priority)[old != new]).all()
        assert (new[old != new] <= np.maximum(old, cache_priority)[old != new]).all()

    @precondition(lambda self: self.history)
    @rule(which=WHICH, cut=st.integers(0, 12), tokens=TOKENS)
    def evict_path(self, which: int, cut: int, tokens: list[int]) -> None:
        content = self.similar(which, cut, tokens)
        before = self.cache.stats()
        num_freed = same(
            self.call(
                lambda _, cache: cache.evict_path(
                    content.tokens, namespace=content.namespace, extra_keys=content.keys
                )
            )
        )
        after = self.cache.stats()
        assert after["free"] - before["free"] == num_freed == before["cached"] - after["cached"]
        self.has_dropped |= num_freed > 0

    # What a reserve may do

    def fits(self, chosen: list[tuple[Open, int]], needed: int, num_left: int, available: int) -> bool | None:
        owner_ids = {sequence.owner_id for sequence, _ in chosen}
        if all(limits == Limits() for limits in self.limits.values()):
            return super().fits(chosen, needed, num_left, available)
        if len(owner_ids) == 1 and not num_left and needed:
            return needed <= self.could_have
        return True if not needed and not num_left else None

    def reserve_all(
        self, chosen: list[tuple[Open, int]], num_lookahead: int, draft: int, *, restores: bool = False
    ) -> bool:
        available = [same(self.call(lambda _, c, a=a: c.num_available_blocks(a))) for a in ACCOUNTS]
        self.could_have = available[chosen[0][0].owner_id]
        before = [self.cache.owner_counts(owner_id) for owner_id in ACCOUNTS]
        cached = self.cached_blocks() if self.is_watched else {}
        is_done = super().reserve_all(chosen, num_lookahead, draft, restores=restores)
        after = [self.cache.owner_counts(owner_id) for owner_id in ACCOUNTS]
        if not is_done:
            assert after == before
            return False
        kept = {(node, block_id) for node, block_id in self.all_blocks()} if self.is_watched else set()
        lost = Counter(owner_id for key, owner_id in cached.items() if key not in kept)
        asking = {sequence.owner_id for sequence, _ in chosen}
        has_copies = any(len(self.pending_copies(group)) for group in range(self.num_groups))
        for owner_id, limits in self.limits.items():
            had, has = sum(before[owner_id]), sum(after[owner_id])
            if has > had and limits.quota > 0:
                assert has <= limits.quota, f"owner {owner_id} has {has} blocks, its quota is {limits.quota}"
            if owner_id not in asking and had <= limits.floor:
                assert not lost[owner_id], f"owner {owner_id}, at its floor, lost {lost[owner_id]} blocks"
            # The source of a copy may be free once it is let go: that is nobody's doing but its own.
            if not has_copies:
                assert has >= min(had, limits.floor), f"owner {owner_id}: {had} blocks before, {has} now"
        return True

    def pending_copies(self, group: int) -> np.ndarray:
        return self.last_plan.group(group).copies

    def cached_blocks(self) -> dict[tuple[int, int], int]:
        tree = self.cache.tree()
        where = np.argwhere(tree.states == STATES.index("cached"))
        return {
            (int(tree.node_ids[row]), int(tree.block_ids[row, group])): int(tree.owner_ids[row, group])
            for row, group in where
        }

    def all_blocks(self) -> list[tuple[int, int]]:
        tree = self.cache.tree()
        return [
            (int(tree.node_ids[row]), int(block_id))
            for row in range(len(tree))
            for block_id in tree.block_ids[row]
        ]

    # Forgetting and explaining

    @precondition(lambda self: self.history)
    @rule(which=WHICH, cut=st.integers(0, 12), tokens=TOKENS)
    def forget(self, which: int, cut: int, tokens: list[int]) -> None:
        """Also what open sequences hold: it is found no more, whatever they do."""
        content = self.history[-1 - which % len(self.history)].cut(cut)
        if self.drop(content):
            longer = content.cut(cut)
            longer.tokens = longer.tokens + tokens
            assert self.expect_match(longer) < max(1, len(content.tokens))

    @precondition(lambda self: self.history)
    @rule(which=WHICH, cut=WHICH, tokens=TOKENS)
    def explain(self, which: int, cut: int, tokens: list[int]) -> None:
        content = self.similar(which, cut, tokens)
        found = self.call(
            lambda _, cache: cache.explain(
                content.tokens, namespace=content.namespace, extra_keys=content.keys
            )
        )
        num_common = same([explanation.num_common_tokens for explanation in found])
        num_hit = same([explanation.num_hit_tokens for explanation in found])
        nearest = same([explanation.nearest_block for explanation in found])
        assert num_hit == self.expect_match(content)
        assert num_hit <= num_common <= len(content.tokens)
        if num_common == len(content.tokens):
            assert not len(nearest)
            return
        start = num_common // self.size * self.size
        block = content.tokens[start : start + self.size]
        same_tokens = [a == b for a, b in zip(block, nearest.tolist(), strict=False)]
        assert sum(np.cumprod(same_tokens)) >= num_common - start

    # Events and the tree

    @precondition(lambda self: hasattr(self, "caches"))
    @rule(kind=st.sampled_from(["monitor", "on", "on", "on", "off"]))
    def monitor(self, kind: str) -> None:
        self.is_watched |= kind != "off"
        if kind == "on":
            self.call(lambda _, cache: cache.record_events(True))
            self.stored = {} if self.stored is None else self.stored
        elif kind == "off":
            self.call(lambda _, cache: cache.record_events(False))
            self.stored = None

    @invariant()
    def events_tell_the_tree(self) -> None:
        if not hasattr(self, "caches"):
            return
        events = self.call(lambda _, cache: cache.take_events())
        lists = [[event_key(event) for event in batch] for batch in events]
        same(lists)
        if self.stored is None:
            assert not lists[0]
        elif self.is_watched:
            replay(events[0], self.stored)
        if not self.is_watched:
            return
        trees = self.call(lambda _, cache: cache.tree())
        same_tree(trees)
        same(self.call(lambda _, cache: cache.namespaces()))
        if self.stored is not None:
            tree = trees[0]
            full = {
                int(tree.node_ids[row]): (
                    int(tree.parent_ids[row]),
                    tree.namespaces[tree.namespace_index[row]],
                    tuple(tree.block_ids[row].tolist()),
                )
                for row in np.flatnonzero(tree.num_tokens == self.size)
                if (tree.block_ids[row] >= 0).any()
            }
            assert full == {
                node: (p, name, block_ids) for node, (p, name, _, _, block_ids) in self.stored.items()
            }
            for node, (parent, _, _, _, _) in self.stored.items():
                assert parent < node, "a parent is made, and numbered, before its children"

    @invariant()
    def owners_add_up(self) -> None:
        if not hasattr(self, "caches"):
            return
        counts = [
            same([tuple(counts) for counts in self.call(lambda _, c, a=a: c.owner_counts(a))])
            for a in ACCOUNTS
        ]
        stats = self.cache.stats()
        totals = (stats["held"] + stats["pinned"], stats["cached"], stats["in_flight"])
        assert tuple(map(sum, zip(*counts, strict=True))) == totals
        same([[cache.max_owner_blocks(owner_id) for owner_id in ACCOUNTS] for cache in self.caches])


def same_tree(trees: list[TreeView]) -> TreeView:
    for field in fields(TreeView):
        same([getattr(tree, field.name) for tree in trees])
    return trees[0]


def event_key(event: CacheEvent) -> tuple[Any, ...]:
    tokens = None if event.tokens is None else tuple(event.tokens.tolist())
    place = (event.kind, event.node_id, event.parent_id, event.owner_id, event.block_ids, event.reason)
    return *place, event.namespace, tokens, event.extra_keys


def replay(events: CacheEvents, stored: dict[int, tuple[Any, ...]]) -> None:
    """What a subscriber does: the full nodes and their blocks by the events alone."""
    for event in events:
        if event.kind == "cleared":
            stored.clear()
        elif event.kind == "stored":
            assert event.tokens is not None
            tokens, keys = tuple(event.tokens.tolist()), tuple(sorted(event.extra_keys.items()))
            about = (event.parent_id, event.namespace, tokens, keys)
            before = stored.get(event.node_id, (*about, (-1,) * len(event.block_ids)))
            assert before[:4] == about, "a node's content never changes"
            pairs = list(zip(before[4], event.block_ids, strict=True))
            assert all(old < 0 or new < 0 for old, new in pairs), "a block is stored where there is one"
            stored[event.node_id] = (*about, tuple(max(pair) for pair in pairs))
        else:
            parent, name, tokens, keys, block_ids = stored[event.node_id]
            pairs = list(zip(block_ids, event.block_ids, strict=True))
            assert all(gone in (-1, block_id) for block_id, gone in pairs), "only what was there is removed"
            left = tuple(-1 if gone >= 0 else block_id for block_id, gone in pairs)
            stored[event.node_id] = (parent, name, tokens, keys, left)
            if max(left) < 0:
                del stored[event.node_id]
