"""A table of the largest prefixes of a mirrored tree: owners, sizes, ages.

Cost: O(nodes).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from quire.cache.report import aligned
from quire.observe.tree_mirror import Block, TreeMirror

__all__ = ["prefix_table"]

_NUM_SHOWN = 10  # prefixes
_SHOWN_TOKENS = 6


def prefix_table(mirror: TreeMirror, owner_of: Callable[[bytes], str]) -> str:
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
            owner_of(first.namespace) or "-", end.depth * mirror.node_tokens, below[first.node_id], len(end.children),
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
