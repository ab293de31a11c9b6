"""KV events in process: what came and went in a medium. See `kv_events`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["MEDIUM", "AllBlocksCleared", "BlockRemoved", "BlockStored", "KVEvent"]

MEDIUM = "CPU"  # where the pool's blocks lie


@dataclass(frozen=True)
class BlockStored:
    """Blocks one behind the other. token_ids: of all of them. extra_keys: of each, (offset, key)."""

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int
    namespace_digest: str
    extra_keys: tuple[tuple[tuple[int, bytes], ...], ...]
    medium: str = MEDIUM


@dataclass(frozen=True)
class BlockRemoved:
    """reason: "evicted", "forgotten" (drop, resize, trim; of a tier: not followed any more) or "cleared".

    "unreachable": it is there, and its parent is nowhere any more (`known_parents`).

    Of a tier also "damaged", "missing" (not found any more: others have removed it) and "dropped" (asked to go).
    """

    block_hashes: tuple[int, ...]
    namespace_digest: str
    reason: str
    medium: str = MEDIUM


@dataclass(frozen=True)
class AllBlocksCleared:
    """Nothing is there any more: in a medium, whose blocks were told as removed before, or (None) in any."""

    medium: str | None = None


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
