"""`BlockDigest`: the blocks that an engine has, by tier, as its router is told of them.

It follows the engine's KV events, so that a digest costs the changes since the last one, not a walk of the tree. With
more than `max_blocks` blocks, a digest has those that are known for longest: a block's parents come before it.

Invariants
    D1  a snapshot is the same object until a block was stored or removed: equal digests are sent once.
    D2  a digest with a block has all blocks before it, as events name parents first.

Cost: O(1) for each block of an event; O(blocks) for a new snapshot, 8 bytes a block.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.observe.event_types import MEDIUM, AllBlocksCleared, BlockStored
from quire.observe.kv_events import MEDIA, EventBatch

__all__ = ["BlockDigest", "DigestSnapshot", "unpacked_digest"]

_TIERS = ("memory", *MEDIA)  # the fastest first
_BITS = {MEDIUM: 1, **{medium: 2 << place for place, medium in enumerate(MEDIA.values())}}
_ALL = (1 << len(_TIERS)) - 1


@dataclass(frozen=True)
class DigestSnapshot:
    """keys_by_tier: the keys of the blocks whose fastest tier this is, little-endian unsigned 64-bit integers. made_at:
    seconds since 1970."""

    keys_by_tier: Mapping[str, bytes]
    made_at: float


def unpacked_digest(keys_by_tier: Mapping[str, bytes]) -> dict[int, str]:
    """The name of the fastest tier of each block, by key."""
    found: dict[int, str] = {}
    for tier, packed in keys_by_tier.items():
        found.update(dict.fromkeys(np.frombuffer(packed, "<u8").tolist(), tier))
    return found


class BlockDigest:
    """See the module's text. It is a subscriber of `EngineMonitor.subscribe`. Any thread may call it."""

    def __init__(self, max_blocks: int = 1 << 17) -> None:
        self._max_blocks = max_blocks
        self._tiers: dict[int, int] = {}  # by key: a bit for each tier that has the block
        self._lock = threading.Lock()
        self._snapshot: DigestSnapshot | None = None

    def __call__(self, batch: EventBatch) -> None:
        """Takes the changes of the engine's blocks."""
        with self._lock:
            for event in batch.events:
                self._apply(event)
            self._snapshot = None

    def snapshot(self) -> DigestSnapshot:
        """The blocks now."""
        with self._lock:
            if self._snapshot is None:
                by_tier: dict[str, list[int]] = {}
                for key, _ in zip(self._tiers, range(self._max_blocks), strict=False):
                    bits = self._tiers[key]
                    by_tier.setdefault(_TIERS[(bits & -bits).bit_length() - 1], []).append(key)
                packed = {tier: np.array(keys, "<u8").tobytes() for tier, keys in by_tier.items()}
                self._snapshot = DigestSnapshot(packed, time.time())
            return self._snapshot

    def _apply(self, event: Any) -> None:
        tiers = self._tiers
        if isinstance(event, BlockStored):
            for key in event.block_hashes:
                tiers[key] = tiers.get(key, 0) | _BITS[event.medium]
            return
        if isinstance(event, AllBlocksCleared):
            kept = 0 if event.medium is None else _ALL & ~_BITS[event.medium]
            keys = list(tiers)
        else:
            kept, keys = _ALL & ~_BITS[event.medium], event.block_hashes
        for key in keys:
            if left := tiers.get(key, 0) & kept:
                tiers[key] = left
            else:
                tiers.pop(key, None)
