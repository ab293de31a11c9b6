"""Routers over replicas on the conversation trace: the share of blocks found, and how even the work is split.

    python benchmarks/router.py --traces DIR    10 replicas of 5 859 blocks of 512 tokens: minutes
    python benchmarks/router.py --quick         a made-up trace of chats: seconds

Each replica is a `quire.Cache` of its own and a queue that computes the tokens that it does not find, at `--token-us` a
token. A request arrives at the time of the trace. Routers:
    random, round robin
    longest prefix    the replica that has most of the prompt, the first of equals: sends all to one
    ours              `quire.cluster.router.rank_replicas`, from digests `--digest-s` old and what it sent itself
    one pool          one cache with the memory of all: the most that routing can find

JSON lines: hit rate in blocks over the whole trace, the largest replica's share of the computed tokens over the mean,
mean and 99th percentile of seconds until the first token, and microseconds of a decision (median and 99th percentile).
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from eviction import conversation, made_up
from machine import emit, emit_machine

from quire import Cache, KVSpec
from quire.cluster.routed_blocks import RecentWork, RoutedBlocks
from quire.cluster.router import ReplicaLoad, RouteCosts, rank_replicas
from quire.simulate import read_trace


class Arrival(NamedTuple):
    at_s: float
    num_tokens: int
    block_ids: Sequence[int]


class Replica:
    """A cache and a queue. A block of the trace is a block of one token."""

    def __init__(self, name: str, num_blocks: int, history_s: float) -> None:
        spec = KVSpec.uniform(num_layers=1, num_kv_heads=1, head_dim=8)
        self.name = name
        self.num_blocks = num_blocks
        self.cache = Cache(spec, num_blocks=num_blocks, block_size=1)
        self.cache.record_events(True)
        self.known = RoutedBlocks(history_s)
        self.token_of_node: dict[int, int] = {}
        self.free_at_s = 0.0
        self.recent = RecentWork()
        self.num_computed_tokens = 0

    def serve(self, block_ids: Sequence[int]) -> int:
        """Computes a prompt; how many of its blocks were cached."""
        sequence = self.cache.open(np.array([*block_ids, (1 << 31) - 1], np.int32))
        num_found = sequence.num_cached_tokens
        num_kept = min(len(block_ids), self.num_blocks)
        if num_found < num_kept:
            if self.cache.reserve([sequence], [num_kept - num_found]) is None:
                raise RuntimeError(f"expected room for {num_kept} blocks in a pool of {self.num_blocks}")
            self.cache.commit(sequence, num_kept)
        self.cache.close(sequence)
        return num_found

    def digest(self) -> dict[int, str]:
        for event in self.cache.take_events():
            if event.tokens is not None:
                self.token_of_node[event.node_id] = int(event.tokens[0])
            elif event.kind == "removed":
                del self.token_of_node[event.node_id]
        return dict.fromkeys(self.token_of_node.values(), "memory")


Choose = Callable[[Arrival, list[Replica]], Replica]


class Random:
    def __init__(self) -> None:
        self.generator = random.Random(0)

    def __call__(self, arrival: Arrival, replicas: list[Replica]) -> Replica:
        return self.generator.choice(replicas)


class RoundRobin:
    def __init__(self) -> None:
        self.turn = -1

    def __call__(self, arrival: Arrival, replicas: list[Replica]) -> Replica:
        self.turn += 1
        return replicas[self.turn % len(replicas)]


def longest_prefix(arrival: Arrival, replicas: list[Replica]) -> Replica:
    path = np.array([*arrival.block_ids, (1 << 31) - 1], np.int32)
    return max(replicas, key=lambda replica: replica.cache.match(path).num_tokens)


class Ours:
    def __init__(self, block_tokens: int, costs: RouteCosts) -> None:
        self.block_tokens, self.costs = block_tokens, costs

    def __call__(self, arrival: Arrival, replicas: list[Replica]) -> Replica:
        for replica in replicas:
            replica.known.expire(arrival.at_s)
        loads = [
            ReplicaLoad(
                replica.name,
                max(0.0, replica.free_at_s - arrival.at_s),
                replica.recent.seconds(arrival.at_s),
                replica.known,
            )
            for replica in replicas
        ]
        ranked = rank_replicas(arrival.block_ids, arrival.num_tokens, self.block_tokens, loads, self.costs)
        chosen = next(replica for replica in replicas if replica.name == ranked[0].name)
        chosen.known.note_sent(arrival.block_ids, arrival.at_s)
        return chosen


def replay(
    arrivals: list[Arrival],
    block_tokens: int,
    replicas: list[Replica],
    choose: Choose,
    token_s: float,
    digest_s: float,
) -> dict[str, float]:
    num_found = num_asked = 0
    next_digest_s = 0.0
    waits: list[float] = []
    decisions: list[float] = []
    for arrival in arrivals:
        if arrival.at_s >= next_digest_s:
            for replica in replicas:
                replica.known.set_digest(replica.digest())
            next_digest_s = arrival.at_s + digest_s
        began = time.perf_counter()
        replica = choose(arrival, replicas)
        decisions.append(time.perf_counter() - began)
        found = replica.serve(arrival.block_ids)
        num_found += found
        num_asked += len(arrival.block_ids)
        num_new = max(1, arrival.num_tokens - found * block_tokens)
        replica.num_computed_tokens += num_new
        replica.recent.add(num_new * token_s, arrival.at_s)
        replica.free_at_s = max(replica.free_at_s, arrival.at_s) + num_new * token_s
        waits.append(replica.free_at_s - arrival.at_s)
    computed = [replica.num_computed_tokens for replica in replicas]
    return {
        "hit_rate": round(num_found / num_asked, 4),
        "largest_over_mean": round(max(computed) / statistics.mean(computed), 3),
        "least_over_mean": round(min(computed) / statistics.mean(computed), 3),
        "first_token_mean_s": round(statistics.mean(waits), 2),
        "first_token_p99_s": round(float(np.percentile(waits, 99)), 2),
        "decision_us_median": round(1e6 * statistics.median(decisions), 1),
        "decision_us_p99": round(1e6 * float(np.percentile(decisions, 99)), 1),
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
        trace, num_blocks = made_up(), 100
        arrivals = [
            Arrival(0.05 * number, request.num_tokens, request.block_ids)
            for number, request in enumerate(trace.requests)
        ]
    elif arguments.traces is not None:
        trace, num_blocks = conversation(arguments.traces), arguments.blocks
        timed = read_trace(arguments.traces / "mooncake_fast25_conversation.jsonl").requests
        arrivals = [
            Arrival(request.arrival_s, request.num_prompt_tokens, request.content_ids) for request in timed
        ]
    else:
        parser.error("expected --traces DIR or --quick")
    token_s = arguments.token_us * 1e-6
    costs = RouteCosts(token_s, {})
    routers: dict[str, Callable[[], Choose]] = {
        "random": Random,
        "round robin": RoundRobin,
        "longest prefix": lambda: longest_prefix,
        "ours": lambda: Ours(trace.block_tokens, costs),
    }
    emit_machine()
    for name, make in routers.items():
        replicas = [
            Replica(f"replica-{number}", num_blocks, 2 * arguments.digest_s)
            for number in range(arguments.replicas)
        ]
        figures = replay(arrivals, trace.block_tokens, replicas, make(), token_s, arguments.digest_s)
        emit("router", trace=trace.name, router=name, num_replicas=arguments.replicas, **figures)
    pool = [Replica("pool", num_blocks * arguments.replicas, 0.0)]
    figures = replay(
        arrivals,
        trace.block_tokens,
        pool,
        lambda _, replicas: replicas[0],
        token_s / arguments.replicas,
        math.inf,
    )
    emit("router", trace=trace.name, router="one pool", num_replicas=1, **figures)


if __name__ == "__main__":
    main()
