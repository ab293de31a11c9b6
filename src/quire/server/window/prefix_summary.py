"""The prefix tree as at most some hundred rows: chains without a branch in one row each, the largest first.

Rows come parents before children, siblings by size. Sizes are tokens of everything from the row's first block down.
Ages of full blocks are those of the cache's mirror; of others they are known to the time between two looks.

Cost: O(nodes) of plain Python and numpy, some 30 ms for 100 000: for now and then, outside of the engine's thread.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from quire.cache.tree_view import STATES, TreeView
from quire.server.tenants import name_of_owner

__all__ = ["Births", "Known", "Words", "summarize"]

Known: TypeAlias = Callable[[int], tuple[float, float] | None]
"""(seconds since it was made, since it was last used) of a node, where that is known exactly."""

Words: TypeAlias = Callable[[int], str | None]
"""The first words of a node, where they are known."""

_MAX_ROWS = 200
_MAX_POINTS = 512


class Births:
    """When nodes were made, as well as looking now and then can tell: ids only grow.

    A node's age is known to the time between two looks; of those that were there at the first look, only that they are
    older.
    """

    def __init__(self) -> None:
        self._points: list[tuple[int, float]] = []  # (an id that was not given out yet, when)

    def look(self, next_id: int, now: float) -> None:
        if not self._points or next_id > self._points[-1][0]:
            self._points.append((next_id, now))
            if len(self._points) > _MAX_POINTS:
                del self._points[1:-1:2]

    def age(self, node_id: int, now: float) -> tuple[float, bool]:
        """(seconds, whether it is that old at least)."""
        low, high = 0, len(self._points) - 1
        while low < high:
            middle = (low + high) // 2
            if self._points[middle][0] > node_id:
                high = middle
            else:
                low = middle + 1
        return now - self._points[low][1], low == 0


def summarize(
    tree: TreeView,
    owners: Mapping[bytes, str],
    births: Births,
    now: float,
    known: Known = lambda _: None,
    words: Words = lambda _: None,
) -> dict[str, Any]:
    """{"rows": [...], "nodes": all of the tree's, "hidden": nodes that no row tells of}. owners: of namespaces."""
    n = len(tree)
    if not n:
        return {"rows": [], "nodes": 0, "hidden": 0}
    births.look(int(tree.node_ids.max()) + 1, now)
    parents = _parent_rows(tree)
    sizes = tree.num_tokens.tolist()
    for row in range(n - 1, -1, -1):
        if parents[row] >= 0:
            sizes[parents[row]] += sizes[row]
    children: dict[int, list[int]] = {}
    for row, parent in enumerate(parents):
        children.setdefault(parent, []).append(row)

    # From the top down, always the largest that is left.
    waiting: list[tuple[int, int, int]] = []

    def put(rows: list[int], shown_below: int) -> None:
        for row in rows:
            heapq.heappush(waiting, (-sizes[row], row, shown_below))

    put(children.get(-1, []), -1)
    shown: list[dict[str, Any]] = []
    below: dict[int, list[int]] = {}
    num_told = 0
    while waiting and len(shown) < _MAX_ROWS:
        _, row, parent = heapq.heappop(waiting)
        chain = [row]
        while len(only := children.get(chain[-1], [])) == 1:
            chain += only
        below.setdefault(parent, []).append(len(shown))
        put(children.get(chain[-1], []), len(shown))
        shown.append(_row(tree, chain, sizes[row], births, now, owners, known, words))
        num_told += len(chain)

    salts: dict[int, int] = {}
    rows: list[dict[str, Any]] = []

    def write(parent: int, level: int) -> None:
        for index in below.get(parent, []):
            rows.append({**shown[index], "level": level})
            write(index, level + 1)

    write(-1, 0)
    for row in rows:  # namespaces of one tenant are told apart by a number: a salt is not shown
        row["namespace"] = salts.setdefault(row["namespace"], len(salts))
    return {"rows": rows, "nodes": n, "hidden": n - num_told}


def _parent_rows(tree: TreeView) -> list[int]:
    """Each row's parent's row; -1 below a root."""
    order = np.argsort(tree.node_ids)
    found = np.searchsorted(tree.node_ids[order], tree.parent_ids)
    rows = order[np.minimum(found, len(order) - 1)]
    return np.where(tree.parent_ids < 0, -1, rows).tolist()


def _row(
    tree: TreeView,
    chain: list[int],
    size: int,
    births: Births,
    now: float,
    owners: Mapping[bytes, str],
    known: Known,
    words: Words,
) -> dict[str, Any]:
    states = np.bincount(tree.states[chain].ravel(), minlength=len(STATES))
    block_ids = tree.block_ids[chain[-1]]
    node = int(tree.node_ids[chain[0]])
    age, is_older = births.age(node, now)
    idle = None
    if (spans := known(node)) is not None:
        (age, idle), is_older = spans, False
    there = block_ids[block_ids >= 0]
    return {
        "node": node,
        "words": words(node),
        "tenant": name_of_owner(owners.get(tree.namespaces[int(tree.namespace_index[chain[0]])])),
        "namespace": int(tree.namespace_index[chain[0]]),
        "blocks": len(chain),
        "tokens": int(tree.num_tokens[chain].sum()),
        "size": size,
        "held": int(states[STATES.index("held")]),
        "cached": int(states[STATES.index("cached")]),
        "gone": int(states[STATES.index("gone")]),
        "readers": int(tree.num_references[chain].max(initial=0)),
        "block": int(there[0]) if len(there) else None,
        "age": round(age, 1),
        "older": is_older,
        "idle": None if idle is None else round(idle, 1),
    }
