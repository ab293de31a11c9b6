"""Answers of `Cache` about a prompt or an owner: plain data, valid at the moment of the call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from quire.cache.types import Int32Array

__all__ = ["Dropped", "Explanation", "Match", "OwnerCounts", "PriorityChange"]


@dataclass(frozen=True)
class Match:
    """Result of `Cache.match`: `num_tokens` of the prompt are in the cache."""

    num_tokens: int


@dataclass(frozen=True)
class Explanation:
    """Result of `Cache.explain`.

    num_hit_tokens: the result of `match`. num_common_tokens: tokens that the tree's nodes share with the prompt, its
    last token included; if it is more than the hit, blocks were given up. nearest_block: int32, tokens of the stored
    block that has most in common with the prompt's next one (the block that begins at `num_common_tokens // block_size
    * block_size`); empty if the prompt ends there, or the tree stores nothing after the common part.
    """

    num_hit_tokens: int
    num_common_tokens: int
    nearest_block: Int32Array


class Dropped(NamedTuple):
    """Numbers of blocks that `Cache.drop` forgot: blocks made free, and blocks that open sequences hold or a running
    step may read, which are free when these end."""

    num_freed: int
    num_held: int


class OwnerCounts(NamedTuple):
    """Blocks that count in one owner."""

    held: int
    cached: int
    in_flight: int


class PriorityChange(NamedTuple):
    """Result of `Cache.set_cache_priority`: `num_blocks` have another cache priority now. The first of them begin at
    token `first_position`; without any it is the length of the prompt."""

    num_blocks: int
    first_position: int
