"""Forking and rewinding: a second table over the same blocks, and a table cut back to an earlier token.

Cost: O(blocks of the sequence).
"""

from __future__ import annotations

from quire.cache.manager.blocks import Blocks
from quire.cache.manager.groups import longest_valid_hit
from quire.cache.manager.pool import NO_WRITER
from quire.cache.manager.sequence import GIVEN_UP, ManagedSequence
from quire.cache.types import NO_LIMIT

__all__ = ["forget_from", "share_computed"]


def share_computed(blocks: Blocks, parent: ManagedSequence, child: ManagedSequence) -> None:
    """Gives the child, new and with the parent's tokens, the parent's computed blocks too."""
    for shape, source, table in zip(blocks.shape.groups, parent.tables, child.tables, strict=True):
        for block_id in source.block_ids[: shape.num_blocks(parent.num_computed)].tolist():
            if block_id != GIVEN_UP:
                blocks.take(block_id, child.cache_priority)
            table.append(block_id)
    child.first_kept = list(parent.first_kept)
    child.num_computed = child.reserved = parent.num_computed
    child.num_cached = parent.num_cached
    child.looked_at = parent.looked_at
    child.admitted = parent.admitted
    child.node = parent.node
    if child.node is not None:
        child.node.num_sequences += 1


def forget_from(blocks: Blocks, state: ManagedSequence, position: int) -> int:
    """Forget a sequence's tokens from `position` on. Returns the tokens computed then: fewer than `position` if a
    window has given up blocks that the next query would read."""
    size, pool = blocks.shape.size, blocks.pool
    state.forget_tokens(position)
    wanted = min(position, state.num_computed)
    kept = longest_valid_hit(blocks.shape, [table.block_ids for table in state.tables], wanted)
    released = state.kept_blocks(blocks.shape, kept)
    for group, (shape, table) in enumerate(zip(blocks.shape.groups, state.tables, strict=True)):
        table.truncate(shape.num_blocks(kept))
        state.first_kept[group] = min(state.first_kept[group], len(table))
    has_gone_back = kept < state.num_computed
    state.num_computed = state.reserved = kept
    if has_gone_back:
        for _, _, block_id in state.partial_blocks(blocks.shape):
            if pool.writer[block_id] == state.id:
                pool.writer[block_id] = NO_WRITER
    for block_id in released:
        blocks.release(block_id, state.id)
    state.restored_to = 0
    state.num_cached = min(state.num_cached, kept)
    if state.most_cached != NO_LIMIT:
        state.most_cached = min(state.most_cached, kept)
    if state.node is not None:
        node = state.node
        while node.depth > kept // size:
            assert node.parent is not None
            node = node.parent
        blocks.move_to(state, node)
    return kept
