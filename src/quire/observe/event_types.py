"""KV events in process: blocks stored in and removed from a medium. See `kv_events`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["MEDIUM", "AllBlocksCleared", "BlockRemoved", "BlockStored", "KVEvent"]

MEDIUM = "CPU"  # the pool's


@dataclass(frozen=True)
class BlockStored:
    """Consecutive blocks. token_ids: of all of them. extra_keys: (offset, key) pairs of each block."""

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int
    namespace_digest: str
    extra_keys: tuple[tuple[tuple[int, bytes], ...], ...]
    medium: str = MEDIUM


@dataclass(frozen=True)
class BlockRemoved:
    """reason: "evicted", "forgotten" (drop, resize, trim; in a tier: not followed any more) or "cleared".

    "unreachable": the block is there, but its parent is in no medium any more (`known_parents`).

    In a tier also "damaged", "missing" (another process has removed it) and "dropped" (on request).
    """

    block_hashes: tuple[int, ...]
    namespace_digest: str
    reason: str
    medium: str = MEDIUM


@dataclass(frozen=True)
class AllBlocksCleared:
    """A medium is empty, after its blocks were reported as removed; or (None) all media are."""

    medium: str | None = None


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
