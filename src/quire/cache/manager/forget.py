"""Forgetting content on request: all content that begins with given tokens, even while sequences hold it.

All blocks leave every node at or below the end of the tokens, deepest nodes first. A cached block is free at once, a
held or in flight one when its last use ends. A sequence that has computed such content is *withdrawn*: it keeps its
blocks and goes on, its node is None from then on, and its commits make no nodes. So none of it is found again, and its
unshared blocks are free when it ends.

Cost: O(nodes at and below x log siblings + open sequences).
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.cache.manager.blocks import Blocks
from quire.cache.manager.elements import ExtraKeys, encode
from quire.cache.manager.prefix import Node, PrefixTree
from quire.cache.manager.sequence import ManagedSequence
from quire.cache.types import Int32Array

__all__ = ["drop", "withdraw"]


def drop(
    blocks: Blocks,
    sequences: Iterable[ManagedSequence],
    root: Node | None,
    tokens: Int32Array,
    extra_keys: ExtraKeys,
) -> tuple[int, int]:
    """Forget all content below `root` that begins with the tokens. Returns the blocks made free, and those still in
    use.

    sequences: the open ones.
    """
    num_free, num_used = len(blocks.pool.free), 0
    size = blocks.tree.block_size
    start = (len(tokens) - 1) // size * size if len(tokens) else 0
    above = _node_of(blocks.tree, root, tokens[:start], extra_keys)
    if above is None:
        return 0, 0
    rest = encode(tokens, extra_keys, start, len(tokens))
    nodes = blocks.tree.children_starting_with(above, rest)
    for node in nodes:
        nodes.extend(node.children)
    gone = {id(node) for node in nodes}
    for sequence in sequences:
        if id(sequence.node) in gone or (
            sequence.node is above and _begins_with(sequence, start, len(tokens), rest)
        ):
            withdraw(blocks.tree, sequence)
    for node in reversed(nodes):
        num_used += blocks.forget(node)
    return len(blocks.pool.free) - num_free, num_used


def withdraw(tree: PrefixTree, sequence: ManagedSequence) -> None:
    """The sequence's later commits are not found. A second call does nothing."""
    left, sequence.node = sequence.node, None
    if left is not None:
        left.num_sequences -= 1
        tree.prune(left)


def _node_of(tree: PrefixTree, node: Node | None, tokens: Int32Array, extra_keys: ExtraKeys) -> Node | None:
    """The node at the end of these whole blocks below `node`; None if there is none."""
    for start in range(0, len(tokens), tree.block_size):
        if node is None:
            return None
        node = tree.equal_child(node, encode(tokens, extra_keys, start, start + tree.block_size))
    return node


def _begins_with(sequence: ManagedSequence, start: int, stop: int, rest: bytes) -> bool:
    """Whether the sequence's computed part of the block at `start` begins with `rest`, the tokens up to `stop`.

    A node for it need not exist: a sibling may have the same tokens.
    """
    if sequence.num_computed < max(stop, 1):
        return False
    return encode(sequence.tokens, sequence.extra_keys, start, stop) == rest
