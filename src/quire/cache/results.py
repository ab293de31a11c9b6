"""What `Cache` answers about a prompt or an owner: plain data, true of the moment it was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from quire.cache.types import Int32Array

__all__ = ["Dropped", "Explanation", "Match", "OwnerCounts"]


@dataclass(frozen=True)
class Match:
    """What `Cache.match` found: `num_tokens` of the prompt are in the cache."""

    num_tokens: int


@dataclass(frozen=True)
class Explanation:
    """How far `Cache.explain` came with a prompt.

    num_hit_tokens: what `match` says. num_common_tokens: what the tree's nodes share with the prompt, its last token
    counted too; where it is more, blocks were given up. nearest_block: int32, tokens of the stored block that has most
    in common with the prompt's next one (the block that begins at `num_common_tokens // block_size * block_size`);
    empty where the prompt ends there, or nothing was stored behind what is common.
    """

    num_hit_tokens: int
    num_common_tokens: int
    nearest_block: Int32Array


class Dropped(NamedTuple):
    """Blocks of what `Cache.drop` forgot: those made free, and those that open sequences hold or a running step may
    read, which are free when these end."""

    num_freed: int
    num_held: int


class OwnerCounts(NamedTuple):
    """Blocks that count in one owner."""

    held: int
    cached: int
    in_flight: int
