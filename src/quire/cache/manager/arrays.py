"""The blocks and the tree as arrays, for reports: the data of `TreeView`, `BlockMap` and `BlockContent`.

Changes nothing. Cost: O(nodes) and O(blocks + nodes); `content_of` O(tokens).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.cache.block_map import CACHED, FREE, GIVEN_UP, HELD, IN_FLIGHT
from quire.cache.manager.blocks import Blocks
from quire.cache.manager.elements import decode
from quire.cache.manager.prefix import HOLE
from quire.cache.tree_view import STATES, TreeArrays
from quire.cache.types import Int32Array

__all__ = ["block_map", "content_of", "tree_arrays"]


def tree_arrays(blocks: Blocks) -> TreeArrays:
    """The entries of a `TreeView`."""
    pool, tree = blocks.pool, blocks.tree
    tree.start_numbering()
    nodes = tree.all_nodes()
    names = sorted(tree.roots)
    index = {name: i for i, name in enumerate(names)}

    def state(block_id: int) -> int:
        if pool.num_references[block_id]:
            return STATES.index("held")
        return STATES.index("cached" if block_id in pool.cached else "in_flight")

    def by_column(of_block, gone: int) -> Int32Array:
        rows = [
            [gone if block_id == HOLE else of_block(block_id) for block_id in node.block_ids]
            for node in nodes
        ]
        return np.array(rows, np.int32).reshape(-1, blocks.shape.num_columns)

    parents = [node.parent for node in nodes]
    return {
        "node_ids": np.array([node.id for node in nodes], np.int64),
        "parent_ids": np.array([-1 if p is None or p.parent is None else p.id for p in parents], np.int64),
        "namespace_index": np.array([index[node.root.content] for node in nodes], np.int32),
        "depths": np.array([node.depth for node in nodes], np.int32),
        "num_tokens": np.array([node.num_tokens for node in nodes], np.int32),
        "block_ids": by_column(int, -1),
        "num_references": by_column(pool.num_references.__getitem__, -1),
        "owner_ids": by_column(pool.cached.owner_id.__getitem__, -1),
        "cache_priorities": by_column(pool.cached.cache_priority.__getitem__, -1),
        "states": by_column(state, 0),
        "namespaces": names,
    }


def block_map(blocks: Blocks) -> tuple[NDArray[np.uint8], Int32Array]:
    """(states, namespace_index) of `BlockMap`. This file does not know pins: their blocks are HELD."""
    pool, tree = blocks.pool, blocks.tree
    states = np.full(pool.num_ids, HELD, np.uint8)
    states[list(pool.free)] = FREE
    states[list(pool.cached)] = CACHED
    states[list(pool.in_flight)] = IN_FLIGHT
    states[pool.given_up] = GIVEN_UP
    index = {name: i for i, name in enumerate(sorted(tree.roots))}
    names = np.full(pool.num_ids, -1, np.int32)
    for node in tree.all_nodes():
        for block_id in node.block_ids:
            if block_id != HOLE:
                names[block_id] = index[node.root.content]
    return states, names


def content_of(blocks: Blocks, block_id: int) -> tuple[bytes, Int32Array, int] | None:
    """(namespace, tokens, num_own) of `BlockContent`; None if the content is not known."""
    num_ids = blocks.pool.num_ids
    if not 0 <= block_id < num_ids:
        raise ValueError(f"expected a block of 0 .. {num_ids - 1}, got {block_id} in content_of")
    node = blocks.node_of[block_id]
    if node is None:
        return None
    shape = blocks.shape
    column = node.block_ids.index(block_id)
    group = next(group for group in reversed(shape.groups) if group.first_column <= column)
    num_own = min(group.tokens, node.num_tokens - shape.starts[column])
    end = (node.depth - 1) * shape.size + shape.starts[column] + num_own
    path: list[list[int]] = []
    while node.parent is not None:
        path.append(decode(node.content)[0])
        node = node.parent
    tokens = [token for block in reversed(path) for token in block]
    return node.content, np.array(tokens[:end], np.int32), num_own
