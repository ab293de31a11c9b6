"""The prefix tree as at most some hundred rows: one row for each chain without a branch, the largest chains first.

Parents come before children, siblings by size. A size counts the tokens of everything from the row's first block
down. A row's name begins at the first token that differs from all siblings, which may share a beginning within a
block. The tree sorts siblings by their tokens, so that the most similar ones are adjacent. The cache's mirror has the
ages of full blocks; others are known to the time between two calls.

Cost: O(nodes) of plain Python and numpy, about 30 ms for 100 000: rarely called, outside of the engine's thread.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from quire.cache.tree_view import STATES, TreeView
from quire.server.api_keys import name_of_owner

__all__ = ["BlockAges", "Known", "Named", "Tokens", "summarize"]

Known: TypeAlias = Callable[[int], tuple[float, float] | None]
"""(seconds since a node was made, since its last use), if known exactly."""

Tokens: TypeAlias = Callable[[int], Sequence[int] | None]
"""The tokens of a node, if known."""

Named: TypeAlias = Callable[[Sequence[int], Sequence[int]], tuple[str, str] | None]
"""Words for tokens that siblings share and for those behind them: the end of the word in which the shared ones end,
and the text of the others."""

_MAX_ROWS = 200
_NUM_WORD_TOKENS = 12
_MAX_POINTS = 512


class BlockAges:
    """Ages of nodes by their ids, which only grow.

    An age is exact to the time between two calls of `observe`; nodes that existed at the first call have a lower
    bound.
    """

    def __init__(self) -> None:
        self._points: list[tuple[int, float]] = []  # (an unused id, its time)

    def observe(self, next_id: int, now: float) -> None:
        if not self._points or next_id > self._points[-1][0]:
            self._points.append((next_id, now))
            if len(self._points) > _MAX_POINTS:
                del self._points[1:-1:2]

    def age(self, node_id: int, now: float) -> tuple[float, bool]:
        """(seconds, whether that is only a lower bound)."""
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
    ages: BlockAges,
    now: float,
    known: Known = lambda _: None,
    tokens: Tokens = lambda _: None,
    named: Named = lambda shared, own: None,
) -> dict[str, Any]:
    """{"rows": [...], "nodes": number in the tree, "hidden": number in no row}. owners: tenants of namespaces."""
    n = len(tree)
    if not n:
        return {"rows": [], "nodes": 0, "hidden": 0}
    ages.observe(int(tree.node_ids.max()) + 1, now)
    parents = _parent_rows(tree)
    sizes = tree.num_tokens.tolist()
    for row in range(n - 1, -1, -1):
        if parents[row] >= 0:
            sizes[parents[row]] += sizes[row]
    children: dict[int, list[int]] = {}
    for row, parent in enumerate(parents):
        children.setdefault(parent, []).append(row)

    # From the top down; the largest remaining subtree first.
    waiting: list[tuple[int, int, int]] = []

    def put(rows: list[int], parent_index: int) -> None:
        for row in rows:
            heapq.heappush(waiting, (-sizes[row], row, parent_index))

    put(children.get(-1, []), -1)
    shown: list[dict[str, Any]] = []
    below: dict[int, list[int]] = {}
    num_shown = 0
    while waiting and len(shown) < _MAX_ROWS:
        _, row, parent = heapq.heappop(waiting)
        chain = [row]
        while len(only := children.get(chain[-1], [])) == 1:
            chain += only
        below.setdefault(parent, []).append(len(shown))
        put(children.get(chain[-1], []), len(shown))
        siblings = children[parents[row]]
        shown.append(
            _row(tree, chain, sizes[row], ages, now, owners, known)
            | _name(tree, chain, parents[row], siblings, tokens, named)
        )
        num_shown += len(chain)

    salts: dict[int, int] = {}
    rows: list[dict[str, Any]] = []

    def write(parent: int, level: int) -> None:
        for index in below.get(parent, []):
            rows.append({**shown[index], "level": level})
            write(index, level + 1)

    write(-1, 0)
    for row in rows:  # a number distinguishes the namespaces of one tenant: salts stay secret
        row["namespace"] = salts.setdefault(row["namespace"], len(salts))
    return {"rows": rows, "nodes": n, "hidden": n - num_shown}


def _parent_rows(tree: TreeView) -> list[int]:
    """The row of each row's parent; -1 below a root."""
    order = np.argsort(tree.node_ids)
    places = np.searchsorted(tree.node_ids[order], tree.parent_ids)
    rows = order[np.minimum(places, len(order) - 1)]
    return np.where(tree.parent_ids < 0, -1, rows).tolist()


def _row(
    tree: TreeView,
    chain: list[int],
    size: int,
    ages: BlockAges,
    now: float,
    owners: Mapping[bytes, str],
    known: Known,
) -> dict[str, Any]:
    states = np.bincount(tree.states[chain].ravel(), minlength=len(STATES))
    block_ids = tree.block_ids[chain[-1]]
    node = int(tree.node_ids[chain[0]])
    age, is_older = ages.age(node, now)
    idle = None
    if (spans := known(node)) is not None:
        (age, idle), is_older = spans, False
    present = block_ids[block_ids >= 0]
    return {
        "node": node,
        "tenant": name_of_owner(owners.get(tree.namespaces[int(tree.namespace_index[chain[0]])])),
        "namespace": int(tree.namespace_index[chain[0]]),
        "blocks": len(chain),
        "tokens": int(tree.num_tokens[chain].sum()),
        "size": size,
        "held": int(states[STATES.index("held")]),
        "cached": int(states[STATES.index("cached")]),
        "gone": int(states[STATES.index("gone")]),
        "readers": int(tree.num_references[chain].max(initial=0)),
        "block": int(present[0]) if len(present) else None,
        "age": round(age, 1),
        "older": is_older,
        "idle": None if idle is None else round(idle, 1),
    }


def _name(
    tree: TreeView, chain: list[int], parent: int, siblings: list[int], tokens: Tokens, named: Named
) -> dict[str, Any]:
    """The row's name; shared: the number of tokens that a sibling begins with, too. parent: -1 below a root.
    siblings: rows, including this one."""
    unknown = {"words": None, "before": "", "shared": 0}
    own = tokens(int(tree.node_ids[chain[0]]))
    if own is None:
        return unknown
    at = bisect_left(siblings, chain[0])
    shared = 0
    for row in siblings[max(0, at - 1) : at] + siblings[at + 1 : at + 2]:
        other = tokens(int(tree.node_ids[row]))
        if other is not None and tree.namespace_index[row] == tree.namespace_index[chain[0]]:
            shared = max(shared, _num_common(own, other))
    known = list(own)
    for row in chain[1:]:
        if len(known) >= shared + _NUM_WORD_TOKENS or (more := tokens(int(tree.node_ids[row]))) is None:
            break
        known += more
    above = [] if parent < 0 else list(tokens(int(tree.node_ids[parent])) or ())
    name = named(above + known[:shared], known[shared : shared + _NUM_WORD_TOKENS])
    return unknown if name is None else {"before": name[0], "words": name[1], "shared": shared}


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """The number of tokens that both begin with."""
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count
