"""Making computed tokens findable: how a sequence's blocks become nodes of the prefix tree.

A node's worth of tokens that became full is inserted below the sequence's node. If another sequence has committed the
same tokens before, the table changes to its blocks and our own are released (the one place where blocks computed twice
are merged). The remaining tokens, fewer than a node has, become a partial node that grows with each commit, so that a
hit can end at any token.

*Own* below is the partial node of the blocks we write: only their writer extends it. A restored sequence has no blocks
behind a window, as they were never written, and the nodes get holes there.

Cost: O(new blocks x log siblings).
"""

from __future__ import annotations

from quire.cache.manager.blocks import Blocks
from quire.cache.manager.elements import encode
from quire.cache.manager.prefix import HOLE, Node
from quire.cache.manager.sequence import GIVEN_UP, ManagedSequence

__all__ = ["make_findable", "release_behind_windows"]


def make_findable(blocks: Blocks, sequence: ManagedSequence, end: int) -> int:
    """Commit the tokens from `num_computed` to `end` to the tree; the number of blocks deduplicated."""
    size = blocks.tree.block_size
    num_deduplicated = 0
    for depth in range(sequence.num_computed // size, end // size):
        num_deduplicated += _insert_full_node(blocks, sequence, depth)
    if end % size:
        _insert_tail(blocks, sequence, end)
    return num_deduplicated


def _insert_full_node(blocks: Blocks, sequence: ManagedSequence, depth: int) -> int:
    size, parent = blocks.tree.block_size, sequence.node
    assert parent is not None
    content = encode(sequence.tokens, sequence.extra_keys, depth * size, (depth + 1) * size)
    node = blocks.tree.equal_child(parent, content)
    own = _own_partial_node(blocks, sequence, depth)
    num_deduplicated = 0
    if node is None:
        node = _insert_or_extend(blocks, sequence, depth, content, size)
    else:
        if own is not None:
            # The full node has all tokens of our partial node; tables that name its blocks keep them.
            blocks.remove(own)
        supplied = [HOLE] * len(node.block_ids)
        for group, table in zip(blocks.shape.groups, sequence.tables, strict=True):
            for part in range(group.per_node):
                column, block = group.first_column + part, depth * group.per_node + part
                ours, theirs = table[block], node.block_ids[column]
                if ours == GIVEN_UP:
                    continue
                if theirs == HOLE:
                    blocks.supply(node, column, ours)
                    supplied[column] = ours
                else:
                    blocks.take(theirs, sequence.cache_priority)
                    table[block] = theirs
                    blocks.release(ours, sequence.id)
                    num_deduplicated += 1
        if any(block_id != HOLE for block_id in supplied):
            blocks.note_stored(node, supplied)
    blocks.move_to(sequence, node)
    return num_deduplicated


def _insert_tail(blocks: Blocks, sequence: ManagedSequence, end: int) -> None:
    depth, num_tokens = divmod(end, blocks.tree.block_size)
    assert sequence.node is not None
    content = encode(sequence.tokens, sequence.extra_keys, end - num_tokens, end)
    if blocks.tree.child_starting_with(sequence.node, content) is None:
        _insert_or_extend(blocks, sequence, depth, content, num_tokens)


def _insert_or_extend(
    blocks: Blocks, sequence: ManagedSequence, depth: int, content: bytes, num_tokens: int
) -> Node:
    own = _own_partial_node(blocks, sequence, depth)
    block_ids = sequence.node_blocks(blocks.shape, depth, depth * blocks.shape.size + num_tokens)
    if own is not None:
        blocks.extend(own, content, num_tokens, block_ids)
        return own
    assert sequence.node is not None
    return blocks.insert(sequence.node, content, num_tokens, block_ids)


def _own_partial_node(blocks: Blocks, sequence: ManagedSequence, depth: int) -> Node | None:
    """The partial node that the sequence writes. It has all blocks that begin before its end. Blocks after its end are
    in no node: a sibling had the same tokens when they came."""
    if sequence.num_computed <= depth * blocks.shape.size:
        return None
    nodes = (blocks.node_of[block_id] for _, _, block_id in sequence.partial_blocks(blocks.shape))
    return next((node for node in nodes if node is not None), None)


def release_behind_windows(blocks: Blocks, sequence: ManagedSequence, num_computed: int) -> None:
    """Release the blocks that no query from `num_computed` on reads, the deepest first in each group."""
    for group, (shape, table) in enumerate(zip(blocks.shape.groups, sequence.tables, strict=True)):
        first = shape.first_needed(num_computed)
        for block in range(first - 1, sequence.first_kept[group] - 1, -1):
            if table[block] != GIVEN_UP:
                blocks.release(table[block], sequence.id)
                table[block] = GIVEN_UP
        sequence.first_kept[group] = max(first, sequence.first_kept[group])
