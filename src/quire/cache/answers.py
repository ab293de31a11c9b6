"""What `Cache` answers about a prompt or an account: plain data, true of the moment it was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from quire.cache.backend import Int32Array

__all__ = ["AccountCounts", "Explanation", "Match"]


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


class AccountCounts(NamedTuple):
    """Units that count in one account."""

    held: int
    cached: int
    leased: int
