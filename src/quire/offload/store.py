"""What goes down to the tiers, and when: whole segments as they are committed, or what memory is about to lose.

Driven by the cache's events alone (`quire.cache.events`): they tell which full blocks there are, in which blocks, and
which have just been given up while their bytes are still there. The blocks are those of the cache's mirror; what is
kept here of each is whether it is stored, and the keys of segments (`quire.cache.block_hash`) along each path.

    through    a segment is stored when its last block is committed
    eviction   when the first of its blocks is given up: the deepest goes first, so the others are still there

A block that only requests with cache priority "discard" have used is stored in no tier; one that was used to be kept is
stored so, which the tiers' own eviction respects. A use that comes after the store is made good when memory gives the
block up, or by `flush`.

What ends within a segment is stored block by block, each a value of its own: on eviction, and by `flush`, which stores
all that is not stored yet. With sliding windows in the model policy is always "through": what lies behind a window is
soon gone from memory, and a segment is of use only with the bytes of every group.

Nothing is stored while it is not known that what is computed here is right (`is_trusted`): it can be stored later, as
long as memory has it.

Cost: about 10 us for each block that comes or goes; the bytes of what is stored are copied by the engine's thread, the
rest is done by the stack's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from quire.cache.block_hash import root_hash, root_key
from quire.cache.event_dispatcher import DROPPED, EventDispatcher, Forgotten
from quire.cache.events import CacheEvent
from quire.cache.protocol import DISCARD, PrefixKVCache
from quire.memory.block_bytes import BlockStorage
from quire.observe.tree_mirror import Block, TreeMirror
from quire.offload.states import StateStores
from quire.tiers.segment_key import SegmentKey, segment_keys
from quire.tiers.stack import TierStack

__all__ = ["POLICIES", "OnName", "Policy", "TierStores"]

Policy = Literal["eviction", "through"]
POLICIES = ("eviction", "through")
OnName: TypeAlias = Callable[[SegmentKey, bytes, bytes], None]
"""Takes a segment that goes to or comes from tiers, its namespace, and the mirror's hash of the block before it."""


@dataclass(slots=True)
class _Kept:
    """Of a block of the mirror. root: of its namespace. before_key: of the segment before its own, None for none.

    Both are kept here because blocks of a path may have gone: a floor keeps a tail whose head is evicted.
    end_key: of the whole segment that ends with it, if one does. cache_priority: the highest of those who have used it.
    stored_as: that with which it was stored, alone or in its segment; -1 for not yet.
    """

    root: bytes
    before_key: bytes | None
    end_key: bytes | None = None
    cache_priority: int = DISCARD
    stored_as: int = -1


class TierStores:
    """See the module's text. segment_tokens: a multiple of the block size. owner_of: a namespace's, for lists.

    states: of a model with state layers.
    """

    def __init__(
        self,
        cache: PrefixKVCache,
        storage: BlockStorage,
        stack: TierStack,
        fingerprint: bytes,
        segment_tokens: int,
        *,
        policy: Policy = "eviction",
        feed: EventDispatcher | None = None,
        owner_of: Callable[[bytes], str] = lambda _: "",
        states: StateStores | None = None,
    ) -> None:
        self._cache = cache
        self._storage = storage
        self._stack = stack
        self._fingerprint = fingerprint
        self._segment_blocks = segment_tokens // cache.node_tokens
        has_windows = any(group.span.kind != "full" for group in cache.spec.groups)
        self.policy: Policy = "through" if has_windows else policy
        self._kept: dict[int, _Kept] = {}  # by node id
        self._num_handed_over = 0
        self._roots: dict[bytes, bytes] = {}
        self._namespaces: dict[bytes, bytes] = {}  # by root
        self.owner_of = owner_of
        self.on_root: Callable[[bytes], None] = lambda _: None
        """Called with each namespace before anything of it is stored."""
        self.is_trusted: Callable[[float], bool] = lambda timeout_s: True
        """Whether K and V computed here are known to be right; waits for so long to know."""
        self.spared: tuple[str, ...] = ()
        """Tiers that take nothing now, see `sparing`."""
        self.on_name: OnName | None = None
        """Called with each segment before it is handed to the stack, where anybody wants to know."""
        self.feed = feed or EventDispatcher(cache)
        self.mirror = TreeMirror(cache)
        """For who else looks at the tree: the only listener of the feed that keeps it."""
        self.mirror.watchers.append(self)
        self.feed.listen(self.mirror.apply)
        self.states = states
        if states is not None:
            states.follow(self)
            if self.policy == "through":
                self.feed.listen(self._states_through)

    def renew(self, fingerprint: bytes) -> None:
        """Name what is stored from now on by another model. Memory holds nothing then."""
        self._fingerprint = fingerprint
        self._roots.clear()
        if self.states is not None:
            self.states.renew(fingerprint)

    def collect(self, forgotten: Forgotten = DROPPED) -> None:
        """Takes what has happened since the last call, and copies out what is to be stored.

        When to call it: see `EventDispatcher.collect`. forgotten: what is kept of it is stored like evicted blocks.
        """
        self.feed.collect(forgotten)

    @contextmanager
    def sparing(self, *tiers: str) -> Iterator[None]:
        """Until it is left, nothing of what memory gives up goes to these tiers."""
        self.spared = tiers
        try:
            yield
        finally:
            self.spared = ()

    def _states_through(self, events: list[CacheEvent], forgotten: Forgotten) -> None:
        assert self.states is not None
        self.states.hand_over(self)

    # -- what the mirror tells (`BlockRecorder`) ---------------------------------------------------------

    def block_stored(self, block: Block, event: CacheEvent) -> None:
        kept = self._kept.get(block.node_id)
        if kept is None:
            kept = self._kept[block.node_id] = _Kept(self._root(block.namespace), self._before_key(block))
        kept.cache_priority = max(kept.cache_priority, event.cache_priority)
        if block.depth % self._segment_blocks == 0:
            if kept.end_key is None:
                kept.end_key = self._names(self._path(block), whole=True)[0].key
            if self.policy == "through":
                self._save(block)

    def block_going(self, block: Block, event: CacheEvent, forgotten: Forgotten) -> None:
        kept = self._kept[block.node_id]
        kept.cache_priority = max(kept.cache_priority, event.cache_priority)
        if event.is_eviction or forgotten.is_kept:
            self._save(block)

    def block_gone(self, block: Block) -> None:
        del self._kept[block.node_id]

    def all_gone(self) -> None:
        self._kept.clear()

    def _root(self, namespace: bytes) -> bytes:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = root_key(self._fingerprint, namespace)
            self._namespaces[root] = namespace
            self.on_root(namespace)
        return root

    # -- what is asked for -------------------------------------------------------------------------------

    def hand_over(self) -> tuple[int, bool]:
        """Hands what is not stored yet to the tiers, as far as their queues take it: how many segments, whether all.

        Nothing, which is all, where what is here is not trusted.
        """
        self.collect()
        self._note_uses()
        blocks = self.mirror.by_id.values()
        whole = [block for block in blocks if block.depth % self._segment_blocks == 0]
        ends = sorted(blocks, key=lambda block: -block.depth)
        num_before = self._num_handed_over
        is_all = all(
            self._save(block, must=True) for block in [*sorted(whole, key=lambda block: block.depth), *ends]
        )
        if self.states is not None:
            num, is_all_states = self.states.hand_over(self)
            self._num_handed_over += num
            is_all = is_all and is_all_states
        return self._num_handed_over - num_before, is_all

    def save_path(
        self, namespace: bytes, tokens: np.ndarray, extra_keys: tuple[tuple[int, bytes], ...] = ()
    ) -> None:
        """Stores what memory has of the beginning of `tokens`, as far as that is not done; queues may be full."""
        path = self.mirror.path(self.mirror.hashes(namespace, tokens, dict(extra_keys)))
        for block in [one for one in path if one.depth % self._segment_blocks == 0] + path[-1:]:
            self._save(block)

    def _note_uses(self) -> None:
        """Retentions as they are in the tree now: a use that follows the store makes no event."""
        tree = self._cache.tree()
        highest = tree.cache_priorities.max(axis=1, initial=DISCARD)
        for node_id, cache_priority in zip(tree.node_ids.tolist(), highest.tolist(), strict=True):
            if (kept := self._kept.get(node_id)) is not None:
                kept.cache_priority = max(kept.cache_priority, cache_priority)

    def path(
        self, namespace: bytes, tokens: np.ndarray, extra_keys: tuple[tuple[int, bytes], ...] = ()
    ) -> list[Block]:
        """The full blocks at the beginning of `tokens` that memory knows, in order; for `payload`. O(tokens)."""
        self.collect()
        return self.mirror.path(self.mirror.hashes(namespace, tokens, dict(extra_keys)))

    def payload(self, blocks: list[Block], num_tokens: int) -> np.ndarray | None:
        """The bytes of blocks of a `path`; None where a group has given one up meanwhile."""
        self.collect()
        if any(min(block.block_ids) < 0 for block in blocks):
            return None
        return self._storage.read_blocks(np.array([block.block_ids for block in blocks]).T, num_tokens)

    def namespace_of(self, root: bytes) -> bytes | None:
        """Whose root (`keys.root_key`) it is, of those that have had a block here."""
        return self._namespaces.get(root)

    def namespaces(self) -> list[bytes]:
        return list(self._roots)

    def ends(self) -> dict[bytes, tuple[bytes, bytes]]:
        """By key, of the whole segments that end with a block of memory's: namespace, and hash of that block."""
        blocks = self.mirror.by_id
        return {
            kept.end_key: (blocks[node_id].namespace, blocks[node_id].hash)
            for node_id, kept in self._kept.items()
            if kept.end_key is not None
        }

    # -- storing ---------------------------------------------------------------------------------------

    def _path(self, block: Block) -> list[Block]:
        """The blocks of its segment up to this one."""
        path = [block]
        while (path[-1].depth - 1) % self._segment_blocks:
            parent = path[-1].parent
            assert parent is not None
            path.append(parent)
        return path[::-1]

    def _before_key(self, block: Block) -> bytes | None:
        """The key of the segment before the new block's own: its parent is there still."""
        if block.parent is None:
            return None
        parent = self._kept[block.parent.node_id]
        return parent.before_key if (block.depth - 1) % self._segment_blocks else parent.end_key

    def _names(self, path: list[Block], *, whole: bool) -> list[SegmentKey]:
        size = self._cache.node_tokens
        kept = self._kept[path[-1].node_id]
        start = (path[0].depth - 1) * size
        keys = [
            (start + i * size + at, key)
            for i, block in enumerate(path)
            for at, key in sorted(block.extra_keys.items())
        ]
        return segment_keys(
            kept.root,
            np.concatenate([block.tokens for block in path]),
            size * (self._segment_blocks if whole else 1),
            start=start,
            parent=kept.before_key,
            extra_keys=keys,
        )

    def _save(self, block: Block, *, must: bool = False) -> bool:
        """Stores the segment that ends with the block, or the blocks of an unfinished one, unless that was done.

        must: what finds every queue full is not given up; False then.
        """
        own = self._kept[block.node_id]
        if own.cache_priority == DISCARD or own.stored_as >= own.cache_priority or not self.is_trusted(0.0):
            return True
        if not self._stack.has_others(self.spared):
            return True
        path = self._path(block)
        if any(min(one.block_ids) < 0 for one in path):
            return True  # a group has lost what would make it of use
        is_whole = len(path) == self._segment_blocks
        for name, blocks in self._parts(path, is_whole):
            all_kept = [self._kept[one.node_id] for one in blocks]
            cache_priority = max(one.cache_priority for one in all_kept)
            if min(one.stored_as for one in all_kept) < cache_priority:
                block_ids = np.array([one.block_ids for one in blocks]).T
                payload = self._storage.read_blocks(block_ids, len(name.tokens))
                namespace, before = block.namespace, blocks[0].parent
                owner = self.owner_of(namespace)
                kept = {"owner": owner, "cache_priority": cache_priority}
                if self.on_name is not None:
                    self.on_name(name, namespace, root_hash(namespace) if before is None else before.hash)
                num = self._stack.store([(name, payload)], spared=self.spared, **kept)
                if must and not num:
                    return False
                self._num_handed_over += num
                for one in all_kept:
                    one.stored_as = cache_priority
        return True

    def _parts(self, path: list[Block], is_whole: bool) -> Iterator[tuple[SegmentKey, list[Block]]]:
        names = self._names(path, whole=is_whole)
        if is_whole:
            yield names[0], path
        else:
            yield from zip(names, ([block] for block in path), strict=True)
