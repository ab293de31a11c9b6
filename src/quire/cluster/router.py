"""`rank_replicas`: the replicas in the order in which they should serve a request, from facts alone.

The cost of a replica is

    queue_s + work_weight * (seconds to compute and to load the request's tokens there) + recent_weight * recent_s

Work counts more than waiting: a token that is computed again also delays the requests behind it, and evicts others'
content. The recent work stands for that content: where no replica is busy, it sends a prompt of a new kind to the
replica that had the least, although another has its first, shared block.

Invariants
    R1  the same facts give the same ranking: no clock, no random number, no state. Equal replicas are ordered by a hash
        of the prompt and their name, so that new prompts spread.
    R2  bounded load: a replica whose queue is longer than `max_load_ratio` times the mean queue plus `spare_queue_s`
        comes after all that are not, however much it has cached. At least one replica is within the bound.
    R3  all replicas are ranked: a caller that finds the first one gone takes the next.

Cost: O(replicas * log blocks) look-ups; no pass over a digest.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

__all__ = ["BlockTiers", "RankedReplica", "ReplicaLoad", "RouteCosts", "num_cached_blocks", "rank_replicas"]


class BlockTiers(Protocol):
    """The blocks of a replica: `get(key)` gives the name of the fastest tier that has it ("memory"), or None.

    A block is there only with all blocks before it.
    """

    def get(self, key: int, /) -> str | None: ...


@dataclass(frozen=True, slots=True)
class RouteCosts:
    """Measured costs of an engine, the weights of the cost, and the bound of a load.

    token_s: seconds that a new token of a prompt takes. load_s: by tier, seconds to load a token from it, 0 for those
    that it does not name. work_weight, recent_weight: see the module's text. max_load_ratio, spare_queue_s: see R2. The
    defaults are those of docs/router.md.
    """

    token_s: float
    load_s: Mapping[str, float]
    max_load_ratio: float = 1.25
    spare_queue_s: float = 20.0
    work_weight: float = 10.0
    recent_weight: float = 0.05


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A replica as the router sees it. queue_s: seconds of work not done yet. recent_s: seconds of work that
    were sent there lately (`RecentWork`)."""

    name: str
    queue_s: float
    recent_s: float
    blocks: BlockTiers


class RankedReplica(NamedTuple):
    """A replica's place in a ranking. num_cached_blocks: of the request, in any tier. work_s: to compute
    and to load its tokens. cost: see the module's text. is_loaded: beyond the bound of R2."""

    name: str
    num_cached_blocks: int
    work_s: float
    cost: float
    is_loaded: bool


def rank_replicas(
    block_keys: Sequence[int],
    num_tokens: int,
    block_tokens: int,
    replicas: Sequence[ReplicaLoad],
    costs: RouteCosts,
) -> list[RankedReplica]:
    """The replicas, the best first.

    block_keys: of the prompt's full blocks, chained since its start (`quire.cache.block_hash`): equal keys, equal
    content before them. num_tokens: of the prompt. block_tokens: tokens of a block. replicas: at least one.
    """
    mean_s = sum(replica.queue_s for replica in replicas) / len(replicas)
    bound_s = costs.max_load_ratio * mean_s + costs.spare_queue_s
    ranked = [_rated(block_keys, num_tokens, block_tokens, replica, costs, bound_s) for replica in replicas]
    seed = block_keys[-1] if block_keys else num_tokens
    return sorted(
        ranked,
        key=lambda replica: (replica.is_loaded, replica.cost, _spread(seed, replica.name)),
    )


def num_cached_blocks(block_keys: Sequence[int], blocks: BlockTiers) -> int:
    """How many of a prompt's first blocks are there, by bisection."""
    return bisect_left(block_keys, True, key=lambda key: blocks.get(key) is None)


def _rated(
    block_keys: Sequence[int],
    num_tokens: int,
    block_tokens: int,
    replica: ReplicaLoad,
    costs: RouteCosts,
    bound_s: float,
) -> RankedReplica:
    num_cached, load_s = _cached(block_keys, block_tokens, replica.blocks, costs.load_s)
    work_s = costs.token_s * max(0, num_tokens - num_cached * block_tokens) + load_s
    cost = replica.queue_s + costs.work_weight * work_s + costs.recent_weight * replica.recent_s
    return RankedReplica(replica.name, num_cached, work_s, cost, replica.queue_s > bound_s)


def _cached(
    block_keys: Sequence[int], block_tokens: int, blocks: BlockTiers, load_s: Mapping[str, float]
) -> tuple[int, float]:
    """How many of the first blocks the replica has, and the seconds to load those from their tiers.

    Tiers lie one behind the other along a prompt: a tail is evicted before its head. So the tier of each stretch is
    found by bisection too.
    """
    num_cached = num_cached_blocks(block_keys, blocks)
    seconds, start = 0.0, 0
    while load_s and start < num_cached:
        tier = blocks.get(block_keys[start]) or ""
        stop = bisect_left(block_keys, True, start, num_cached, key=lambda key: blocks.get(key) != tier)
        seconds += load_s.get(tier, 0.0) * block_tokens * (stop - start)
        start = stop
    return num_cached, seconds


def _spread(seed: int, name: str) -> bytes:
    """An order of equal replicas that differs from prompt to prompt."""
    return hashlib.blake2b(b"%d %s" % (seed, name.encode()), digest_size=8).digest()
