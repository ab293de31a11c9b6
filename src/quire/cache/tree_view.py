"""The prefix tree at one moment, as arrays: for reports. Row i is a node; parents stand before their children.

The order: first the children of the roots (roots in the order of their namespaces' bytes, siblings in the order of
their tokens), then the children of the first row, and so on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from quire.cache.types import Int32Array, Int64Array

__all__ = ["STATES", "TreeArrays", "TreeView"]

TreeArrays: TypeAlias = dict[str, Any]
"""The entries of a `TreeView`, by name, as a block manager returns them."""

STATES = ("gone", "cached", "held", "in_flight")


@dataclass(frozen=True)
class TreeView:
    """Arrays of n nodes of g blocks, group after group (one block each if all groups' blocks have as many tokens).
    Entries of a block that is gone, or beyond a partial node's end, are -1, its state 0.

    node_ids: numbered when `tree` or `record_events` is first used, then in the order of creation; never used twice.
    """

    node_ids: Int64Array  # [n]
    parent_ids: Int64Array  # [n]; -1 below a root
    namespace_index: Int32Array  # [n], into `namespaces`
    depths: Int32Array  # [n]; 1 below a root
    num_tokens: Int32Array  # [n]
    block_ids: Int32Array  # [n, g]
    num_references: Int32Array  # [n, g]: entries of block tables that name the block
    owner_ids: Int32Array  # [n, g]
    cache_priorities: Int32Array  # [n, g]
    states: Int32Array  # [n, g], index into STATES
    namespaces: list[bytes]

    @classmethod
    def from_arrays(cls, arrays: TreeArrays) -> TreeView:
        return cls(**arrays)

    def __len__(self) -> int:
        return len(self.node_ids)
