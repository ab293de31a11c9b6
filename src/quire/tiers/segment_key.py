"""`SegmentKey`: the hash of a segment and the fields that it covers; `segment_keys`: the chain of a prompt's segments.

Cost: `segment_keys` is one pass of SHA-256 over the tokens (see `chained_key`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.cache.block_hash import chained_key
from quire.errors import ArgumentError
from quire.tiers.tier import SegmentInfo

__all__ = ["SegmentKey", "chain_keys", "segment_keys"]


@dataclass(frozen=True, eq=False)
class SegmentKey:
    """Identifies a segment: `tokens` (int32 [n]) from position `start` on, behind `parent`, under `root`.

    hash: `block_hash.chained_key` of it, the key of its value in a tier. parent: the hash of the segment before, or
    the root. extra_keys: the (position, key) pairs within it.
    """

    hash: bytes
    root: bytes
    parent: bytes
    start: int
    tokens: np.ndarray
    extra_keys: tuple[tuple[int, bytes], ...] = ()

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.start + len(self.tokens)

    def info(self, *, cache_priority: int = 1, owner: str = "") -> SegmentInfo:
        tokens = np.ascontiguousarray(self.tokens, "<i4").tobytes()
        return SegmentInfo(self.root, self.parent, self.start, tokens, self.extra_keys, cache_priority, owner)


def segment_keys(
    root: bytes,
    tokens: np.ndarray,
    segment_tokens: int,
    *,
    start: int = 0,
    parent: bytes | None = None,
    extra_keys: Sequence[tuple[int, bytes]] = (),
) -> list[SegmentKey]:
    """The chain of `tokens` [n]: segments of `segment_tokens`, and a shorter last one for the rest.

    A shorter last segment has another hash than the whole segment that may replace it later: both may be stored.
    start, parent: for a chain that continues another one; `parent` is the hash of the segment that ends at `start`.
    extra_keys: (position, key), absolute positions, increasing.
    """
    if segment_tokens < 1:
        raise ArgumentError(f"expected segment_tokens of 1 or more, got {segment_tokens}")
    if (parent is None) != (start == 0):
        raise ArgumentError(f"expected a parent exactly where start is not 0, got start {start}, {parent=}")
    tokens = np.ascontiguousarray(tokens, "<i4")
    keys: list[SegmentKey] = []
    previous = root if parent is None else parent
    for offset in range(0, len(tokens), segment_tokens):
        segment = tokens[offset : offset + segment_tokens]
        first = start + offset
        extra = tuple((at, key) for at, key in extra_keys if first <= at < first + len(segment))
        hashed = chained_key(previous, first, segment, extra)
        keys.append(SegmentKey(hashed, root, previous, first, segment, extra))
        previous = hashed
    return keys


def chain_keys(
    root: bytes,
    tokens: np.ndarray,
    segment_tokens: int,
    block_size: int,
    *,
    extra_keys: Sequence[tuple[int, bytes]] = (),
) -> list[SegmentKey]:
    """The chain in which the full blocks of `tokens` are stored: whole segments, then single blocks."""
    whole = len(tokens) // segment_tokens * segment_tokens
    keys = segment_keys(root, tokens[:whole], segment_tokens, extra_keys=extra_keys)
    rest = tokens[whole : len(tokens) // block_size * block_size]
    parent = keys[-1].hash if keys else None
    return keys + segment_keys(root, rest, block_size, start=whole, parent=parent, extra_keys=extra_keys)
