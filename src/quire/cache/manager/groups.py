"""Retention rules: how much of a prefix can be used when each group has kept something different.

A hit of h tokens is valid if every group still has the blocks that the query at position h may read:
`first_needed(h) // block_size .. (h - 1) // block_size`. For a full-attention group these are all blocks, for
a window only those that the window covers, for a chunk only those since the chunk began.

`first_needed` never falls as h grows. So inside one block the largest h is valid if any is, and it is enough
to try the wanted number of tokens and then the block boundaries below it.

Cost: O(groups x blocks), one binary search among siblings per block and at most `MAX_OTHERS` more siblings. Nothing
here changes anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.cache.manager.content import ExtraKeys, decode, encode
from quire.cache.manager.prefix import HOLE, Node, PrefixTree
from quire.cache.types import Int32Array
from quire.spec import Span

__all__ = ["Hit", "explain_hit", "find_hit", "longest_valid_hit"]

MAX_OTHERS = 64  # siblings that one search looks at beside the closest ones; the native back end has the same


@dataclass
class Hit:
    """A valid hit: its length, the node its full blocks end in, and its blocks.

    `block_ids`: int32 [groups, ceil(num_tokens / block_size)]; those before what a group needs are not valid.
    """

    num_tokens: int
    node: Node | None
    block_ids: Int32Array


def find_hit(
    tree: PrefixTree,
    spans: list[Span],
    root: Node | None,
    tokens: Int32Array,
    extra_keys: ExtraKeys,
) -> Hit:
    """The longest valid hit below `root`, which always leaves the last token to compute.

    Where the closest child has lost a block, other children that share a shorter beginning and have all of theirs are
    looked at, `MAX_OTHERS` of them in all: content that a pin keeps stays found beside what a window left behind.
    """
    size = tree.block_size
    num_usable = len(tokens) - 1
    num_matched = num_tokens = 0
    num_others = MAX_OTHERS
    missing = [-1] * len(spans)  # by group, the deepest block of the path without a block
    path: list[Node] = []
    last: Node | None = None

    def is_valid(num_hit: int) -> bool:
        return all(
            span.first_needed(num_hit) // size > block for span, block in zip(spans, missing, strict=True)
        )

    node = root
    while node is not None and num_matched < num_usable:
        stop = min(num_matched + size, num_usable)
        rest = encode(tokens, extra_keys, num_matched, stop)
        child, num_common = tree.closest_child(node, rest)
        if child is None:
            break
        holes = [group for group, block_id in enumerate(child.block_ids) if block_id == HOLE]
        if holes and is_valid(stop):
            other, num_shared, num_seen = tree.closest_whole_child(node, rest, num_others)
            num_others -= num_seen
            if other is not None and is_valid(num_matched + num_shared):
                num_tokens, last = num_matched + num_shared, other
        for group in holes:
            missing[group] = num_matched // size
        path.append(child)
        num_matched += num_common
        if is_valid(num_matched):
            num_tokens, last = num_matched, child
        node = child if num_common == size else None
    num_full, num_blocks = num_tokens // size, -(-num_tokens // size)
    found = [*path[: num_blocks - 1], last] if last is not None else []
    block_ids = np.array([node.block_ids for node in found], np.int32).reshape(num_blocks, len(spans)).T
    return Hit(num_tokens, found[num_full - 1] if num_full else root, block_ids)


def explain_hit(
    tree: PrefixTree, root: Node | None, tokens: Int32Array, extra_keys: ExtraKeys
) -> tuple[int, Int32Array]:
    """How many of all the tokens the nodes below `root` share, whatever blocks they have left, and the tokens of the
    nearest block where they stop; none where the tokens end there or there is no block."""
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


def longest_valid_hit(spans: list[Span], block_ids: Int32Array, num_tokens: int, block_size: int) -> int:
    """Largest valid hit of at most `num_tokens` tokens.

    `block_ids`: int32 [groups, ceil(num_tokens / block_size)], below 0 where a group has no block.
    """
    num_blocks = block_ids.shape[1]
    blocks = np.arange(num_blocks)
    # run_start[g, b]: first block of the unbroken run of blocks that ends with block b; b + 1 for a gap at b.
    run_start = np.maximum.accumulate(np.where(block_ids < 0, blocks + 1, 0), axis=1)
    for block in range(num_blocks - 1, -1, -1):
        hit = min(num_tokens, (block + 1) * block_size)
        if all(
            span.first_needed(hit) // block_size >= run_start[group, block]
            for group, span in enumerate(spans)
        ):
            return hit
    return 0
