"""Taking a hit: the blocks that others have committed become those of a sequence that has not begun.

A sequence looks when it is opened and again, until it is admitted or withdrawn (`forget.py`), whenever the tree or its
tokens have changed, so that it finds what was committed meanwhile. Which hit is valid is `groups.py`'s to say.

Cost: O(blocks of the prompt) where something has changed, else O(1).
"""

from __future__ import annotations

from quire.cache.manager.blocks import Blocks
from quire.cache.manager.commit import move_to
from quire.cache.manager.groups import find_hit
from quire.cache.manager.sequence import GIVEN_UP, ManagedSequence

__all__ = ["refresh_hit"]


def refresh_hit(blocks: Blocks, sequence: ManagedSequence) -> None:
    """Extend the hit of a sequence not yet admitted by what others have committed since it last looked."""
    tree = blocks.tree
    seen = (tree.version, sequence.num_tokens)
    if sequence.admitted or sequence.node is None or seen == sequence.looked_at:
        return
    sequence.looked_at = seen
    tokens = sequence.tokens[: sequence.most_cached + 1]  # the last is never a hit's
    hit = find_hit(tree, blocks.shape, sequence.node.root, tokens, sequence.extra_keys)
    if hit.num_tokens <= sequence.num_computed:
        return
    old = sequence.kept_blocks(blocks.shape, 0)
    for index, (group, table) in enumerate(zip(blocks.shape.groups, sequence.tables, strict=True)):
        first, num_blocks = group.first_needed(hit.num_tokens), group.num_blocks(hit.num_tokens)
        columns = hit.block_ids[group.first_column : group.first_column + group.per_node]
        table.truncate(0)
        for block, block_id in enumerate(columns.T.reshape(-1)[:num_blocks].tolist()):
            if block >= first:
                blocks.take(block_id, sequence.cache_priority)
            table.append(block_id if block >= first else GIVEN_UP)
        sequence.first_kept[index] = min(first, num_blocks)
    for block_id in old:
        blocks.release(block_id, sequence.id)
    assert hit.node is not None
    move_to(tree, sequence, hit.node)
    sequence.num_computed = sequence.num_cached = sequence.reserved = hit.num_tokens
