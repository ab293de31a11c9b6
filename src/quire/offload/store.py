"""`TierStores`: stores segments in the tiers, as they are committed or just before memory loses them.

The cache's events drive it (`quire.cache.events`): they name the full blocks, and those given up while their bytes are
still there. The blocks are those of the cache's mirror; a record of each block says whether it is stored, and has the
keys of segments (`quire.cache.block_hash`) along its path.

    through    a segment is stored when its last block is committed
    eviction   when its first block is given up: the deepest block goes first, so the others are still there

A block that only requests with cache priority "discard" have used is stored in no tier. A block is stored with the
highest cache priority of its uses, which the tiers' eviction respects; a use after the store counts when memory gives
the block up, or at `flush`.

An unfinished segment is stored block by block, each a value of its own: on eviction, and by `flush`, which stores all
that is not stored yet. For a model with sliding windows the policy is always "through": blocks behind a window soon
leave memory, and a segment is of use only with the bytes of every group.

While it is not known that the computed content is right (`is_trusted`), no block is stored; it can be stored later, as
long as memory has it.

Cost: about 10 us for each block that comes or goes. The engine's thread copies the bytes, the stack's threads do the
rest.
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

__all__ = ["POLICIES", "OnSegment", "Policy", "TierStores"]

Policy = Literal["eviction", "through"]
POLICIES = ("eviction", "through")
OnSegment: TypeAlias = Callable[[SegmentKey, bytes, bytes], None]
"""Receives a segment stored in or loaded from tiers, its namespace, and the mirror's hash of the block before it."""


@dataclass(slots=True)
class _BlockRecord:
    """A block of the mirror. root: of its namespace. before_key: of the segment before its own, or None.

    Both are copied here because blocks of a path may be gone: a floor keeps a tail whose head is evicted.
    end_key: of the whole segment that ends with the block, if any. cache_priority: the highest of its uses.
    stored_as: the cache priority with which it was stored, alone or in its segment; -1: not stored.
    """

    root: bytes
    before_key: bytes | None
    end_key: bytes | None = None
    cache_priority: int = DISCARD
    stored_as: int = -1


class TierStores:
    """See the module's text. segment_tokens: a multiple of the block size. owner_of: a namespace's owner, for lists.

    states: for a model with state layers.
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
        dispatcher: EventDispatcher | None = None,
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
        self._records: dict[int, _BlockRecord] = {}  # by node id
        self._num_stored = 0
        self._roots: dict[bytes, bytes] = {}
        self._namespaces: dict[bytes, bytes] = {}  # by root
        self.owner_of = owner_of
        self.on_root: Callable[[bytes], None] = lambda _: None
        """Called with each namespace before its first block is stored."""
        self.is_trusted: Callable[[float], bool] = lambda timeout_s: True
        """True if K and V computed here are known to be right; waits up to `timeout_s` for that."""
        self.excluded: tuple[str, ...] = ()
        """Names of tiers to which no block goes now, see `excluding`."""
        self.has_readers = False
        """Whether other engines read a tier now: then the end of a request's path is stored when it ends."""
        self.on_segment: OnSegment | None = None
        """Called with each segment before it is stored, if set."""
        self.dispatcher = dispatcher or EventDispatcher(cache)
        self.mirror = TreeMirror(cache)
        """For other readers of the tree. This object's listener keeps it up to date."""
        self.mirror.recorders.append(self)
        self.dispatcher.listen(self.mirror.apply)
        self.states = states
        if states is not None:
            states.attach(self)
            if self.policy == "through":
                self.dispatcher.listen(self._store_states)

    def set_fingerprint(self, fingerprint: bytes) -> None:
        """Names segments by another model from now on. Memory must hold no content."""
        self._fingerprint = fingerprint
        self._roots.clear()
        if self.states is not None:
            self.states.set_fingerprint(fingerprint)

    def collect(self, forgotten: Forgotten = DROPPED) -> None:
        """Reads the cache's events since the last call, and copies the blocks to store.

        When to call it: see `EventDispatcher.collect`. forgotten: with `is_kept`, its blocks are stored like evicted
        ones.
        """
        self.dispatcher.collect(forgotten)

    @contextmanager
    def excluding(self, *tiers: str) -> Iterator[None]:
        """A context in which no block goes to these tiers."""
        self.excluded = tiers
        try:
            yield
        finally:
            self.excluded = ()

    def _store_states(self, events: list[CacheEvent], forgotten: Forgotten) -> None:
        assert self.states is not None
        self.states.store_all(self)

    # -- called by the mirror (`BlockRecorder`) ----------------------------------------------------------

    def record_stored(self, block: Block, event: CacheEvent) -> None:
        record = self._records.get(block.node_id)
        if record is None:
            record = self._records[block.node_id] = _BlockRecord(
                self._root(block.namespace), self._before_key(block)
            )
        record.cache_priority = max(record.cache_priority, event.cache_priority)
        if block.depth % self._segment_blocks == 0:
            if record.end_key is None:
                record.end_key = self._keys(self._segment_path(block), whole=True)[0].hash
            if self.policy == "through":
                self._save(block)

    def record_loss(self, block: Block, event: CacheEvent, forgotten: Forgotten) -> None:
        record = self._records[block.node_id]
        record.cache_priority = max(record.cache_priority, event.cache_priority)
        if event.is_eviction or forgotten.is_kept:
            self._save(block)

    def record_removed(self, block: Block) -> None:
        del self._records[block.node_id]

    def record_cleared(self) -> None:
        self._records.clear()

    def _root(self, namespace: bytes) -> bytes:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = root_key(self._fingerprint, namespace)
            self._namespaces[root] = namespace
            self.on_root(namespace)
        return root

    # -- calls of others ---------------------------------------------------------------------------------

    def is_device_lost(self) -> bool:
        """Whether the device of the storage fails every call."""
        return self._storage.device.is_lost()

    def store_all(self) -> tuple[int, bool]:
        """Queues all blocks that are not stored yet, as far as the queues have room: (how many segments, whether all).

        (0, True) while the content is not trusted.
        """
        self.collect()
        self._update_priorities()
        blocks = self.mirror.by_id.values()
        whole = [block for block in blocks if block.depth % self._segment_blocks == 0]
        ends = sorted(blocks, key=lambda block: -block.depth)
        num_before = self._num_stored
        is_all = all(
            self._save(block, must_queue=True)
            for block in [*sorted(whole, key=lambda block: block.depth), *ends]
        )
        if self.states is not None:
            num, is_all_states = self.states.store_all(self)
            self._num_stored += num
            is_all = is_all and is_all_states
        return self._num_stored - num_before, is_all

    def save_path(
        self, namespace: bytes, tokens: np.ndarray, extra_keys: tuple[tuple[int, bytes], ...] = ()
    ) -> None:
        """Stores the blocks of the beginning of `tokens` that memory has and tiers lack; full queues drop them."""
        path = self.mirror.path(self.mirror.hashes(namespace, tokens, dict(extra_keys)))
        for block in [block for block in path if block.depth % self._segment_blocks == 0] + path[-1:]:
            self._save(block)

    def save_ended(
        self, namespace: bytes, tokens: np.ndarray, extra_keys: tuple[tuple[int, bytes], ...] = ()
    ) -> None:
        """A request with these tokens has ended, and tiers have readers: `save_path`."""
        self.collect()
        self.save_path(namespace, tokens, extra_keys)

    def _update_priorities(self) -> None:
        """Reads the cache priorities from the tree: a use after the store makes no event."""
        tree = self._cache.tree()
        highest = tree.cache_priorities.max(axis=1, initial=DISCARD)
        for node_id, cache_priority in zip(tree.node_ids.tolist(), highest.tolist(), strict=True):
            if (record := self._records.get(node_id)) is not None:
                record.cache_priority = max(record.cache_priority, cache_priority)

    def path(
        self, namespace: bytes, tokens: np.ndarray, extra_keys: tuple[tuple[int, bytes], ...] = ()
    ) -> list[Block]:
        """The full blocks at the beginning of `tokens` that memory knows, in order; for `payload`. O(tokens)."""
        self.collect()
        return self.mirror.path(self.mirror.hashes(namespace, tokens, dict(extra_keys)))

    def payload(self, blocks: list[Block], num_tokens: int) -> np.ndarray | None:
        """The bytes of blocks of a `path`; None if a group has given one up meanwhile."""
        self.collect()
        if any(min(block.block_ids) < 0 for block in blocks):
            return None
        return self._storage.read_blocks(np.array([block.block_ids for block in blocks]).T, num_tokens)

    def namespace_of(self, root: bytes) -> bytes | None:
        """The namespace of a root (`block_hash.root_key`), if it has had a block here."""
        return self._namespaces.get(root)

    def namespaces(self) -> list[bytes]:
        return list(self._roots)

    def segment_ends(self) -> dict[bytes, tuple[bytes, bytes]]:
        """{key of a whole segment whose last block is in memory: (namespace, hash of that block)}."""
        blocks = self.mirror.by_id
        return {
            record.end_key: (blocks[node_id].namespace, blocks[node_id].hash)
            for node_id, record in self._records.items()
            if record.end_key is not None
        }

    # -- storing ---------------------------------------------------------------------------------------

    def _segment_path(self, block: Block) -> list[Block]:
        """The blocks of a block's segment up to the block."""
        path = [block]
        while (path[-1].depth - 1) % self._segment_blocks:
            parent = path[-1].parent
            assert parent is not None
            path.append(parent)
        return path[::-1]

    def _before_key(self, block: Block) -> bytes | None:
        """The key of the segment before that of a new block, whose parent is in memory."""
        if block.parent is None:
            return None
        parent = self._records[block.parent.node_id]
        return parent.before_key if (block.depth - 1) % self._segment_blocks else parent.end_key

    def _keys(self, path: list[Block], *, whole: bool) -> list[SegmentKey]:
        size = self._cache.node_tokens
        record = self._records[path[-1].node_id]
        start = (path[0].depth - 1) * size
        extra_keys = [
            (start + i * size + at, key)
            for i, block in enumerate(path)
            for at, key in sorted(block.extra_keys.items())
        ]
        return segment_keys(
            record.root,
            np.concatenate([block.tokens for block in path]),
            size * (self._segment_blocks if whole else 1),
            start=start,
            parent=record.before_key,
            extra_keys=extra_keys,
        )

    def _save(self, block: Block, *, must_queue: bool = False) -> bool:
        """Stores the segment that ends with the block, or the blocks of an unfinished one, if they are not stored.

        must_queue: returns False if every queue is full; otherwise the segment is dropped then.
        """
        record = self._records[block.node_id]
        is_stored = record.stored_as >= record.cache_priority
        if record.cache_priority == DISCARD or is_stored or not self.is_trusted(0.0):
            return True
        if not self._stack.has_tiers_besides(self.excluded):
            return True
        path = self._segment_path(block)
        if any(min(part.block_ids) < 0 for part in path):
            return True  # a group has lost its part: of no use
        is_whole = len(path) == self._segment_blocks
        for key, blocks in self._parts(path, is_whole):
            records = [self._records[part.node_id] for part in blocks]
            cache_priority = max(record.cache_priority for record in records)
            if min(record.stored_as for record in records) < cache_priority:
                block_ids = np.array([part.block_ids for part in blocks]).T
                payload = self._storage.read_blocks(block_ids, len(key.tokens))
                namespace, before = block.namespace, blocks[0].parent
                if self.on_segment is not None:
                    self.on_segment(key, namespace, root_hash(namespace) if before is None else before.hash)
                num = self._stack.store(
                    [(key, payload)],
                    cache_priority=cache_priority,
                    owner=self.owner_of(namespace),
                    excluded=self.excluded,
                )
                if must_queue and not num:
                    return False
                self._num_stored += num
                for record in records:
                    record.stored_as = cache_priority
        return True

    def _parts(self, path: list[Block], is_whole: bool) -> Iterator[tuple[SegmentKey, list[Block]]]:
        keys = self._keys(path, whole=is_whole)
        if is_whole:
            yield keys[0], path
        else:
            yield from zip(keys, ([block] for block in path), strict=True)
