"""Decides a step before anything changes: the blocks that must be copied, and the number of blocks it takes.

`reserve` is all or nothing, so the decision is a pure function of the state; `apply.py` carries it out only if the
blocks suffice. This file also writes the plan afterwards.

A partly computed block may be written in place if the sequence is its writer already; or if no other table names it, no
look-up finds tokens in it beyond our position, and no running step uses it. Else it is copied.

Cost: O(sequences + new blocks) per group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from quire.cache.manager.blocks import Blocks
from quire.cache.manager.node_shape import NodeShape
from quire.cache.manager.sequence import ManagedSequence
from quire.cache.manager.step_plan import PythonGroupPlan
from quire.step import StepPlan

__all__ = ["BlockRequest", "Copy", "blocks_by_owner", "blocks_of", "decide", "make_plan"]

Copy: TypeAlias = tuple[int, int, int]  # source block, destination block, tokens


@dataclass
class BlockRequest:
    """One sequence's part of a step."""

    sequence: ManagedSequence
    start: int
    stop: int  # lookahead not counted
    end: int  # lookahead counted
    copies: bool  # the blocks of the node that holds `start` are copied, in every group
    can_write_in_place: bool  # ... only because the tree finds more tokens in it
    first_blocks: list[
        int
    ]  # by group: earlier blocks get no block; they lie behind the windows of a `restore`


def decide(
    blocks: Blocks,
    sequences: list[ManagedSequence],
    num_new_tokens: list[int],
    num_lookahead: int,
    *,
    restores: bool = False,
) -> list[BlockRequest]:
    """Check the arguments against the state and decide what is copied. Changes nothing.

    Raises ValueError for a sequence given twice, for more new tokens than are known, or after a `restore` that has
    not been committed.
    """
    requests: list[BlockRequest] = []
    seen: set[int] = set()
    # References of a block once the earlier sequences of this call have copied theirs.
    num_left: dict[int, int] = {}
    for sequence, num_new in zip(sequences, num_new_tokens, strict=True):
        if sequence.id in seen:
            raise ValueError(f"expected each sequence once in reserve, got sequence {sequence.id} twice")
        seen.add(sequence.id)
        if sequence.restored_to:
            raise ValueError(
                f"expected a commit of all {sequence.restored_to} tokens that sequence {sequence.id} was restored "
                "to, or a rewind, got another reserve"
            )
        num_known = sequence.num_tokens - sequence.num_computed
        if not 1 <= num_new <= num_known:
            raise ValueError(
                f"expected 1 .. {num_known} new tokens for sequence {sequence.id} ({sequence.num_tokens} "
                f"known, {sequence.num_computed} computed), got {num_new} in reserve; append them first"
            )
        start, stop = sequence.num_computed, sequence.num_computed + num_new
        groups = blocks.shape.groups
        first_blocks = [group.first_needed(stop) if restores else 0 for group in groups]
        copies = can_write_in_place = False
        if start % blocks.shape.size:
            is_given_up = any(
                start // group.tokens < first for group, first in zip(groups, first_blocks, strict=True)
            )
            copies, can_write_in_place = _must_copy(blocks, sequence, num_left, is_given_up)
        end = stop + num_lookahead
        requests.append(BlockRequest(sequence, start, stop, end, copies, can_write_in_place, first_blocks))
    return requests


def _must_copy(
    blocks: Blocks, sequence: ManagedSequence, num_left: dict[int, int], is_given_up: bool
) -> tuple[bool, bool]:
    """Whether the blocks of the partial node must be copied, and whether only the node prevents writing in place.

    is_given_up: some of its blocks will not be written, as it lies behind a window at the end of a `restore`; so its
    node must not come to have more tokens.
    """
    pool = blocks.pool
    offset = sequence.num_computed % blocks.shape.size
    block_ids = [block_id for _, _, block_id in sequence.partial_blocks(blocks.shape)]
    is_findable_beyond, is_in_use = False, is_given_up
    for block_id in block_ids:
        if pool.writer[block_id] != sequence.id:
            node = blocks.node_of[block_id]
            is_findable_beyond |= node is not None and node.num_tokens > offset
            is_in_use |= num_left.get(block_id, pool.num_references[block_id]) > 1
            is_in_use |= pool.busy_until[block_id] > blocks.completed_step
    copies = is_findable_beyond or is_in_use
    if copies:
        for block_id in block_ids:
            num_left[block_id] = num_left.get(block_id, pool.num_references[block_id]) - 1
    return copies, is_findable_beyond and not is_in_use


def blocks_by_owner(requests: list[BlockRequest], shape: NodeShape) -> dict[int, int]:
    """Blocks that the requests take over all groups, by owner."""
    needs: dict[int, int] = {}
    for request in requests:
        owner_id = request.sequence.owner_id
        needs[owner_id] = needs.get(owner_id, 0) + blocks_of(request, shape)
    return needs


def blocks_of(request: BlockRequest, shape: NodeShape) -> int:
    """Blocks that one request takes over all groups."""
    num_copied = len(request.sequence.partial_blocks(shape)) if request.copies else 0
    groups = zip(shape.groups, request.sequence.tables, request.first_blocks, strict=True)
    return num_copied + sum(
        max(0, group.num_blocks(request.end) - max(len(table), first)) for group, table, first in groups
    )


def make_plan(
    requests: list[BlockRequest], copies: list[list[Copy]], step: int, shape: NodeShape
) -> StepPlan:
    """The plan of a step whose blocks have been allocated; `copies` has one list per group."""
    query_start = np.zeros(len(requests) + 1, np.int32)
    np.cumsum([request.stop - request.start for request in requests], out=query_start[1:])
    context_lengths = np.array([request.stop for request in requests], np.int32)
    no_slots = np.empty(0, np.int64)

    def make_group(group: int) -> PythonGroupPlan:
        tokens = shape.groups[group].tokens
        slots = [r.sequence.slots(group, r.start, r.stop, tokens) for r in requests]
        lookahead = [r.sequence.slots(group, r.stop, r.end, tokens) for r in requests]
        return PythonGroupPlan(
            step=step,
            query_start=query_start,
            context_lengths=context_lengths,
            slot_mapping=np.concatenate([no_slots, *slots]),
            lookahead_slots=np.concatenate([no_slots, *lookahead]),
            copies=np.array(copies[group], np.int32).reshape(-1, 3),
            rows=tuple(r.sequence.tables[group].view(-(-r.end // tokens)) for r in requests),
        )

    return StepPlan([make_group(group) for group in range(len(copies))])
