"""Which segment: its key and all that the key stands for, and the chain of them that a prompt is.

Cost: `segment_keys` is one pass of SHA-256 over the tokens (see `chained_key`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.cache.block_hash import chained_key
from quire.errors import ArgumentError
from quire.tiers.tier import SegmentInfo

__all__ = ["SegmentKey", "chain_names", "segment_keys"]


@dataclass(frozen=True, eq=False)
class SegmentKey:
    """What is stored or asked for: `tokens` (int32 [n]) from position `start` on, behind `parent`, under `root`.

    key: `keys.chained_key` of it. parent: the key of the segment before, or the root. extra_keys: (position, key) of
    those within it.
    """

    key: bytes
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
    """The chain that `tokens` [n] are: segments of `segment_tokens`, the last one of what is left.

    A last segment shorter than the others is another key than the whole one that may follow it later: both may be
    stored. start, parent: where the chain goes on, if not at the beginning: `parent` is the key of what ends at
    `start`. extra_keys: (position, key), absolute positions, increasing.
    """
    if segment_tokens < 1:
        raise ArgumentError(f"expected segment_tokens of 1 or more, got {segment_tokens}")
    if (parent is None) != (start == 0):
        raise ArgumentError(f"expected a parent exactly where start is not 0, got start {start}, {parent=}")
    tokens = np.ascontiguousarray(tokens, "<i4")
    names: list[SegmentKey] = []
    behind = root if parent is None else parent
    for offset in range(0, len(tokens), segment_tokens):
        own = tokens[offset : offset + segment_tokens]
        first = start + offset
        extra = tuple((at, key) for at, key in extra_keys if first <= at < first + len(own))
        key = chained_key(behind, first, own, extra)
        names.append(SegmentKey(key, root, behind, first, own, extra))
        behind = key
    return names


def chain_names(
    root: bytes,
    tokens: np.ndarray,
    segment_tokens: int,
    block_size: int,
    *,
    extra_keys: Sequence[tuple[int, bytes]] = (),
) -> list[SegmentKey]:
    """The chain that the full blocks of `tokens` are stored as: whole segments, then a block each."""
    whole = len(tokens) // segment_tokens * segment_tokens
    names = segment_keys(root, tokens[:whole], segment_tokens, extra_keys=extra_keys)
    rest = tokens[whole : len(tokens) // block_size * block_size]
    behind = names[-1].key if names else None
    return names + segment_keys(root, rest, block_size, start=whole, parent=behind, extra_keys=extra_keys)
