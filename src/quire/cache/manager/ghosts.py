"""Ghosts: hashes of content that was evicted a short time ago, with the number of its uses.

A fixed table of 16 bits an entry, two entries a block of the pool. A bucket holds `ENTRIES` of them, the latest first;
a new one drops the oldest of its bucket. An entry has 13 bits of the hash, so about one look-up in 1 000 finds an entry
of other content. That costs a place in the order of eviction, never a wrong hit: a hit compares tokens (`prefix.py`).

Only full nodes have ghosts. The hash is of a node's own elements, not of its path: the block manager limits the uses of
a block to those of the block before it, so an entry under another path counts nothing.

The native back end has the same table (native/core/ghosts.hpp), bit by bit.

Cost: O(tokens of a node) a call, for the hash.
"""

from __future__ import annotations

import numpy as np

from quire.cache.manager.elements import decode
from quire.cache.types import Int32Array

__all__ = ["ENTRIES", "Ghosts"]

ENTRIES = 8  # of a bucket
_MASK = (1 << 64) - 1


def _multipliers(count: int) -> np.ndarray:
    """SplitMix64 of 1 .. count, made odd (Steele, Lea and Flood 2014)."""
    values = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (values ^ (values >> np.uint64(31))) | np.uint64(1)


class Ghosts:
    """node_tokens: tokens of a full node."""

    def __init__(self, num_blocks: int, node_tokens: int) -> None:
        self._multipliers = _multipliers(node_tokens)
        self._make(num_blocks)

    def _make(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._num_buckets = (num_blocks + 3) // 4
        # Bucket -> (fingerprint, uses), the latest first.
        self._buckets: dict[int, list[tuple[int, int]]] = {}

    def grow(self, num_blocks: int) -> None:
        """A new, empty table once the pool has more than twice the blocks the table was made for."""
        if num_blocks > 2 * self._num_blocks:
            self._make(num_blocks)

    def clear(self) -> None:
        self._buckets.clear()

    def add(self, content: bytes, uses: int) -> None:
        """The content (`elements.py`) of a full node is evicted; its block was used so often."""
        bucket, fingerprint = self._place(content)
        entries = self._buckets.setdefault(bucket, [])
        entries.insert(0, (fingerprint, uses))
        del entries[ENTRIES:]

    def pop(self, content: bytes) -> int:
        """Takes the latest entry of the content out; its uses, 0 without an entry."""
        if not self._buckets:
            return 0
        bucket, fingerprint = self._place(content)
        entries = self._buckets.get(bucket, [])
        for index, (other, uses) in enumerate(entries):
            if other == fingerprint:
                del entries[index]
                return uses
        return 0

    def _place(self, content: bytes) -> tuple[int, int]:
        value = self._hash(content)
        return (value >> 32) * self._num_buckets >> 32, ((value >> 16) & 0x1FFF) or 1

    def _hash(self, content: bytes) -> int:
        """The sum of each element times its multiplier, and of each key's hash (FNV-1a) times its position's."""
        if len(content) == 4 * len(self._multipliers):
            return int(np.dot(np.frombuffer(content, ">u4").astype(np.uint64), self._multipliers))
        tokens, keys = decode(content)
        elements: Int32Array = np.array(tokens, np.int32)
        value = int(np.dot(elements.astype(np.uint64) << np.uint64(1), self._multipliers[: len(elements)]))
        for offset, key in keys:
            hashed = 0xCBF29CE484222325
            for byte in key:
                hashed = (hashed ^ byte) * 0x100000001B3 & _MASK
            value += hashed * int(self._multipliers[offset])
        return value & _MASK
