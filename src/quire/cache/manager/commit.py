"""Making computed tokens findable: how a sequence's blocks become nodes of the prefix tree.

A block that became full is inserted below the sequence's node, or, where another sequence has committed the
same tokens before, its table is pointed at those blocks and our own are let go (the one place where blocks
computed twice are merged). The rest, fewer than block_size tokens, is kept as a partial node that grows with
each commit, so that a hit can end at any token.

*Own* below is the partial node of the block we write: only the block's writer extends it. Of a restored sequence blocks
behind a window were never written: it has no blocks there, and the nodes get holes.

Cost: O(new blocks x log siblings).
"""

from __future__ import annotations

from quire.cache.manager.blocks import Blocks
from quire.cache.manager.content import encode
from quire.cache.manager.prefix import HOLE, Node, PrefixTree
from quire.cache.manager.sequence import GIVEN_UP, SequenceState

__all__ = ["make_findable", "move_to", "release_behind_windows"]


def make_findable(blocks: Blocks, sequence: SequenceState, end: int) -> int:
    """Commit the tokens from `num_computed` to `end` to the tree; the number of blocks deduplicated."""
    size = blocks.tree.block_size
    num_deduplicated = 0
    for block in range(sequence.num_computed // size, end // size):
        num_deduplicated += _insert_full_block(blocks, sequence, block)
    if end % size:
        _insert_tail(blocks, sequence, end)
    return num_deduplicated


def _insert_full_block(blocks: Blocks, sequence: SequenceState, block: int) -> int:
    size, parent = blocks.tree.block_size, sequence.node
    assert parent is not None
    content = encode(sequence.tokens, sequence.extra_keys, block * size, (block + 1) * size)
    node = blocks.tree.equal_child(parent, content)
    own = _own_partial_node(blocks, sequence, block)
    num_deduplicated = 0
    if node is None:
        node = _insert_or_extend(blocks, sequence, block, content, size)
    else:
        if own is not None:
            # The full node says all that our partial one did; whoever names its blocks keeps them.
            blocks.remove(own)
        supplied = [HOLE] * len(sequence.tables)
        for group, table in enumerate(sequence.tables):
            ours, theirs = table[block], node.block_ids[group]
            if ours == GIVEN_UP:
                continue
            if theirs == HOLE:
                blocks.supply(node, group, ours)
                supplied[group] = ours
            else:
                blocks.take(theirs, sequence.cache_priority)
                table[block] = theirs
                blocks.release(ours, sequence.id)
                num_deduplicated += 1
        if any(block_id != HOLE for block_id in supplied):
            blocks.note_stored(node, supplied)
    move_to(blocks.tree, sequence, node)
    return num_deduplicated


def _insert_tail(blocks: Blocks, sequence: SequenceState, end: int) -> None:
    block, num_tokens = divmod(end, blocks.tree.block_size)
    assert sequence.node is not None
    content = encode(sequence.tokens, sequence.extra_keys, end - num_tokens, end)
    if blocks.tree.child_starting_with(sequence.node, content) is None:
        _insert_or_extend(blocks, sequence, block, content, num_tokens)


def _insert_or_extend(
    blocks: Blocks, sequence: SequenceState, block: int, content: bytes, num_tokens: int
) -> Node:
    own = _own_partial_node(blocks, sequence, block)
    if own is not None:
        blocks.extend(own, content, num_tokens)
        return own
    assert sequence.node is not None
    return blocks.insert(sequence.node, content, num_tokens, [table[block] for table in sequence.tables])


def _own_partial_node(blocks: Blocks, sequence: SequenceState, block: int) -> Node | None:
    """All blocks of the block are in it, or none."""
    ours = next((table[block] for table in sequence.tables if table[block] != GIVEN_UP), GIVEN_UP)
    return None if ours == GIVEN_UP else blocks.node_of[ours]


def move_to(tree: PrefixTree, sequence: SequenceState, node: Node) -> None:
    """The sequence's full committed blocks end in `node` from now on."""
    left = sequence.node
    assert left is not None
    node.num_sequences += 1
    left.num_sequences -= 1
    sequence.node = node
    tree.prune(left)


def release_behind_windows(blocks: Blocks, sequence: SequenceState, num_computed: int) -> None:
    """Let go of the blocks that no query from `num_computed` on reads, the deepest first in each group."""
    for group, (span, table) in enumerate(zip(blocks.spans, sequence.tables, strict=True)):
        first = span.first_needed(num_computed) // blocks.tree.block_size
        for block in range(first - 1, sequence.first_kept[group] - 1, -1):
            if table[block] != GIVEN_UP:
                blocks.release(table[block], sequence.id)
                table[block] = GIVEN_UP
        sequence.first_kept[group] = max(first, sequence.first_kept[group])
