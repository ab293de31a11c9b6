"""Every unit at one moment, and what one of them holds: for whoever looks at a running cache.

`unit_map` is cheap (native: some 10 ns a unit), so that it can be taken again and again; `tree_view` tells more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quire.cache.backend import Int32Array
from quire.cache.content import decode
from quire.cache.prefix import HOLE

if TYPE_CHECKING:
    from quire.cache.block_manager import PythonBlockManager

__all__ = [
    "CACHED",
    "FREE",
    "GIVEN_UP",
    "HELD",
    "LEASED",
    "PINNED",
    "UnitContent",
    "UnitMap",
    "content_of",
    "unit_map",
]

FREE, CACHED, HELD, LEASED, GIVEN_UP, PINNED = range(6)


@dataclass(frozen=True)
class UnitMap:
    """All units by id, ids given up by a resize included.

    namespace_index: into `namespaces`, of units whose content is known; -1 of others.
    """

    states: NDArray[np.uint8]  # [num_ids]: FREE, CACHED, HELD, LEASED, GIVEN_UP or PINNED
    namespace_index: Int32Array  # [num_ids]
    namespaces: list[bytes]


@dataclass(frozen=True)
class UnitContent:
    """What a unit with known content holds: the last `num_own` of `tokens`, int32, which begin with the prompt."""

    namespace: bytes
    tokens: Int32Array
    num_own: int


def unit_map(manager: PythonBlockManager) -> tuple[NDArray[np.uint8], Int32Array]:
    """(states, namespace_index) of the Python back end, which knows no pins: what they hold is HELD."""
    pool, tree = manager.blocks.pool, manager.blocks.tree
    states = np.full(pool.num_ids, HELD, np.uint8)
    states[list(pool.free)] = FREE
    states[list(pool.cached)] = CACHED
    states[list(pool.leased)] = LEASED
    states[pool.given_up] = GIVEN_UP
    index = {name: i for i, name in enumerate(sorted(tree.roots))}
    names = np.full(pool.num_ids, -1, np.int32)
    for node in tree.all_nodes():
        for unit in node.units:
            if unit != HOLE:
                names[unit] = index[node.root.content]
    return states, names


def content_of(manager: PythonBlockManager, unit: int) -> tuple[bytes, Int32Array, int] | None:
    """(namespace, tokens, num_own) of the Python back end; None where nothing is known."""
    num_ids = manager.blocks.pool.num_ids
    if not 0 <= unit < num_ids:
        raise ValueError(f"expected a unit of 0 .. {num_ids - 1}, got {unit} in content_of")
    node = manager.blocks.node_of[unit]
    if node is None:
        return None
    num_own = node.num_tokens
    blocks: list[list[int]] = []
    while node.parent is not None:
        blocks.append(decode(node.content)[0])
        node = node.parent
    tokens = [token for block in reversed(blocks) for token in block]
    return node.content, np.array(tokens, np.int32), num_own
