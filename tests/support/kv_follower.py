"""A router's map of blocks, built from KV events, and the expected map, derived only from the served tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgpack
import numpy as np

from quire.cache.block_hash import block_hashes, root_key
from quire.observe.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from quire.tiers.segment_key import segment_keys

Blocks = dict[int, tuple[int | None, tuple[int, ...]]]
"""By name: the one before it, and its tokens."""


class Follower:
    """By medium what is there. A block is told as stored once, and as removed once."""

    def __init__(self) -> None:
        self.blocks: dict[str, Blocks] = {}
        self.digests: dict[int, str] = {}
        self.reasons: set[tuple[str, str]] = set()  # (medium, reason)
        self.cleared: list[str | None] = []

    def _stored(self, hashes: Any, parent: int | None, tokens: Any, size: int, medium: str) -> None:
        assert len(tokens) == size * len(hashes)
        there = self.blocks.setdefault(medium, {})
        for i, name in enumerate(hashes):
            assert name not in there, "a block was told twice"
            there[name] = (parent, tuple(tokens[size * i : size * (i + 1)]))
            parent = name

    def _removed(self, hashes: Any, medium: str) -> None:
        for name in hashes:
            del self.blocks[medium][name]

    def __call__(self, batch: EventBatch) -> None:
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._stored(
                    event.block_hashes,
                    event.parent_block_hash,
                    event.token_ids,
                    event.block_size,
                    event.medium,
                )
                self.digests |= dict.fromkeys(event.block_hashes, event.namespace_digest)
            elif isinstance(event, BlockRemoved):
                assert all(self.digests[name] == event.namespace_digest for name in event.block_hashes)
                self._removed(event.block_hashes, event.medium)
                self.reasons.add((event.medium, event.reason))
            else:
                assert isinstance(event, AllBlocksCleared)
                self.cleared.append(event.medium)
                if event.medium is None:
                    self.blocks.clear()
                else:
                    assert not self.blocks.get(event.medium)
        known = {None}.union(*self.blocks.values())
        for blocks in self.blocks.values():
            assert all(parent in known for parent, _ in blocks.values()), "a block's parent is not known"

    def wire(self, payload: bytes) -> None:
        """The same from what ZeroMQ brings."""
        _, events, _ = msgpack.unpackb(payload)
        for tag, *fields in events:
            if tag == "BlockStored":
                hashes, parent, tokens, size, _, medium, *_ = fields
                self._stored(hashes, parent, tokens, size, medium)
            elif tag == "BlockRemoved":
                self._removed(*fields)
            else:
                assert (tag, fields) == ("AllBlocksCleared", [])
                self.cleared.append(None)
                self.blocks.clear()

    def of(self, medium: str) -> Blocks:
        return self.blocks.get(medium, {})


def blocks_by_key(
    served: Iterable[tuple[bytes, Sequence[int]]], fingerprint: bytes, segment_tokens: int, block_size: int
) -> dict[bytes, Blocks]:
    """Every segment that could be stored of these sequences (namespace, tokens): what blocks it holds."""
    found: dict[bytes, Blocks] = {}
    for namespace, sequence in served:
        tokens = np.asarray(sequence, np.int32)
        names = [int.from_bytes(one[-8:], "big") for one in block_hashes(namespace, tokens, None, block_size)]
        parents = [None, *names]
        root = root_key(fingerprint, namespace)
        whole = segment_keys(root, tokens[: len(tokens) // segment_tokens * segment_tokens], segment_tokens)
        segments = list(whole)
        for index, start in enumerate(range(0, len(tokens), segment_tokens)):
            stop = min(start + segment_tokens, len(tokens)) // block_size * block_size
            parent = whole[index - 1].hash if index else None
            segments += segment_keys(root, tokens[start:stop], block_size, start=start, parent=parent)
        for segment in segments:
            found[segment.hash] = {
                names[i]: (parents[i], tuple(tokens[i * block_size : (i + 1) * block_size].tolist()))
                for i in range(segment.start // block_size, segment.end // block_size)
            }
    return found


def union(keys: Iterable[bytes], by_key: dict[bytes, Blocks]) -> Blocks:
    found: Blocks = {}
    for key in keys:
        found |= by_key[key]
    return found
