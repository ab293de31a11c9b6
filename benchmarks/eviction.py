"""Eviction policies on public traces: the share of prompt tokens that a pool finds again.

    python benchmarks/eviction.py --traces DIR    all traces: 10 minutes
    python benchmarks/eviction.py --quick         a made-up trace of chats and one-off prompts: seconds

A request's blocks are found from its first block to the first missing one. Then its path is used, tail before head, and
the missing blocks are added. A block below the one that a policy names is evicted in its place, the oldest first. A
row is the hits of the second half of the requests, in tokens over tokens: the definition of `kvcache-simulator` 0.1.3,
whose figures for LRU on the conversation trace these are, to 4 digits.

`lru` and `frequency` are `quire.Cache(eviction=)` itself, on the back end chosen. The other policies are 10 lines each,
below, on a tree of block ids: `slru` (protected half), `2q` (Johnson and Shasha 1994: a quarter in, ghosts of half the
pool), `s3-fifo` (Yang et al. 2023: a tenth small), `arc` (Megiddo and Modha 2003), `gdsf` (cost-aware: uses, over a
clock that rises with each eviction; the cost of a block is constant in tokens, so it is LFU with dynamic aging).

Traces in --traces:
    conversation    mooncake_fast25_conversation.jsonl, blocks of 512 tokens
    agents          agentic_claude_code_0001-0120.jsonl.gz, blocks of 64 taken 16 at a time; a session begins every 5 s
    azure code      azure2023_code.csv has lengths alone. Its content is made up here: a request continues one of the
                    last 512 prompts that was 1 to 512 tokens shorter, drawn at random, or is new; blocks of 64 tokens.
                    With --recent it continues the latest of them, which favours the policy that knows recency alone
"""

from __future__ import annotations

import argparse
import csv
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from machine import emit, emit_machine

from quire.simulate import TraceRequest, Workload, read_trace
from quire.simulate.simulated_cache import SimulatedCache


class Trace(NamedTuple):
    workload: Workload
    capacities: tuple[int, ...]


class Policy:
    """Two lists of blocks, first out first, and the ghosts of blocks evicted from each."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.lists: tuple[OrderedDict[int, int], ...] = (OrderedDict(), OrderedDict())
        self.ghosts: tuple[OrderedDict[int, int], ...] = (OrderedDict(), OrderedDict())

    def add(self, block_id: int) -> None:
        self.put(block_id, 0)

    def use(self, block_id: int) -> None:
        raise NotImplementedError

    def candidates(self) -> Iterator[int]:
        """Blocks in the order of eviction: the first that may go is taken."""
        yield from self.lists[0]
        yield from self.lists[1]

    def evicted(self, block_id: int) -> None:
        self.drop(block_id)

    def put(self, block_id: int, number: int, value: int = 0) -> None:
        self.lists[number][block_id] = value

    def drop(self, block_id: int) -> int:
        number = int(block_id in self.lists[1])
        del self.lists[number][block_id]
        return number

    def add_ghost(self, block_id: int, number: int, most: float) -> None:
        self.ghosts[number][block_id] = 0
        while len(self.ghosts[number]) > most:
            self.ghosts[number].popitem(last=False)


class Slru(Policy):
    def use(self, block_id: int) -> None:
        self.drop(block_id)
        self.put(block_id, 1)
        while len(self.lists[1]) > self.capacity // 2:
            self.put(self.lists[1].popitem(last=False)[0], 0)


class TwoQ(Policy):
    def add(self, block_id: int) -> None:
        self.put(block_id, int(self.ghosts[0].pop(block_id, None) is not None))

    def use(self, block_id: int) -> None:
        if block_id in self.lists[1]:
            self.lists[1].move_to_end(block_id)

    def candidates(self) -> Iterator[int]:
        first = int(len(self.lists[0]) <= self.capacity // 4)
        yield from self.lists[first]
        yield from self.lists[1 - first]

    def evicted(self, block_id: int) -> None:
        if self.drop(block_id) == 0:
            self.add_ghost(block_id, 0, self.capacity / 2)


class S3Fifo(Policy):
    def add(self, block_id: int) -> None:
        self.put(block_id, int(self.ghosts[0].pop(block_id, None) is not None))

    def use(self, block_id: int) -> None:
        entries = self.lists[int(block_id in self.lists[1])]
        entries[block_id] = min(3, entries[block_id] + 1)

    def candidates(self) -> Iterator[int]:
        small, main = self.lists
        num_refused = 0
        while num_refused <= len(small):  # each round takes a use away, or a candidate is refused
            is_small = len(small) >= self.capacity // 10 or not main
            block_id, uses = next(iter((small if is_small else main).items()))
            if is_small and uses > 1:
                self.drop(block_id)
                self.put(block_id, 1)
            elif not is_small and uses:
                main.move_to_end(block_id)
                main[block_id] = uses - 1
            else:
                yield block_id
                if block_id in small or block_id in main:  # it may not go now
                    (small if is_small else main).move_to_end(block_id)
                    num_refused += 1
        yield from main
        yield from small

    def evicted(self, block_id: int) -> None:
        if self.drop(block_id) == 0:
            self.add_ghost(block_id, 0, self.capacity * 0.9)


class Arc(Policy):
    target = 0.0

    def add(self, block_id: int) -> None:
        sizes = [max(1, len(ghosts)) for ghosts in self.ghosts]
        for number, sign in ((0, 1), (1, -1)):
            if self.ghosts[number].pop(block_id, None) is not None:
                step = sign * max(1.0, sizes[1 - number] / sizes[number])
                self.target = min(float(self.capacity), max(0.0, self.target + step))
                return self.put(block_id, 1)
        return self.put(block_id, 0)

    def use(self, block_id: int) -> None:
        self.drop(block_id)
        self.put(block_id, 1)

    def candidates(self) -> Iterator[int]:
        first = int(len(self.lists[0]) <= self.target)
        yield from self.lists[first]
        yield from self.lists[1 - first]

    def evicted(self, block_id: int) -> None:
        self.add_ghost(block_id, self.drop(block_id), self.capacity)


class Gdsf(Policy):
    """Lists of equal keys: the key of a block is the clock at its last use, and its uses."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.clock = 0
        self.by_key: dict[int, OrderedDict[int, None]] = {}
        self.keys: list[int] = []  # of `by_key`, in order
        self.of: dict[int, tuple[int, int]] = {}  # (key, uses)

    def add(self, block_id: int, uses: int = 1) -> None:
        key = self.clock + uses
        self.of[block_id] = (key, uses)
        if key not in self.by_key:
            self.by_key[key] = OrderedDict()
            insort(self.keys, key)
        self.by_key[key][block_id] = None

    def use(self, block_id: int) -> None:
        self.add(block_id, self.take(block_id)[1] + 1)

    def candidates(self) -> Iterator[int]:
        for key in self.keys:
            yield from self.by_key[key]

    def evicted(self, block_id: int) -> None:
        self.clock = max(self.clock, self.take(block_id)[0])

    def take(self, block_id: int) -> tuple[int, int]:
        key, uses = self.of.pop(block_id)
        del self.by_key[key][block_id]
        if not self.by_key[key]:
            del self.by_key[key]
            self.keys.remove(key)
        return key, uses


POLICIES: dict[str, type[Policy]] = {"slru": Slru, "2q": TwoQ, "s3-fifo": S3Fifo, "arc": Arc, "gdsf": Gdsf}


def replay(policy: Policy, requests: Sequence[TraceRequest]) -> Iterator[int]:
    """The blocks found of each request."""
    parent: dict[int, int] = {}  # of the blocks in the pool; -1 for a first block
    children: dict[int, dict[int, None]] = {}
    for request in requests:
        path = request.content_ids
        num_found = next((at for at, block_id in enumerate(path) if block_id not in parent), len(path))
        yield num_found
        held = set(path[: policy.capacity])
        num_kept = min(len(path), policy.capacity)
        for at in range(num_found, num_kept):
            if len(parent) == policy.capacity:
                leaf = next(candidate for candidate in policy.candidates() if candidate not in held)
                while children[leaf]:
                    leaf = next(iter(children[leaf]))
                policy.evicted(leaf)
                del children[leaf]
                if (above := parent.pop(leaf)) >= 0:
                    del children[above][leaf]
            parent[path[at]] = path[at - 1] if at else -1
            children[path[at]] = {}
            if at:
                children[path[at - 1]][path[at]] = None
        for block_id in reversed(path[num_found:num_kept]):
            policy.add(block_id)
        for block_id in reversed(path[: min(num_found, num_kept)]):
            policy.use(block_id)


def hit_rate(workload: Workload, found: Iterator[int]) -> float:
    """Of the second half of the requests, in tokens."""
    hits = tokens = 0
    for number, (request, num_found) in enumerate(zip(workload.requests, found, strict=True)):
        if number >= len(workload.requests) // 2:
            hits += min(workload.block_tokens * num_found, request.num_prompt_tokens)
            tokens += request.num_prompt_tokens
    return hits / tokens


# Traces


def conversation(folder: Path) -> Trace:
    workload = read_trace(folder / "mooncake_fast25_conversation.jsonl")
    return Trace(
        replace(workload, name="conversation"), (1000, 5000, 10_000, 20_000, 30_000, 50_000, 100_000)
    )


def agents(folder: Path, every_s: float = 5.0) -> Trace:
    """Of the agents' requests those that have a full block."""
    path = folder / "agentic_claude_code_0001-0120.jsonl.gz"
    workload = read_trace(path, block_tokens=1024, session_every_s=every_s)
    requests = tuple(request for request in workload.requests if request.content_ids)
    return Trace(replace(workload, name="agents", requests=requests), (625, 1250, 1875, 2500, 6250))


def azure_code(folder: Path, is_recent: bool = False) -> Trace:
    rng = np.random.default_rng(0)
    requests: list[TraceRequest] = []
    open_prompts: list[tuple[int, list[int]]] = []  # (length, blocks), the latest last
    num_ids = 0
    with (folder / "azure2023_code.csv").open() as file:
        for row in csv.DictReader(file):
            length = int(row["ContextTokens"])
            shorter = [at for at, (before, _) in enumerate(open_prompts) if 0 < length - before <= 512]
            drawn = -1 if is_recent or not shorter else int(rng.integers(len(shorter)))
            whole = open_prompts.pop(shorter[drawn])[1] if shorter else []
            num_new = length // 64 - len(whole)
            block_ids = [*whole, *range(num_ids, num_ids + num_new)]
            num_ids += num_new
            open_prompts = [*open_prompts[-511:], (length, block_ids)]
            if block_ids:
                requests.append(TraceRequest(0.0, length, 1, tuple(block_ids)))
    name = "azure code, recent" if is_recent else "azure code"
    return Trace(Workload(name, tuple(requests), block_tokens=64), (1000, 5000, 10_000, 20_000, 50_000))


def made_up() -> Trace:
    """64 chats of up to 12 turns, each turn with 3 new blocks, among one-off prompts of 12 blocks, one each 50 ms."""
    rng = np.random.default_rng(0)
    chats = [[0]] * 64
    num_ids = 1
    requests: list[TraceRequest] = []
    for number in range(3000):
        if rng.random() < 0.5:
            path = [0, *range(num_ids, num_ids + 12)]
        else:
            chat = int(rng.integers(64))
            path = [*chats[chat], *range(num_ids, num_ids + 3)]
            chats[chat] = path if len(path) < 36 else [0]
        num_ids = max(num_ids, path[-1] + 1)
        requests.append(TraceRequest(0.05 * number, 16 * len(path), 1, tuple(path)))
    return Trace(Workload("made up", tuple(requests), block_tokens=16), (250, 500, 1000, 2000))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the made-up trace alone: seconds")
    parser.add_argument("--traces", type=Path, help="a folder with the traces")
    parser.add_argument("--trace", choices=["conversation", "agents", "azure-code"], help="one of them alone")
    parser.add_argument("--recent", action="store_true", help="other made-up content of the Azure trace")
    parser.add_argument("--backend", choices=["native", "python"], default="native")
    arguments = parser.parse_args()
    emit_machine()
    makers = {
        "conversation": conversation,
        "agents": agents,
        "azure-code": lambda folder: azure_code(folder, arguments.recent),
    }
    traces = [made_up()]
    if not arguments.quick:
        if arguments.traces is None:
            parser.error("expected --traces DIR or --quick")
        traces = [make(arguments.traces) for name, make in makers.items() if arguments.trace in (None, name)]
    for workload, capacities in traces:
        for capacity in capacities:
            rates = {}
            for name in ("lru", "frequency"):
                cache = SimulatedCache(capacity, name, backend=arguments.backend)
                rates[name] = hit_rate(workload, (cache.serve(request, 0.0) for request in workload.requests))
            for name, policy in POLICIES.items():
                rates[name] = hit_rate(workload, replay(policy(capacity), workload.requests))
            rounded = {name: round(rate, 4) for name, rate in rates.items()}
            emit("eviction", trace=workload.name, num_blocks=capacity, **rounded)


if __name__ == "__main__":
    main()
