"""`check()` finds each kind of damage."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.cache_case import FULL, compute, make, prompt, store

from quire.cache.manager.block_manager import PythonBlockManager
from quire.errors import InvariantError
from quire.spec import Span


def damaged(damage: Callable[[PythonBlockManager], object]) -> None:
    cache = make("python", FULL, Span("window", 6), num_blocks=40)
    store(cache, prompt(12, seed=1))
    store(cache, prompt(12, seed=2))
    sequence = compute(cache, prompt(18, seed=3))
    sequence.append([1, 2, 3, 4, 5])
    cache.reserve([sequence], [5])
    cache.check()
    damage(cache._manager)
    cache.check()


def swap_lru(m: PythonBlockManager) -> None:
    leaf = m.blocks.tree.roots[b""].children[0].children[0].children[0]
    m.blocks.pool.cached.remove(leaf.block_ids[0])
    m.blocks.pool.cached.append(leaf.block_ids[0])


def swap_siblings(m: PythonBlockManager) -> None:
    m.blocks.tree.roots[b""].children.reverse()


def raise_cached(m: PythonBlockManager) -> None:
    m.blocks.pool.cached.cache_priority[next(iter(m.blocks.pool.cached))] = 2


def add_leftover(m: PythonBlockManager) -> None:
    node = m.blocks.tree.roots[b""].children[0]
    assert node.parent is not None
    block_id = m.blocks.pool.free.take_lowest()
    m.blocks.pool.cached.append(block_id)
    m.blocks.tree.insert(node.parent, node.content[:4], 1, [block_id, -1])
    m.blocks.node_of[block_id] = node.parent.children[0]


@pytest.mark.parametrize(
    ("number", "damage"),
    [
        ("C1", lambda m: m.blocks.pool.free.take_lowest()),
        ("C1", lambda m: m.blocks.pool.free.add(m.sequences[2].tables[0][0])),
        ("C2", lambda m: m.blocks.node_of.__setitem__(m.sequences[2].tables[0][0], None)),
        ("C3", lambda m: m.blocks.pool.num_references.__setitem__(m.sequences[2].tables[0][0], 2)),
        ("C4", lambda m: m.blocks.pool.writer.__setitem__(m.sequences[2].tables[0][5], -1)),
        ("C4", lambda m: m.blocks.pool.writer.__setitem__(next(iter(m.blocks.pool.free)), 2)),
        ("C5", swap_lru),
        ("C6", swap_siblings),
        ("C6", add_leftover),
        ("C7", lambda m: setattr(m.sequences[2], "reserved", 1000)),
        ("C3", lambda m: m.sequences[2].tables[0].truncate(5)),
        ("C8", lambda m: setattr(m.sequences[2].node, "num_sequences", 2)),
        ("C8", lambda m: m.sequences[2].tokens.__setitem__(0, 5)),
        ("C9", lambda m: setattr(m.blocks.pool.owner_ids[0], "num_owned", 3)),
        ("C9", lambda m: m.blocks.pool.cached.owner_id.__setitem__(m.sequences[2].tables[0][0], 7)),
        ("C9", raise_cached),
    ],
)
def test_damage_is_found(number: str, damage: Callable[[PythonBlockManager], object]) -> None:
    with pytest.raises(InvariantError, match=number):
        damaged(damage)


def test_what_is_whole_passes() -> None:
    damaged(lambda m: np.empty(0))
