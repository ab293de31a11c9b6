"""Forgetting content on purpose: all that begins with given tokens.

Of every node at or below their end each unit that no table names leaves the node, deepest nodes first; it is free, or
will be when its lease ends. Held units stay, and with them the nodes they need.
Cost: O(nodes at and below x log siblings).
"""

from __future__ import annotations

from quire.cache.backend import Int32Array
from quire.cache.blocks import Blocks
from quire.cache.content import ExtraKeys, encode
from quire.cache.prefix import Node, PrefixTree

__all__ = ["drop"]


def drop(blocks: Blocks, root: Node | None, tokens: Int32Array, extra_keys: ExtraKeys) -> int:
    """Forget what begins with the tokens below `root`; the number of units made free."""
    num_free = len(blocks.pool.free)
    found = _at_the_end(blocks.tree, root, tokens, extra_keys)
    for node in found:
        found.extend(node.children)
    for node in reversed(found):
        blocks.forget(node)
    return len(blocks.pool.free) - num_free


def _at_the_end(tree: PrefixTree, root: Node | None, tokens: Int32Array, extra_keys: ExtraKeys) -> list[Node]:
    """The nodes in which the last of the tokens lies, or all below the root if there is none."""
    size, node = tree.block_size, root
    num_before = (len(tokens) - 1) // size * size if len(tokens) else 0
    for start in range(0, num_before, size):
        if node is None:
            return []
        node = tree.equal_child(node, encode(tokens, extra_keys, start, start + size))
    if node is None:
        return []
    rest = encode(tokens, extra_keys, num_before, len(tokens))
    return tree.children_starting_with(node, rest)
