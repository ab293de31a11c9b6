"""Ray's rule, as of ray 2.60: our reading of `PrefixCacheAffinityRouter` with its defaults, for benchmarks/router.py.

A tree has the prompts that were routed, with the replicas that each part went to. It forgets none (`do_eviction` is
False) and knows no replica's cache. Candidates for a prompt are
    the replicas of the deepest node that the prompt reaches, if it matches at least a tenth of the prompt;
    else those with the smallest part of the tree.
The candidate with the fewest requests under way gets the prompt. Queues do not change the candidates
(`imbalanced_threshold` is infinite). Ray's tree counts characters, ours blocks; a request is under way here until its
first token. Ties are drawn at random.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

from quire.simulate import TraceRequest
from quire.simulate.routing import Routing
from quire.simulate.simulated_replica import ServedRequest, SimulatedReplica

_MATCH_RATE = 0.1


class RayRule(Routing):
    def __init__(self, replicas: Sequence[SimulatedReplica]) -> None:
        self._generator = random.Random(0)
        self._replicas_of_block: dict[int, set[str]] = {}  # a block's id stands for the path to it
        self._num_blocks = {replica.name: 0 for replica in replicas}
        self._running: dict[str, list[float]] = {
            replica.name: [] for replica in replicas
        }  # times of first tokens

    def choose(self, request: TraceRequest, replicas: Sequence[SimulatedReplica]) -> SimulatedReplica:
        num_matched, names = 0, set(self._num_blocks)
        for block_id in request.content_ids:
            if block_id not in self._replicas_of_block:
                break
            num_matched, names = num_matched + 1, self._replicas_of_block[block_id]
        if num_matched < _MATCH_RATE * len(request.content_ids):
            smallest = min(self._num_blocks.values())
            names = {name for name, number in self._num_blocks.items() if number == smallest}
        for running in self._running.values():
            while running and running[0] <= request.arrival_s:
                heapq.heappop(running)
        shortest = min(len(self._running[name]) for name in names)
        return self._generator.choice(
            [one for one in replicas if one.name in names and len(self._running[one.name]) == shortest]
        )

    def note_served(self, request: TraceRequest, served: ServedRequest) -> None:
        heapq.heappush(self._running[served.replica], request.arrival_s + served.first_token_s)
        for block_id in request.content_ids:
            names = self._replicas_of_block.setdefault(block_id, set())
            self._num_blocks[served.replica] += served.replica not in names
            names.add(served.replica)
