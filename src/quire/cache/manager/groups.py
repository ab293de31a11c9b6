"""Retention rules: how much of a prefix can be used when each group has kept different blocks.

A hit of h tokens is valid if every group still has the blocks that the query at position h may read: `first_needed(h)
// size .. (h - 1) // size`, where a block of the group has `size` tokens. For a full-attention group these are all
blocks, for a window only those that the window covers, for a chunk only those since the chunk began.

`first_needed` never falls as h grows. So inside one block the largest h is valid if any is, and it is enough to try the
wanted number of tokens and then the boundaries of the smallest blocks below it.

Cost: O(columns x nodes), one binary search among siblings per node and at most `MAX_OTHERS` more siblings. This file
changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.cache.manager.elements import ExtraKeys, decode, encode
from quire.cache.manager.node_shape import NodeShape
from quire.cache.manager.prefix import HOLE, Node, PrefixTree
from quire.cache.types import Int32Array

__all__ = ["Hit", "explain_hit", "find_hit", "longest_valid_hit"]

MAX_OTHERS = 64  # further siblings that one search compares; the native back end has the same limit


@dataclass
class Hit:
    """A valid hit: its length, the node in which its full blocks end, and its blocks.

    `block_ids`: int32 [columns, nodes]; entries before a group's first needed block, and after the hit, are not valid.
    """

    num_tokens: int
    node: Node | None
    block_ids: Int32Array


def find_hit(
    tree: PrefixTree,
    shape: NodeShape,
    root: Node | None,
    tokens: Int32Array,
    extra_keys: ExtraKeys,
) -> Hit:
    """The longest valid hit below `root`, which always leaves the last token to compute.

    If the closest child has lost a block, the search also compares children that share a shorter beginning and have all
    its blocks, `MAX_OTHERS` in all: pinned content stays found next to nodes that lost blocks behind a window.
    """
    size = tree.block_size
    num_usable = len(tokens) - 1
    num_matched = num_tokens = 0
    num_others = MAX_OTHERS
    missing = [-1] * len(shape.groups)  # by group, the deepest block missing on the path
    path: list[Node] = []
    last: Node | None = None

    def is_valid(num_hit: int) -> bool:
        return all(
            group.first_needed(num_hit) > block for group, block in zip(shape.groups, missing, strict=True)
        )

    def is_valid_in(child: Node, num_hit: int) -> bool:
        """As `is_valid`, for a hit that ends in this child of the path."""
        return is_valid(num_hit) and all(
            block < group.first_needed(num_hit) or child.block_ids[group.first_column + part] != HOLE
            for group in shape.groups
            for part, block in enumerate(group.in_node(num_matched // size, num_hit))
        )

    node = root
    while node is not None and num_matched < num_usable:
        stop = min(num_matched + size, num_usable)
        rest = encode(tokens, extra_keys, num_matched, stop)
        child, num_common = tree.closest_child(node, rest)
        if child is None:
            break
        is_whole = tree.is_whole(child, num_common)
        if not is_whole and is_valid(stop):
            other, num_shared, num_seen = tree.closest_whole_child(node, rest, num_others)
            num_others -= num_seen
            if other is not None and is_valid(num_matched + num_shared):
                num_tokens, last = num_matched + num_shared, other
        num_hit = num_matched + num_common
        while num_hit > num_matched and not is_valid_in(child, num_hit):
            num_hit = (num_hit - 1) // shape.step * shape.step
        if num_hit > num_matched and num_hit >= num_tokens:
            num_tokens, last = num_hit, child
        path.append(child)
        if not is_whole:
            for index, group in enumerate(shape.groups):
                for part, block in enumerate(group.in_node(num_matched // size, num_matched + num_common)):
                    if child.block_ids[group.first_column + part] == HOLE:
                        missing[index] = block
        num_matched += num_common
        node = child if num_common == size else None
    num_full, num_nodes = num_tokens // size, -(-num_tokens // size)
    nodes = [*path[: num_nodes - 1], last] if last is not None else []
    block_ids = np.array([node.block_ids for node in nodes], np.int32).reshape(num_nodes, shape.num_columns).T
    return Hit(num_tokens, nodes[num_full - 1] if num_full else root, block_ids)


def explain_hit(
    tree: PrefixTree, root: Node | None, tokens: Int32Array, extra_keys: ExtraKeys
) -> tuple[int, Int32Array]:
    """The number of tokens that the nodes below `root` share with the prompt, even without blocks, and the tokens of
    the nearest block where they differ; empty if the tokens end there or there is no block."""
    size, num_common = tree.block_size, 0
    nearest: list[int] = []
    node = root
    while node is not None and num_common < len(tokens):
        rest = encode(tokens, extra_keys, num_common, min(num_common + size, len(tokens)))
        node, num_more = tree.nearest_child(node, rest)
        if node is not None and num_more < min(size, len(tokens) - num_common):
            nearest, _ = decode(node.content)
        num_common += num_more
        if nearest:
            break
    return num_common, np.array(nearest, np.int32)


def longest_valid_hit(shape: NodeShape, tables: list[Int32Array], num_tokens: int) -> int:
    """Largest valid hit of at most `num_tokens` tokens, a length that all tables reach.

    `tables`: int32 [blocks] of each group, negative for missing blocks.
    """
    # run_starts[g][b]: first block of the unbroken run of blocks that ends with block b; b + 1 for a gap at b.
    run_starts = [
        np.maximum.accumulate(np.where(table < 0, np.arange(1, len(table) + 1), 0)) for table in tables
    ]
    hit = num_tokens
    while hit > 0:
        if all(
            group.first_needed(hit) >= run_start[(hit - 1) // group.tokens]
            for group, run_start in zip(shape.groups, run_starts, strict=True)
        ):
            return hit
        hit = (hit - 1) // shape.step * shape.step
    return 0
