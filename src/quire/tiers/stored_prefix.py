"""How far a prompt is stored in a disk cache under each root, and what is stored behind. For explanations only.

Cost: every row of the index is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from quire.tiers.disk.disk_index import StoredRoot
from quire.tiers.disk.disk_tier import DiskTier

__all__ = ["StoredPrefix", "stored_prefixes"]


@dataclass(frozen=True)
class StoredPrefix:
    """The beginning of a prompt that is stored under one root.

    num_tokens: in whole values, which could be loaded. num_common: tokens that the stored content shares with the
    prompt, the beginning of a value included. behind: int32, the rest of the value in which the common tokens end;
    empty if no value continues differently.
    """

    root: StoredRoot
    num_tokens: int
    num_common: int
    behind: np.ndarray


def stored_prefixes(
    tier: DiskTier, tokens: np.ndarray, extra_keys: Mapping[int, bytes] | None = None
) -> list[StoredPrefix]:
    """One for every root, the longest first."""
    tokens = np.ascontiguousarray(tokens, "<i4")
    found = [_stored_under(tier, root, tokens, dict(extra_keys or {})) for root in tier.roots()]
    return sorted(found, key=lambda prefix: -prefix.num_tokens)


def _stored_under(
    tier: DiskTier, root: StoredRoot, tokens: np.ndarray, keys: dict[int, bytes]
) -> StoredPrefix:
    ends = {root.root: 0}  # by key, the end of each matching value
    longest = num_common = 0
    behind = np.empty(0, "<i4")
    for entry in tier.entries(root.root):  # parents first
        info = entry.info
        start = ends.get(info.parent)
        if start is None or start != info.start:
            continue
        stored = np.frombuffer(info.tokens, "<i4")
        common = _num_common(tokens[start:], stored, start, keys, info.extra_keys)
        if common == len(stored):
            ends[entry.key] = start + common
            longest = max(longest, start + common)
        elif start + common > num_common or not len(behind):
            num_common, behind = start + common, stored[common:]
    if longest > num_common:
        num_common, behind = longest, behind[:0]
    return StoredPrefix(root, longest, num_common, behind)


def _num_common(
    asked: np.ndarray,
    stored: np.ndarray,
    start: int,
    keys: Mapping[int, bytes],
    stored_keys: Iterable[tuple[int, bytes]],
) -> int:
    n = min(len(asked), len(stored))
    same = asked[:n] == stored[:n]
    n = n if same.all() else int(same.argmin())
    theirs = dict(stored_keys)
    return min(
        [n, *(at - start for at in {*keys, *theirs} if at >= start and keys.get(at) != theirs.get(at))]
    )
