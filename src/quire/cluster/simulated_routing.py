"""`RankedRouting`: the rule of `rank_replicas` for a simulation, with the knowledge that a router would have.

It knows a replica by digests, which are up to `digest_s` old, and by the prompts that it sent there in the last
`HISTORY_S` seconds, as the door of a cluster. It counts the work that it predicts, and reads queues as they are.

Cost: that of `rank_replicas`; O(blocks of the pool) a digest.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.cluster.routed_blocks import HISTORY_S, RecentWork, RoutedBlocks
from quire.cluster.router import BlockTiers, ReplicaLoad, RouteCosts, rank_replicas
from quire.simulate import TraceRequest
from quire.simulate.replica import Replica
from quire.simulate.routing import Routing
from quire.simulate.simulated_store import SimulatedStore

__all__ = ["RankedRouting"]

_STORE = "store"


class RankedRouting(Routing):
    """replicas: with caches that report their blocks. costs: of `rank_replicas`."""

    def __init__(
        self, replicas: Sequence[Replica], block_tokens: int, costs: RouteCosts, digest_s: float
    ) -> None:
        self.digest_s = digest_s
        self._block_tokens, self._costs = block_tokens, costs
        self._loads_pay = costs.load_s.get(_STORE, 0.0) < costs.token_s  # else replicas compute what it has
        self._known = {replica.name: RoutedBlocks(HISTORY_S) for replica in replicas}
        self._recent = {replica.name: RecentWork() for replica in replicas}

    def take_digests(self, replicas: Sequence[Replica]) -> None:
        for replica in replicas:
            self._known[replica.name].set_digest(dict.fromkeys(replica.block_ids(), "memory"))

    def choose(self, request: TraceRequest, replicas: Sequence[Replica]) -> Replica:
        now, loads = request.arrival_s, []
        for replica in replicas:
            known = self._known[replica.name]
            known.expire(now)
            blocks: BlockTiers = known
            if replica.store is not None and self._loads_pay:
                blocks = _WithStore(known, replica.store)
            recent_s = self._recent[replica.name].seconds(now)
            loads.append(ReplicaLoad(replica.name, replica.queue_s(now), recent_s, blocks))
        ids = request.content_ids
        best = rank_replicas(ids, request.num_prompt_tokens, self._block_tokens, loads, self._costs)[0]
        self._known[best.name].note_sent(ids, now)
        self._recent[best.name].add(best.work_s, now)
        return next(replica for replica in replicas if replica.name == best.name)


class _WithStore:
    """The blocks of a replica, and those of the store behind them."""

    def __init__(self, known: RoutedBlocks, store: SimulatedStore) -> None:
        self._known, self._store = known, store

    def get(self, key: int, /) -> str | None:
        return self._known.get(key) or (_STORE if key in self._store else None)
