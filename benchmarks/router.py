"""Routers over replicas on the conversation trace: the share of blocks found, and how even the work is split.

    python benchmarks/router.py --traces DIR    10 replicas of 5 859 blocks of 512 tokens: minutes
    python benchmarks/router.py --quick         a made-up trace of chats: seconds

The mechanism is that of `quire simulate`: each replica is a `quire.Cache` of its own and a queue that computes the
tokens that it does not find, at `--token-us` a token. A request arrives at the time of the trace. Routers:
    random, round robin
    longest prefix    the replica that has most of the prompt, the first of equals: sends all to one
    Ray's rule        our reading of the prefix router of ray 2.60 (`RayRule`)
    ours              `quire.cluster.router.rank_replicas`, from digests `--digest-s` old and what it sent itself
    one pool          one cache with the memory of all: the most that routing can find

JSON lines: hit rate in blocks over the whole trace, the largest replica's share of the computed tokens over the mean,
mean and 99th percentile of seconds until the first token, and microseconds of a decision (median and 99th percentile).
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from eviction import conversation, made_up
from machine import emit, emit_machine

from quire.cluster.router import RouteCosts
from quire.cluster.simulated_routing import RankedRouting
from quire.simulate import CostLine, TraceRequest, Workload
from quire.simulate.replay import replay
from quire.simulate.replica import Replica, ServedRequest
from quire.simulate.routing import LongestPrefix, RandomRouting, RoundRobin, Routing
from quire.simulate.simulated_cache import SimulatedCache
from quire.simulate.simulated_replica import SimulatedReplica

Replicas = list[SimulatedReplica]
_MATCH_RATE = 0.1  # of Ray's rule


class RayRule(Routing):
    """Ray's rule, as of ray 2.60: our reading of its router by prefixes, with its defaults.

    A tree has the prompts that were routed, with the replicas that each part went to. It forgets none and knows no
    replica's cache. Candidates for a prompt are
        the replicas of the deepest node that the prompt reaches, if it matches at least a tenth of the prompt;
        else those with the smallest part of the tree.
    The candidate with the fewest requests under way gets the prompt. Queues do not change the candidates. Ray's tree
    counts characters, ours blocks; a request is under way here until its first token. Ties are drawn at random.
    """

    def __init__(self, replicas: Sequence[SimulatedReplica]) -> None:
        self._generator = random.Random(0)
        self._replicas_of_block: dict[int, set[str]] = {}  # a block's id stands for the path to it
        self._num_blocks = {replica.name: 0 for replica in replicas}
        self._running: dict[str, list[float]] = {
            replica.name: [] for replica in replicas
        }  # times of first tokens

    def choose(self, request: TraceRequest, replicas: Sequence[Replica]) -> Replica:
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


def made_replicas(number: int, num_blocks: int, token_s: float, block_tokens: int) -> Replicas:
    return [
        SimulatedReplica(
            f"replica-{index}",
            SimulatedCache(num_blocks, reports_blocks=True),
            CostLine(0.0, token_s, 0.0),
            block_tokens=block_tokens,
        )
        for index in range(number)
    ]


def figures_of(workload: Workload, replicas: Replicas, routing: Routing) -> dict[str, float]:
    run = replay(workload, replicas, routing)
    computed = [replica.num_computed_tokens for replica in replicas]
    served = [one for one in run.served if one is not None]
    waits = [one.first_token_s for one in served]
    num_asked = sum(len(request.content_ids) for request in workload.requests)
    return {
        "hit_rate": round(sum(one.num_found_blocks for one in served) / num_asked, 4),
        "largest_over_mean": round(max(computed) / statistics.mean(computed), 3),
        "least_over_mean": round(min(computed) / statistics.mean(computed), 3),
        "first_token_mean_s": round(statistics.mean(waits), 2),
        "first_token_p99_s": round(float(np.percentile(waits, 99)), 2),
        "decision_us_median": round(1e6 * statistics.median(run.decision_s), 1),
        "decision_us_p99": round(1e6 * float(np.percentile(run.decision_s, 99)), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a made-up trace: seconds")
    parser.add_argument("--traces", type=Path, help="a folder with the conversation trace")
    parser.add_argument("--replicas", type=int, default=10)
    parser.add_argument("--blocks", type=int, default=5859, help="of a replica")
    parser.add_argument("--token-us", type=float, default=200.0, help="to compute a token of a prompt")
    parser.add_argument("--digest-s", type=float, default=0.5)
    arguments = parser.parse_args()
    if arguments.quick:
        (workload, _), num_blocks = made_up(), 100
    elif arguments.traces is not None:
        (workload, _), num_blocks = conversation(arguments.traces), arguments.blocks
    else:
        parser.error("expected --traces DIR or --quick")
    # Answers of one token: the router's work is prompts.
    workload = replace(
        workload, requests=tuple(replace(request, num_output_tokens=1) for request in workload.requests)
    )
    token_s, block_tokens = arguments.token_us * 1e-6, workload.block_tokens
    costs = RouteCosts(token_s, {})
    routings: dict[str, Callable[[Replicas], Routing]] = {
        "random": lambda _: RandomRouting(),
        "round robin": lambda _: RoundRobin(),
        "longest prefix": lambda _: LongestPrefix(),
        "Ray's rule": RayRule,
        "ours": lambda replicas: RankedRouting(replicas, block_tokens, costs, arguments.digest_s),
    }
    emit_machine()
    for name, make in routings.items():
        replicas = made_replicas(arguments.replicas, num_blocks, token_s, block_tokens)
        figures = figures_of(workload, replicas, make(replicas))
        emit("router", trace=workload.name, router=name, num_replicas=arguments.replicas, **figures)
    pool = made_replicas(1, num_blocks * arguments.replicas, token_s / arguments.replicas, block_tokens)
    figures = figures_of(workload, pool, RoundRobin())
    emit("router", trace=workload.name, router="one pool", num_replicas=1, **figures)


if __name__ == "__main__":
    main()
