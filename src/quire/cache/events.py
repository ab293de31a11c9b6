"""Changes of the full blocks of the prefix tree, in order: for code that stores content elsewhere or reports it.

    stored    blocks of a node became findable. The first such event of a node creates it. Its blocks in other groups,
              if it has any, are as earlier events said
    removed   blocks of a node are no longer findable; the node is gone when it has none left
    cleared   all nodes are gone

Replayed from the beginning (`cleared`, then the content at that time), the events give exactly the full nodes that have
blocks. Partial nodes cause no events. A node's id is never given to another node.

After `reserve`, and before its step runs, the bytes of removed blocks are still intact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from quire.cache.types import NORMAL, Int32Array, Int64Array

__all__ = ["KINDS", "REASONS", "CacheEvent", "CacheEvents", "EventArrays"]

EventArrays: TypeAlias = dict[str, Any]
"""The entries of `CacheEvents`, by name, as a block manager returns them."""

KINDS = ("stored", "removed", "cleared")
REASONS = ("", "evicted", "forgotten", "quota")


@dataclass(frozen=True)
class CacheEvent:
    """One event. Without a node (cleared) its id is -1.

    blocks: of each group, one or several (`KVGroup.blocks_per_node`), -1 for blocks that the event does not concern.
    parent_id: -1 below a root.
    owner: stored: the blocks' owner; removed: the owner that needed the room, 0 for no owner.
    reason: of removed: "evicted" (`reserve` needed room in the pool), "quota" (room in its owner's quota) or
    "forgotten" (`drop`, `resize`, `trim`); else "".
    cache_priority: the highest among the blocks: stored: those of the event; removed: all that the node had. namespace,
    tokens (int32 [node_tokens]), extra_keys (by offset in the node): of stored.
    """

    kind: Literal["stored", "removed", "cleared"]
    node_id: int
    parent_id: int
    owner_id: int
    block_ids: tuple[int, ...]
    reason: str
    namespace: bytes | None = None
    tokens: Int32Array | None = None
    cache_priority: int = NORMAL
    extra_keys: dict[int, bytes] = field(default_factory=dict)

    @property
    def is_eviction(self) -> bool:
        """Whether a reservation took the blocks."""
        return self.reason in ("evicted", "quota")


@dataclass(frozen=True)
class CacheEvents:
    """Several events as arrays: the result of `Cache.take_events`. Iterating gives `CacheEvent`s."""

    kinds: Int32Array  # [n], index into KINDS
    reasons: Int32Array  # [n], index into REASONS
    node_ids: Int64Array  # [n]
    parent_ids: Int64Array  # [n]; -1 where not stored
    owner_ids: Int32Array  # [n]
    cache_priorities: Int32Array  # [n]
    namespace_index: Int32Array  # [n], into `namespaces`; -1 where not stored
    block_ids: Int32Array  # [n, blocks of a node]
    tokens: Int32Array  # [stored events, node_tokens]
    namespaces: list[bytes]
    extra_keys: list[tuple[int, int, bytes]]  # (event, offset in its node, key)

    @classmethod
    def from_arrays(cls, arrays: EventArrays) -> CacheEvents:
        return cls(**arrays)

    def __len__(self) -> int:
        return len(self.kinds)

    def __iter__(self) -> Iterator[CacheEvent]:
        keys: dict[int, dict[int, bytes]] = {}
        for event, offset, key in self.extra_keys:
            keys.setdefault(event, {})[offset] = key
        columns = (
            self.kinds,
            self.reasons,
            self.node_ids,
            self.parent_ids,
            self.owner_ids,
            self.cache_priorities,
            self.namespace_index,
        )
        plain = zip(*(column.tolist() for column in columns), self.block_ids.tolist(), strict=True)
        row = 0
        for i, (kind, reason, node_id, parent_id, owner_id, cache_priority, named, block_ids) in enumerate(
            plain
        ):
            is_stored = named >= 0
            yield CacheEvent(
                KINDS[kind],  # type: ignore[arg-type]
                node_id,
                parent_id,
                owner_id,
                tuple(block_ids),
                REASONS[reason],
                self.namespaces[named] if is_stored else None,
                self.tokens[row] if is_stored else None,
                cache_priority,
                keys.get(i, {}),
            )
            row += is_stored
