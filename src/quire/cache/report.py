"""A cache in a table that a person can read: states, tree, owners, ages, fragmentation.

Cost: O(nodes).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from quire.cache.mirror import Block, TreeMirror, namespace_digest
from quire.cache.tree_view import STATES
from quire.sizes import format_size

if TYPE_CHECKING:
    from quire.cache.cache import Cache

__all__ = ["aligned", "report"]

_NUM_SHOWN = 10  # prefixes
_SHOWN_TOKENS = 6


def report(
    cache: Cache,
    *,
    mirror: TreeMirror | None = None,
    owner_of: Callable[[bytes], str] = lambda _: "",
    name_of: Callable[[int], str] = lambda account: f"account {account}",
) -> str:
    """mirror: gives the prefixes and their ages. owner_of, name_of: of a namespace, of an account."""
    parts = [_states(cache)]
    if cache.prefix_caching:
        parts += [_owners(cache, owner_of, name_of)]
    if mirror is not None:
        parts.append(_prefixes(mirror, owner_of))
    return "\n\n".join(part for part in parts if part)


def aligned(rows: Iterable[Iterable[object]]) -> str:
    """Rows as columns, the first to the left, the others to the right."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in texts
    )


def _states(cache: Cache) -> str:
    stats, use = cache.stats(), cache.memory_use()
    states = ("free", "cached", "held", "leased", "pinned")
    rows: list[tuple[object, ...]] = [("state", cache.unit + "s", "bytes", "share")]
    for state in states:
        count = stats[state]
        rows.append((state, count, format_size(count * cache.unit_bytes), f"{count / cache.num_blocks:.0%}"))
    rows.append(("total", cache.num_blocks, format_size(use.total), "100%"))
    inside = "" if not use.reserved else f", {use.internal / use.reserved:.0%} of what is held"
    return (
        aligned(rows)
        + f"\nfragmentation: {format_size(use.internal)} inside {cache.unit}s{inside}; "
        + f"{format_size(use.external)} between them"
    )


def _owners(cache: Cache, owner_of: Callable[[bytes], str], name_of: Callable[[int], str]) -> str:
    tree = cache.tree()
    tokens: Counter[int] = Counter()
    units: defaultdict[int, Counter[str]] = defaultdict(Counter)
    accounts: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for i in range(len(tree)):
        index = int(tree.namespace_index[i])
        states = [STATES[state] for state in tree.states[i].tolist()]
        if "gone" not in states:
            tokens[index] += int(tree.num_tokens[i])
        units[index].update(state for state in states if state != "gone")
        accounts[index].update(
            account
            for account, state in zip(tree.accounts[i].tolist(), states, strict=True)
            if state != "gone"
        )
    rows: list[tuple[object, ...]] = [
        ("namespace", "owner", "tokens", f"cached {cache.unit}s", "in use", "bytes", "counted in")
    ]
    for index, namespace in enumerate(tree.namespaces):
        cached, total = units[index]["cached"], units[index].total()
        counted = ", ".join(
            f"{name_of(account)} {count}" for account, count in accounts[index].most_common(3)
        )
        rows.append((
            namespace_digest(namespace) or "(no name)", owner_of(namespace) or "-", tokens[index], cached,
            total - cached, format_size(total * cache.unit_bytes), counted or "-",
        ))  # fmt: skip
    return aligned(rows) if len(rows) > 1 else "no content"


def _prefixes(mirror: TreeMirror, owner_of: Callable[[bytes], str]) -> str:
    """The prefixes with most tokens at and below them: each a path from a root up to where it branches or ends."""
    below: Counter[int] = Counter()
    last_use: dict[int, float] = {}
    for block in sorted(mirror.by_id.values(), key=lambda block: -block.depth):
        below[block.node_id] += len(block.tokens) if block.is_there else 0
        last_use[block.node_id] = max(last_use.get(block.node_id, 0.0), block.used_at)
        if block.parent is not None:
            below[block.parent.node_id] += below[block.node_id]
            last_use[block.parent.node_id] = max(
                last_use.get(block.parent.node_id, 0.0), last_use[block.node_id]
            )
    roots = [block for blocks in mirror.roots.values() for block in blocks.values()]
    roots.sort(key=lambda block: (-below[block.node_id], block.node_id))
    if not roots:
        return ""
    now = mirror.clock()
    rows: list[tuple[object, ...]] = [
        ("prefix", "owner", "tokens", "with all behind", "branches", "age", "unused")
    ]
    for first in roots[:_NUM_SHOWN]:
        end = _trunk(first)
        rows.append((
            np.array2string(first.tokens[:_SHOWN_TOKENS], separator=" ") + " ...",
            owner_of(first.namespace) or "-", end.depth * mirror.block_size, below[first.node_id], len(end.children),
            _span(now - first.made_at), _span(now - last_use[first.node_id]),
        ))  # fmt: skip
    more = f"\nand {len(roots) - _NUM_SHOWN} more" if len(roots) > _NUM_SHOWN else ""
    return aligned(rows) + more


def _trunk(block: Block) -> Block:
    while len(block.children) == 1:
        (block,) = block.children.values()
    return block


def _span(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"
