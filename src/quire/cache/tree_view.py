"""The prefix tree at one moment, as arrays: for reports. Row i is a node; parents stand before their children.

First the children of the roots (roots in the order of their namespaces' bytes, siblings in the order of their tokens),
then the children of the first row, and so on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire.cache.backend import Int32Array, Int64Array, TreeArrays
from quire.cache.prefix import HOLE

if TYPE_CHECKING:
    from quire.cache.block_manager import PythonBlockManager

__all__ = ["STATES", "TreeView", "empty_tree", "tree_arrays"]

STATES = ("gone", "cached", "held", "leased")


@dataclass(frozen=True)
class TreeView:
    """Arrays of n nodes and g groups; entries of a unit that is gone are -1, its state 0.

    node_ids: numbered when `tree` or `record_events` is first used, then as they are made; never used twice.
    """

    node_ids: Int64Array  # [n]
    parent_ids: Int64Array  # [n]; -1 below a root
    namespace_index: Int32Array  # [n], into `namespaces`
    depths: Int32Array  # [n]; 1 below a root
    num_tokens: Int32Array  # [n]
    units: Int32Array  # [n, g]
    num_references: Int32Array  # [n, g]: entries of block tables that name the unit
    accounts: Int32Array  # [n, g]
    retentions: Int32Array  # [n, g]
    states: Int32Array  # [n, g], index into STATES
    namespaces: list[bytes]

    @classmethod
    def from_arrays(cls, arrays: TreeArrays) -> TreeView:
        return cls(**arrays)

    def __len__(self) -> int:
        return len(self.node_ids)


def empty_tree(num_groups: int) -> TreeArrays:
    """The entries of a `TreeView` of no node."""
    by_node = ("parent_ids", "node_ids", "namespace_index", "depths", "num_tokens")
    by_unit = ("units", "num_references", "accounts", "retentions", "states")
    arrays: TreeArrays = {
        name: np.empty(0, np.int64 if name.endswith("_ids") else np.int32) for name in by_node
    }
    arrays |= {name: np.empty((0, num_groups), np.int32) for name in by_unit}
    return arrays | {"namespaces": []}


def tree_arrays(manager: PythonBlockManager) -> TreeArrays:
    """The entries of a `TreeView` of the Python back end's tree."""
    pool, tree = manager.blocks.pool, manager.blocks.tree
    tree.start_numbering()
    nodes = tree.all_nodes()
    names = sorted(tree.roots)
    index = {name: i for i, name in enumerate(names)}

    def state(unit: int) -> int:
        if pool.num_references[unit]:
            return STATES.index("held")
        return STATES.index("cached" if unit in pool.cached else "leased")

    def by_group(of_unit, gone: int) -> Int32Array:
        rows = [[gone if unit == HOLE else of_unit(unit) for unit in node.units] for node in nodes]
        return np.array(rows, np.int32).reshape(-1, manager.num_groups)

    parents = [node.parent for node in nodes]
    return {
        "node_ids": np.array([node.id for node in nodes], np.int64),
        "parent_ids": np.array([-1 if p is None or p.parent is None else p.id for p in parents], np.int64),
        "namespace_index": np.array([index[node.root.content] for node in nodes], np.int32),
        "depths": np.array([node.depth for node in nodes], np.int32),
        "num_tokens": np.array([node.num_tokens for node in nodes], np.int32),
        "units": by_group(int, -1),
        "num_references": by_group(pool.num_references.__getitem__, -1),
        "accounts": by_group(pool.cached.account.__getitem__, -1),
        "retentions": by_group(pool.cached.retention.__getitem__, -1),
        "states": by_group(state, 0),
        "namespaces": names,
    }
