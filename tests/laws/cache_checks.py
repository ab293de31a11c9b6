"""What the cache laws ask of a step's plans, of their block tables and of the prefix tree."""

from __future__ import annotations

from typing import Any

import numpy as np
from laws.cache_model import Open, same
from support.fake_storage import Step

from quire.cache.manager.node_shape import NodeShape
from quire.cache.manager.prefix import Node


def check_plans(plans: list[Any], step: int, chosen: list[tuple[Open, int]], num_groups: int) -> None:
    """The same from every back end, and of the sequences chosen with so many new tokens."""
    same([plan.step for plan in plans])
    assert plans[0].step == step
    lengths = [sequence.computed + num_new for sequence, num_new in chosen]
    assert plans[0].context_lengths.tolist() == lengths
    assert plans[0].query_start.tolist() == [0, *np.cumsum([num_new for _, num_new in chosen])]
    for group in range(num_groups):
        parts = [plan.group(group) for plan in plans]
        for name in ("query_start", "context_lengths", "slot_mapping", "lookahead_slots", "copies"):
            same([getattr(part, name) for part in parts])


def tables_of(chosen: list[tuple[Open, int]], num_lookahead: int, tokens: list[int]) -> list[list[list[int]]]:
    """What the plan's block tables have to be, by the sequences' own. tokens: of a block of each group."""
    ends = [sequence.computed + num_new + num_lookahead for sequence, num_new in chosen]
    tables: list[list[list[int]]] = []
    for group, size in enumerate(tokens):
        widths = [-(-end // size) for end in ends]
        tables.append(
            [
                sequence.handles[0].block_table(group)[:width].tolist() + [-1] * (max(widths) - width)
                for (sequence, _), width in zip(chosen, widths, strict=True)
            ]
        )
    return tables


def check_tables(step: Step) -> None:
    """Asked for only when the step is carried out, perhaps long after: a plan does not change."""
    for group, tables in enumerate(step.tables):
        for plan in (step.plan, *step.others):
            found = plan.group(group).block_tables
            assert found.dtype == np.int32
            assert found.tolist() == tables


def check_node(node: Node, chain: int, slots: np.ndarray, shape: NodeShape) -> None:
    """Whatever the tree would let somebody find is what its tokens say."""
    position = 0
    for offset in range(node.num_tokens):
        token = int.from_bytes(node.content[position : position + 4], "big")
        position += 4
        key = None
        if token & 1:
            end = node.content.index(b"\0\0", position)
            key = node.content[position:end].replace(b"\0\xff", b"\0")
            position = end + 2
        chain = hash((chain, (token >> 1, key)))
        for group, one in enumerate(shape.groups):
            block_id = node.block_ids[one.first_column + offset // one.tokens]
            if block_id >= 0:
                found = slots[block_id, offset % one.tokens]
                assert found == hash((group, chain)), f"block {block_id} of a node holds something else"
    for child in node.children:
        check_node(child, chain, slots, shape)
