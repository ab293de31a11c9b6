"""`TreeMirror`: the full nodes of a cache's prefix tree, kept up by its events, for reports, explanations, subscribers
and stores, which attach their own data to its blocks. A *block* here is a node's tokens in all groups.

A block *is there* while all groups with full attention have it (in a model without such groups: any group): only then
can a prefix go through it. Its hash is chained over namespace, tokens and extra keys, `block_size` tokens a link; the
hash of a node of several blocks is the last link (`KVGroup.blocks_per_node`). It cannot be computed without the
namespace.

Cost: 15 us and at most 0.8 KB for each new block, the log of its loss included (one core, blocks of 16 tokens).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from quire.cache.block_hash import block_hashes, chained_hashes, root_hash
from quire.cache.event_dispatcher import DROPPED, Forgotten
from quire.cache.events import CacheEvent
from quire.cache.protocol import PrefixKVCache

__all__ = ["Block", "BlockRecorder", "Change", "TreeMirror"]

_CAUSES = {"evicted": "space", "quota": "quota"}  # by reason of an event that has its own cause


class Block:
    """A full block. children: by node id. made_at, used_at: by the mirror's clock."""

    __slots__ = (
        "block_ids",
        "children",
        "depth",
        "extra_keys",
        "hash",
        "inner_hashes",
        "is_there",
        "made_at",
        "namespace",
        "node_id",
        "owner_id",
        "parent",
        "tokens",
        "used_at",
    )

    def __init__(
        self, event: CacheEvent, parent: Block | None, num_columns: int, block_size: int, now: float
    ) -> None:
        assert event.namespace is not None
        assert event.tokens is not None
        self.node_id = event.node_id
        self.parent = parent
        self.namespace = event.namespace
        self.tokens = event.tokens
        self.extra_keys = event.extra_keys  # by offset
        self.owner_id = event.owner_id
        self.block_ids = [-1] * num_columns
        self.depth: int = 1 if parent is None else parent.depth + 1
        before = parent.hash if parent is not None else root_hash(event.namespace)
        *inner, self.hash = chained_hashes(before, event.tokens, event.extra_keys, block_size)
        self.inner_hashes = tuple(inner)  # of the blocks before its last one
        self.children: dict[int, Block] = {}
        self.is_there = False
        self.made_at = self.used_at = now


@dataclass(frozen=True)
class Change:
    """A block was stored or removed, or all were (block None). For a removed one: reason ("evicted" for a quota too),
    owner and cache priority as in `CacheEvent`; cause: of `event_dispatcher.LOSS_REASONS`."""

    kind: Literal["stored", "removed", "cleared"]
    block: Block | None = None
    reason: str = ""
    owner_id: int = 0
    cause: str = ""
    cache_priority: int = CacheEvent.cache_priority


class BlockRecorder(Protocol):
    """A listener with a record of each block; it can act while the bytes of a lost block are still there."""

    def record_stored(self, block: Block, event: CacheEvent) -> None:
        """The block is new, or has new block ids, which are set already."""
        ...

    def record_loss(self, block: Block, event: CacheEvent, forgotten: Forgotten) -> None:
        """Some block ids are given up; they are still set, and their bytes unchanged (`EventDispatcher`)."""
        ...

    def record_removed(self, block: Block) -> None:
        """The block has no block ids any more, and has left the mirror."""
        ...

    def record_cleared(self) -> None:
        """The mirror is empty."""
        ...


class TreeMirror:
    """See the module's text. `apply` is an `EventDispatcher`'s listener.

    recorders: called for each block stored and lost. listeners: receive every change in order, those of several events
    together.
    """

    def __init__(self, cache: PrefixKVCache, clock: Callable[[], float] = time.monotonic) -> None:
        is_full = [
            group.span.kind == "full" for group in cache.spec.groups for _ in range(group.blocks_per_node)
        ]
        self._needed = [column for column, is_needed in enumerate(is_full) if is_needed]
        self._num_columns = len(is_full)
        self.block_size: int = cache.block_size
        self.node_tokens: int = cache.node_tokens
        self.clock = clock
        self.by_id: dict[int, Block] = {}
        self.by_hash: dict[bytes, Block] = {}
        self.roots: dict[bytes, dict[int, Block]] = {}
        # Lost, with a block behind them that a floor keeps: the tree's node is there, and may be filled again.
        self._hollow: dict[int, Block] = {}
        self.recorders: list[BlockRecorder] = []
        self.listeners: list[Callable[[list[Change]], None]] = []

    def apply(self, events: list[CacheEvent], forgotten: Forgotten = DROPPED) -> None:
        now = self.clock()
        changes = [change for event in events for change in self._apply(event, now, forgotten)]
        if changes:
            for listener in self.listeners:
                listener(changes)

    def _apply(self, event: CacheEvent, now: float, forgotten: Forgotten) -> Iterator[Change]:
        if event.kind == "cleared":
            gone = [block for block in self.by_id.values() if block.is_there]
            for table in (self.by_id, self.by_hash, self.roots, self._hollow):
                table.clear()
            for recorder in self.recorders:
                recorder.record_cleared()
            for block in gone:
                block.is_there = False
                yield Change("removed", block, "cleared", cause="dropped")
            yield Change("cleared")
            return
        block = self.by_id.get(event.node_id)
        if event.kind == "stored":
            if block is None and event.parent_id >= 0 and event.parent_id not in self.by_id:
                return  # below a block that no group keeps: no prefix goes through it
            if block is None:
                block = self._add(event, now)
            for column, block_id in enumerate(event.block_ids):
                if block_id >= 0:
                    block.block_ids[column] = block_id
            for recorder in self.recorders:
                recorder.record_stored(block, event)
            if self._is_whole(block) and not block.is_there:
                block.is_there, block.made_at, block.owner_id = True, now, event.owner_id
                yield Change("stored", block)
            return
        if block is None:
            return
        for recorder in self.recorders:
            recorder.record_loss(block, event, forgotten)
        for column, block_id in enumerate(event.block_ids):
            if block_id >= 0:
                block.block_ids[column] = -1
        if block.is_there and not self._is_whole(block):
            block.is_there = False
            cause = _CAUSES.get(event.reason, forgotten.reason)
            reason = "evicted" if event.is_eviction else event.reason
            yield Change("removed", block, reason, event.owner_id, cause, event.cache_priority)
        if max(block.block_ids) < 0:
            self._remove(block)
            for recorder in self.recorders:
                recorder.record_removed(block)

    def _is_whole(self, block: Block) -> bool:
        if self._needed:
            return min([block.block_ids[column] for column in self._needed]) >= 0
        return max(block.block_ids) >= 0

    def _add(self, event: CacheEvent, now: float) -> Block:
        parent = self.by_id.get(event.parent_id)
        block = self._hollow.pop(event.node_id, None)
        block = block or Block(event, parent, self._num_columns, self.block_size, now)
        block.parent = parent
        self.by_id[event.node_id] = self.by_hash[block.hash] = block
        siblings = self.roots.setdefault(block.namespace, {}) if parent is None else parent.children
        siblings[event.node_id] = block
        return block

    def _remove(self, block: Block) -> None:
        del self.by_id[block.node_id]
        self.by_hash.pop(block.hash, None)
        if block.children:
            self._hollow[block.node_id] = block
        parent = block.parent
        siblings = self.roots[block.namespace] if parent is None else parent.children
        del siblings[block.node_id]
        if not siblings:
            if parent is None:
                del self.roots[block.namespace]
            else:
                self._hollow.pop(parent.node_id, None)

    def hashes(
        self, namespace: bytes, tokens: np.ndarray, extra_keys: Mapping[int, bytes] | None
    ) -> list[bytes]:
        """The hashes of a prompt's full nodes."""
        links = self.node_tokens // self.block_size
        return block_hashes(namespace, tokens, extra_keys, self.block_size)[links - 1 :: links]

    def path(self, hashes: list[bytes]) -> list[Block]:
        """The leading blocks that are there."""
        found: list[Block] = []
        for block_hash in hashes:
            block = self.by_hash.get(block_hash)
            if block is None or not block.is_there:
                break
            found.append(block)
        return found

    def snapshot(self) -> list[Change]:
        """The present content as changes from an empty mirror: parents first."""
        there = sorted((b for b in self.by_id.values() if b.is_there), key=lambda b: (b.depth, b.node_id))
        return [Change("cleared"), *(Change("stored", block) for block in there)]
