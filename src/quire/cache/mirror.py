"""The full blocks of a cache's prefix tree, kept up by its events: what reports, explanations and subscribers read.

A block *is there* while all its groups that keep everything have it (in a model without such groups: any group):
only then can a prefix go through it. Its name is a hash chained over namespace, tokens and extra keys; whoever does not
know the namespace can compute none.

Cost: 15 us and at most 0.8 KB for each block that comes, the log of its loss included (one core, blocks of 16 tokens).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from quire.cache.events import CacheEvent

__all__ = ["Block", "Change", "TreeMirror", "block_hashes", "chained_hashes", "namespace_digest", "root_hash"]


class Block:
    """A full block. children: by node id. made_at, used_at: of the mirror's clock."""

    __slots__ = (
        "account",
        "children",
        "depth",
        "extra_keys",
        "hash",
        "is_there",
        "made_at",
        "namespace",
        "node_id",
        "parent",
        "tokens",
        "units",
        "used_at",
    )

    def __init__(self, event: CacheEvent, parent: Block | None, num_groups: int, now: float) -> None:
        assert event.namespace is not None
        assert event.tokens is not None
        self.node_id = event.node_id
        self.parent = parent
        self.namespace = event.namespace
        self.tokens = event.tokens
        self.extra_keys = event.extra_keys  # by offset
        self.account = event.account
        self.units = [-1] * num_groups
        self.depth: int = 1 if parent is None else parent.depth + 1
        before = parent.hash if parent is not None else root_hash(event.namespace)
        self.hash = _chained(before, event.tokens, event.extra_keys)
        self.children: dict[int, Block] = {}
        self.is_there = False
        self.made_at = self.used_at = now


@dataclass(frozen=True)
class Change:
    """A block has come or gone, or all have (block None). reason, account: of one that is gone, see `CacheEvent`."""

    kind: Literal["stored", "removed", "cleared"]
    block: Block | None = None
    reason: str = ""
    account: int = 0


class TreeMirror:
    """See the module's text. `apply` is an `EventFeed`'s listener; `listeners` take every change in order."""

    def __init__(self, cache: Any, clock: Callable[[], float]) -> None:
        kinds = [group.retention.kind for group in cache.spec.groups]
        self._needed = [i for i, kind in enumerate(kinds) if kind == "full"]
        self._num_groups = len(kinds)
        self.block_size: int = cache.block_size
        self.clock = clock
        self.by_id: dict[int, Block] = {}
        self.by_hash: dict[bytes, Block] = {}
        self.roots: dict[bytes, dict[int, Block]] = {}
        self.listeners: list[Callable[[list[Change]], None]] = []

    def apply(self, events: list[CacheEvent], _: bool = False) -> None:
        now = self.clock()
        changes = [change for event in events for change in self._apply(event, now)]
        if changes:
            for listener in self.listeners:
                listener(changes)

    def _apply(self, event: CacheEvent, now: float) -> Iterator[Change]:
        if event.kind == "cleared":
            gone = [block for block in self.by_id.values() if block.is_there]
            for table in (self.by_id, self.by_hash, self.roots):
                table.clear()
            for block in gone:
                block.is_there = False
                yield Change("removed", block, "cleared")
            yield Change("cleared")
            return
        block = self.by_id.get(event.node_id)
        if event.kind == "stored":
            if block is None and event.parent_id >= 0 and event.parent_id not in self.by_id:
                return  # below a block that no group keeps: nothing goes through that
            if block is None:
                block = self._add(event, now)
            for group, unit in enumerate(event.units):
                if unit >= 0:
                    block.units[group] = unit
            if self._is_whole(block) and not block.is_there:
                block.is_there, block.made_at, block.account = True, now, event.account
                yield Change("stored", block)
            return
        if block is None:
            return
        for group, unit in enumerate(event.units):
            if unit >= 0:
                block.units[group] = -1
        if block.is_there and not self._is_whole(block):
            block.is_there = False
            yield Change("removed", block, event.reason, event.account)
        if max(block.units) < 0:
            self._remove(block)

    def _is_whole(self, block: Block) -> bool:
        if self._needed:
            return min([block.units[group] for group in self._needed]) >= 0
        return max(block.units) >= 0

    def _add(self, event: CacheEvent, now: float) -> Block:
        parent = self.by_id.get(event.parent_id)
        block = Block(event, parent, self._num_groups, now)
        self.by_id[event.node_id] = self.by_hash[block.hash] = block
        siblings = self.roots.setdefault(block.namespace, {}) if parent is None else parent.children
        siblings[event.node_id] = block
        return block

    def _remove(self, block: Block) -> None:
        del self.by_id[block.node_id]
        self.by_hash.pop(block.hash, None)
        siblings = self.roots[block.namespace] if block.parent is None else block.parent.children
        del siblings[block.node_id]
        if block.parent is None and not siblings:
            del self.roots[block.namespace]

    def path(self, hashes: list[bytes]) -> list[Block]:
        """The blocks that are there, from the first on."""
        found: list[Block] = []
        for name in hashes:
            block = self.by_hash.get(name)
            if block is None or not block.is_there:
                break
            found.append(block)
        return found

    def snapshot(self) -> list[Change]:
        """What there is, as changes from nothing: parents first."""
        there = sorted((b for b in self.by_id.values() if b.is_there), key=lambda b: (b.depth, b.node_id))
        return [Change("cleared"), *(Change("stored", block) for block in there)]


def block_hashes(
    namespace: bytes, tokens: np.ndarray, extra_keys: Mapping[int, bytes] | None, block_size: int
) -> list[bytes]:
    """The names of a prompt's full blocks."""
    return chained_hashes(root_hash(namespace), tokens, extra_keys, block_size)


def chained_hashes(
    before: bytes, tokens: np.ndarray, extra_keys: Mapping[int, bytes] | None, block_size: int
) -> list[bytes]:
    """The names of the full blocks of `tokens`, which come behind the block named `before`.

    extra_keys: by position within `tokens`.
    """
    names: list[bytes] = []
    positions = sorted(extra_keys or {})
    for start in range(0, len(tokens) // block_size * block_size, block_size):
        keys = {at - start: extra_keys[at] for at in positions if start <= at < start + block_size}  # type: ignore[index]
        before = _chained(before, tokens[start : start + block_size], keys)
        names.append(before)
    return names


def namespace_digest(namespace: bytes) -> str:
    """16 hexadecimal digits that tell namespaces apart and give none away; "" for the namespace without a name."""
    return hashlib.sha256(b"quire namespace\0" + namespace).hexdigest()[:16] if namespace else ""


def root_hash(namespace: bytes) -> bytes:
    """What a namespace's first block is chained to."""
    return hashlib.sha256(b"quire blocks\0" + namespace).digest()


def _chained(before: bytes, tokens: np.ndarray, extra_keys: Mapping[int, bytes]) -> bytes:
    digest = hashlib.sha256(before + np.asarray(tokens, "<i4").tobytes())
    for at in sorted(extra_keys):
        digest.update(at.to_bytes(4, "little") + len(extra_keys[at]).to_bytes(4, "little") + extra_keys[at])
    return digest.digest()
