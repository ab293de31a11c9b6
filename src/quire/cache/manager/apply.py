"""Carries out a step that `reserve.py` has decided and the pool has room for: here the tables get their blocks.

Cost: O(new blocks) per group.
"""

from __future__ import annotations

from quire.cache.manager.blocks import Blocks
from quire.cache.manager.reserve import BlockRequest, Copy, blocks_of
from quire.cache.manager.sequence import GIVEN_UP

__all__ = ["allocate", "write_in_place"]


def write_in_place(blocks: Blocks, request: BlockRequest) -> None:
    """Without room for a copy, if no other table names the block: the tree forgets it, and the sequence may
    write it."""
    for _, _, block_id in request.sequence.partial_blocks(blocks.shape):
        if blocks.node_of[block_id] is not None:
            blocks.write_in_place(block_id, request.sequence.owner_id)
    request.copies = False


def allocate(
    blocks: Blocks, request: BlockRequest, copies: list[list[Copy]], sources: list[tuple[int, int]]
) -> None:
    """Give one sequence its blocks; the caller releases the copies' sources at its end."""
    sequence = request.sequence
    # All evictions come first, so that blocks freed together are handed out in runs.
    blocks.make_room(sequence, blocks_of(request, blocks.shape))
    partial = sequence.partial_blocks(blocks.shape)
    for group, (shape, table) in enumerate(zip(blocks.shape.groups, sequence.tables, strict=True)):
        for _, block, source in (entry for entry in partial if entry[0] == group):
            if request.copies:
                table[block] = _allocate(blocks, request, group, block)
                num_tokens = min(shape.tokens, request.start - block * shape.tokens)
                copies[group].append((source, table[block], num_tokens))
                sources.append((source, sequence.id))
            else:
                blocks.pool.writer[source] = sequence.id
        for new in range(len(table), shape.num_blocks(request.end)):
            is_needed = new >= request.first_blocks[group]
            table.append(_allocate(blocks, request, group, new) if is_needed else GIVEN_UP)
    sequence.reserved = request.end


def _allocate(blocks: Blocks, request: BlockRequest, group: int, block: int) -> int:
    sequence = request.sequence
    if blocks.shape.groups[group].span.kind != "full":
        return blocks.allocate(sequence, GIVEN_UP, GIVEN_UP)
    return blocks.allocate(sequence, sequence.tables[group][block - 1] if block else GIVEN_UP, block)
