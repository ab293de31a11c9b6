"""How far a prompt is stored in a disk cache under each root: for explanations, not for loads.

Cost: every row of the index is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from quire.tiers.disk import DiskTier
from quire.tiers.disk_index import StoredRoot

__all__ = ["StoredPrefix", "stored_prefixes"]


@dataclass(frozen=True)
class StoredPrefix:
    """So many tokens of a prompt, from its beginning, are stored under this root."""

    root: StoredRoot
    num_tokens: int


def stored_prefixes(
    tier: DiskTier, tokens: np.ndarray, extra_keys: Mapping[int, bytes] | None = None
) -> list[StoredPrefix]:
    """Under every root, the longest first."""
    tokens = np.ascontiguousarray(tokens, "<i4")
    keys = sorted((extra_keys or {}).items())
    found = [StoredPrefix(root, _num_stored(tier, root.root, tokens, keys)) for root in tier.roots()]
    return sorted(found, key=lambda prefix: -prefix.num_tokens)


def _num_stored(tier: DiskTier, root: bytes, tokens: np.ndarray, keys: list[tuple[int, bytes]]) -> int:
    ends = {root: 0}  # of what matches so far
    longest = 0
    for entry in tier.entries(root):  # parents first
        info = entry.info
        start = ends.get(info.parent)
        if start is None or start != info.start:
            continue
        stop = start + entry.num_tokens
        own = tuple((at, key) for at, key in keys if start <= at < stop)
        if tokens[start:stop].tobytes() == info.tokens and own == tuple(info.extra_keys):
            ends[entry.key] = stop
            longest = max(longest, stop)
    return longest
