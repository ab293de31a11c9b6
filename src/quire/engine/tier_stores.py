"""What goes down to the tiers, and when: whole segments as they are committed, or what memory is about to lose.

Driven by the cache's events alone (`quire.cache.events`): they tell which full blocks there are, in which units, and
which have just been given up while their bytes are still there. A mirror of the tree is kept, a small object for each
block, with the keys of segments (`quire.tiers.keys`) along each path.

    through    a segment is stored when its last block is committed
    eviction   when the first of its blocks is given up: the deepest goes first, so the others are still there

A block that only requests with retention "discard" have used is stored in no tier; one that was used to be kept is
stored so, which the tiers' own eviction respects. A use that comes after the store is made good when memory gives the
block up, or by `flush`.

What ends within a segment is stored block by block, each a value of its own: on eviction, and by `flush`, which stores
all that is not stored yet. With sliding windows in the model policy is always "through": what lies behind a window is
soon gone from memory, and a segment is of use only with the bytes of every group.

Cost: about 10 us for each block that comes or goes; the bytes of what is stored are copied by the engine's thread, the
rest is done by the stack's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias

import numpy as np

from quire.cache.backend import DISCARD
from quire.cache.events import CacheEvent
from quire.cache.feed import EventFeed
from quire.cache.mirror import chained_hashes, root_hash
from quire.engine.preemption import UnitBytes
from quire.tiers.keys import root_key
from quire.tiers.names import SegmentName, segment_names
from quire.tiers.stack import TierStack

__all__ = ["POLICIES", "OnName", "Policy", "TierStores"]

Policy = Literal["eviction", "through"]
POLICIES = ("eviction", "through")
OnName: TypeAlias = Callable[[SegmentName, bytes, bytes], None]
"""Takes a segment that goes to or comes from tiers, its namespace, and the mirror's hash of the block before it."""


class _Block:
    """A full node of the cache's tree. end_key: of the whole segment that ends with it, if one does.

    retention: the highest of those who have used it. stored_as: that with which it was stored, alone or in its segment;
    -1 for not yet. hash: the mirror's name of it, once that was asked for.
    """

    __slots__ = (
        "depth",
        "end_key",
        "extra_keys",
        "hash",
        "parent",
        "retention",
        "root",
        "stored_as",
        "tokens",
        "units",
    )

    def __init__(
        self, parent: _Block | None, root: bytes, tokens: np.ndarray, keys: tuple[tuple[int, bytes], ...]
    ):
        self.parent = parent
        self.root = root
        self.tokens = tokens
        self.extra_keys = keys  # positions within the block
        self.depth: int = 1 if parent is None else parent.depth + 1
        self.units: list[int] = []
        self.end_key: bytes | None = None
        self.hash: bytes | None = None
        self.retention = DISCARD
        self.stored_as = -1


class TierStores:
    """See the module's text. segment_tokens: a multiple of the block size. owner_of: a namespace's, for lists."""

    def __init__(
        self,
        cache: Any,
        storage: UnitBytes,
        stack: TierStack,
        fingerprint: bytes,
        segment_tokens: int,
        *,
        policy: Policy = "eviction",
        feed: EventFeed | None = None,
        owner_of: Callable[[bytes], str] = lambda _: "",
    ) -> None:
        self._cache = cache
        self._storage = storage
        self._stack = stack
        self._fingerprint = fingerprint
        self._segment_blocks = segment_tokens // cache.block_size
        has_windows = any(group.retention.kind != "full" for group in cache.spec.groups)
        self.policy: Policy = "through" if has_windows else policy
        self._blocks: dict[int, _Block] = {}
        self._num_handed_over = 0
        self._roots: dict[bytes, bytes] = {}
        self._namespaces: dict[bytes, bytes] = {}  # by root
        self.owner_of = owner_of
        self.on_root: Callable[[bytes], None] = lambda _: None
        """Called with each namespace before anything of it is stored."""
        self.on_name: OnName | None = None
        """Called with each segment before it is handed to the stack, where anybody wants to know."""
        self.feed = feed or EventFeed(cache)
        self.feed.listen(self._take)

    def collect(self, *, keep_forgotten: bool = False) -> None:
        """Takes what has happened since the last call, and copies out what is to be stored.

        When to call it: see `EventFeed.collect`. keep_forgotten: blocks that the cache forgets for want of memory are
        stored like evicted ones.
        """
        self.feed.collect(keep_forgotten=keep_forgotten)

    def _take(self, events: list[CacheEvent], keep_forgotten: bool) -> None:
        for event in events:
            if event.kind == "stored":
                self._add(event)
            elif event.kind == "cleared":
                self._blocks.clear()
            else:
                block = self._blocks.get(event.node_id)
                if block is None:
                    continue
                block.retention = max(block.retention, event.retention)
                if event.reason == "evicted" or keep_forgotten:
                    self._save(block)
                for group, unit in enumerate(event.units):
                    if unit >= 0:
                        block.units[group] = -1
                if max(block.units) < 0:
                    del self._blocks[event.node_id]

    def hand_over(self) -> tuple[int, bool]:
        """Hands what is not stored yet to the tiers, as far as their queues take it: how many segments, whether all."""
        self.collect()
        self._note_uses()
        whole = [block for block in self._blocks.values() if block.depth % self._segment_blocks == 0]
        ends = sorted(self._blocks.values(), key=lambda block: -block.depth)
        num_before = self._num_handed_over
        is_all = all(
            self._save(block, must=True) for block in [*sorted(whole, key=lambda block: block.depth), *ends]
        )
        return self._num_handed_over - num_before, is_all

    def _note_uses(self) -> None:
        """Retentions as they are in the tree now: a use that follows the store makes no event."""
        tree = self._cache.tree()
        highest = tree.retentions.max(axis=1, initial=DISCARD)
        for node_id, retention in zip(tree.node_ids.tolist(), highest.tolist(), strict=True):
            if (block := self._blocks.get(node_id)) is not None:
                block.retention = max(block.retention, retention)

    def path(
        self, namespace: bytes, tokens: np.ndarray, extra_keys: tuple[tuple[int, bytes], ...] = ()
    ) -> list[_Block]:
        """The full blocks at the beginning of `tokens` that memory knows, in order; for `payload`. O(blocks known)."""
        self.collect()
        size, root = self._cache.block_size, self._roots.get(namespace)
        children: dict[_Block | None, list[_Block]] = {}
        for block in self._blocks.values():
            if block.root == root:
                children.setdefault(block.parent, []).append(block)
        path: list[_Block] = []
        for start in range(0, len(tokens) - size + 1, size):
            keys = tuple((at - start, key) for at, key in extra_keys if start <= at < start + size)
            own = tokens[start : start + size]
            for block in children.get(path[-1] if path else None, ()):
                if block.extra_keys == keys and np.array_equal(block.tokens, own):
                    path.append(block)
                    break
            else:
                break
        return path

    def payload(self, blocks: list[_Block], num_tokens: int) -> np.ndarray | None:
        """The bytes of blocks of a `path`; None where a group has given one up meanwhile."""
        self.collect()
        if any(min(block.units) < 0 for block in blocks):
            return None
        return self._storage.read_units(np.array([block.units for block in blocks]).T, num_tokens)

    def namespace_of(self, root: bytes) -> bytes | None:
        """Whose root (`keys.root_key`) it is, of those that have had a block here."""
        return self._namespaces.get(root)

    def namespaces(self) -> list[bytes]:
        return list(self._roots)

    def ends(self) -> dict[bytes, tuple[bytes, bytes]]:
        """By key, of the whole segments that end with a block of memory's: namespace, and hash of that block."""
        return {
            block.end_key: (self._namespaces[block.root], self._hash(block))
            for block in self._blocks.values()
            if block.end_key is not None
        }

    def _hash(self, block: _Block) -> bytes:
        """The mirror's hash of a block, kept with it. O(blocks before it that have none yet)."""
        path: list[_Block] = []
        at: _Block | None = block
        while at is not None and at.hash is None:
            path.append(at)
            at = at.parent
        known = root_hash(self._namespaces[block.root]) if at is None else at.hash
        assert known is not None
        for one in reversed(path):
            [known] = chained_hashes(known, one.tokens, dict(one.extra_keys), len(one.tokens))
            one.hash = known
        return known

    # -- the mirror ------------------------------------------------------------------------------------

    def _add(self, event: Any) -> None:
        block = self._blocks.get(event.node_id)
        if block is None:
            parent = self._blocks.get(event.parent_id)
            if parent is None and event.parent_id >= 0:
                return  # below a block that no group keeps: of no use without it
            if event.namespace not in self._roots:
                root = self._roots[event.namespace] = root_key(self._fingerprint, event.namespace)
                self._namespaces[root] = event.namespace
                self.on_root(event.namespace)
            keys = tuple(sorted(event.extra_keys.items()))
            block = _Block(parent, self._roots[event.namespace], event.tokens, keys)
            block.units = [-1] * self._cache.num_groups
            self._blocks[event.node_id] = block
        block.retention = max(block.retention, event.retention)
        for group, unit in enumerate(event.units):
            if unit >= 0:
                block.units[group] = unit
        if block.depth % self._segment_blocks == 0:
            if block.end_key is None:
                block.end_key = self._names(self._path(block), whole=True)[0].key
            if self.policy == "through":
                self._save(block)

    def _path(self, block: _Block) -> list[_Block]:
        """The blocks of its segment up to this one."""
        path = [block]
        while (path[-1].depth - 1) % self._segment_blocks:
            parent = path[-1].parent
            assert parent is not None
            path.append(parent)
        return path[::-1]

    def _names(self, path: list[_Block], *, whole: bool) -> list[SegmentName]:
        size = self._cache.block_size
        before = path[0].parent
        start = (path[0].depth - 1) * size
        keys = [(start + i * size + at, key) for i, block in enumerate(path) for at, key in block.extra_keys]
        return segment_names(
            path[0].root,
            np.concatenate([block.tokens for block in path]),
            size * (self._segment_blocks if whole else 1),
            start=start,
            parent=None if before is None else before.end_key,
            extra_keys=keys,
        )

    # -- storing ---------------------------------------------------------------------------------------

    def _save(self, block: _Block, *, must: bool = False) -> bool:
        """Stores the segment that ends with the block, or the blocks of an unfinished one, unless that was done.

        must: what finds every queue full is not given up; False then.
        """
        if block.retention == DISCARD or block.stored_as >= block.retention:
            return True
        path = self._path(block)
        if any(min(one.units) < 0 for one in path):
            return True  # a group has lost what would make it of use
        is_whole = len(path) == self._segment_blocks
        for name, blocks in self._parts(path, is_whole):
            retention = max(one.retention for one in blocks)
            if min(one.stored_as for one in blocks) < retention:
                units = np.array([one.units for one in blocks]).T
                payload = self._storage.read_units(units, len(name.tokens))
                owner = self.owner_of(self._namespaces[name.root])
                kept = {"owner": owner, "retention": retention}
                if self.on_name is not None:
                    namespace, before = self._namespaces[name.root], blocks[0].parent
                    self.on_name(
                        name, namespace, root_hash(namespace) if before is None else self._hash(before)
                    )
                num = self._stack.store([(name, payload)], **kept)
                if must and not num:
                    return False
                self._num_handed_over += num
                for one in blocks:
                    one.stored_as = retention
        return True

    def _parts(self, path: list[_Block], is_whole: bool) -> Iterator[tuple[SegmentName, list[_Block]]]:
        names = self._names(path, whole=is_whole)
        if is_whole:
            yield names[0], path
        else:
            yield from zip(names, ([block] for block in path), strict=True)
