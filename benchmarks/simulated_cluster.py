"""A cluster on Ray against its simulation: the hits and seconds of the same made-up trace in both. JSON lines.

    python benchmarks/simulated_cluster.py [--quick] [--replicas N] [--seeds N]

`quire cluster serve` runs replicas of the embedded model; requests of chats arrive at the trace's times, on streams of
a client. Then the trace runs through `EngineReplica`s and `SimulatedReplica`s behind `RankedRouting`, with the cost
line that `measured_cost` finds for the same model on this machine. A figure a seed of the trace:
    hits           tokens of prompts found in memory, over all
    equal          requests with the same hit in cluster and simulation
    first token    mean seconds since a request was due
Needs ray (`quire-kv[cluster]`); without it nothing is measured, and the line says so.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
from machine import emit, emit_machine

from quire import LLM, plan
from quire.cluster.router import RouteCosts
from quire.cluster.simulated_routing import RankedRouting
from quire.simulate import CostLine, TraceRequest, Workload
from quire.simulate.engine_replica import EngineReplica
from quire.simulate.measured_cost import measured_cost
from quire.simulate.replay import replay
from quire.simulate.replica import Replica
from quire.simulate.simulated_cache import SimulatedCache
from quire.simulate.simulated_replica import SimulatedReplica

_BLOCK_TOKENS = 16
_DIGEST_S = 0.5
_NUM_OUTPUT_TOKENS = 8
_START_S = 300


class Measured(NamedTuple):
    """A request of the cluster. first_token_s: since it was due."""

    num_cached_tokens: int
    first_token_s: float


def made_trace(seed: int, num_requests: int, every_s: float) -> Workload:
    """12 chats that grow by 1 to 4 blocks a turn, up to 24, among prompts of 8 blocks that are seen once; a request
    each `every_s` seconds on average, at random times."""
    generator = random.Random(seed)
    chats = [[0] for _ in range(12)]
    num_ids, now, requests = 1, 0.0, []
    for _ in range(num_requests):
        chat, num_new = generator.randrange(len(chats)), generator.randrange(1, 5)
        if generator.random() < 0.25:
            path = [0, *range(num_ids, num_ids + 7)]
        else:
            path = [*chats[chat], *range(num_ids, num_ids + num_new)]
            chats[chat] = path if len(path) < 24 else [0]
        num_ids = path[-1] + 1
        requests.append(TraceRequest(now, _BLOCK_TOKENS * len(path), _NUM_OUTPUT_TOKENS, tuple(path)))
        now += generator.expovariate(1 / every_s)
    return Workload(f"chats, seed {seed}", tuple(requests), seed, _BLOCK_TOKENS)


@contextmanager
def cluster(num_replicas: int, kv_memory: int) -> Iterator[str]:
    """The URL of a cluster on a Ray of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = (
        f"cluster serve --replicas {num_replicas} --cpus 0.5 --kv-memory {kv_memory} --block-size {_BLOCK_TOKENS} "
        f"--digest-seconds {_DIGEST_S} --port {port}"
    )
    folder = Path(tempfile.mkdtemp())
    sessions = tempfile.mkdtemp(prefix="q", dir="/tmp")  # a part of a socket's path, which is short
    environment = {**os.environ, "HOME": str(folder), "RAY_TMPDIR": sessions, "RAY_USAGE_STATS_ENABLED": "0"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "quire", *words.split()],
            env=environment,
            stdout=log,
            stderr=log,
            cwd=folder,
        )
    try:
        _wait(process, f"http://127.0.0.1:{port}", num_replicas, folder / "log")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(sessions, ignore_errors=True)


def _wait(process: subprocess.Popen[bytes], url: str, num_replicas: int, log: Path) -> None:
    until_s = time.monotonic() + _START_S
    while time.monotonic() < until_s and process.poll() is None:
        try:
            if f"quire:router_replicas {num_replicas}" in httpx.get(f"{url}/metrics", timeout=60).text:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"the cluster does not answer:\n{log.read_text()[-3000:]}")


async def _measured(url: str, workload: Workload, vocab_size: int) -> list[Measured]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=_START_S, limits=limits) as client:
        began = time.monotonic() + 0.5

        async def ask(number: int, request: TraceRequest) -> Measured:
            body = {
                "prompt": workload.token_ids(number, vocab_size).tolist(),
                "max_tokens": request.num_output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            due = began + request.arrival_s
            await asyncio.sleep(due - time.monotonic())
            first_s, cached = 0.0, -1
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        first_s = first_s or time.monotonic() - due
                        event = json.loads(line.removeprefix("data: "))
                        if event.get("usage"):
                            cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
            if cached < 0:
                raise RuntimeError(f"the cluster gave no usage for request {number}: {answer.status_code}")
            return Measured(cached, first_s)

        return list(await asyncio.gather(*(ask(n, one) for n, one in enumerate(workload.requests))))


def simulated(
    workload: Workload, names: list[str], num_blocks: int, cost: CostLine, vocab_size: int, by_steps: bool
) -> list[Measured]:
    replicas: list[Replica] = [
        EngineReplica(name, workload, num_blocks, cost, vocab_size=vocab_size)
        if by_steps
        else SimulatedReplica(
            name, SimulatedCache(num_blocks, reports_blocks=True), cost, block_tokens=_BLOCK_TOKENS
        )
        for name in names
    ]
    costs = RouteCosts(cost.prompt_token_s(2048), {})
    run = replay(workload, replicas, RankedRouting(replicas, _BLOCK_TOKENS, costs, _DIGEST_S))
    return [Measured(one.num_found_tokens, one.first_token_s) for one in run.served if one is not None]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one seed, 60 requests")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=120, help="of a replica")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--every-s", type=float, default=0.1)
    arguments = parser.parse_args()
    num_seeds, num_requests = (1, 60) if arguments.quick else (arguments.seeds, arguments.requests)
    emit_machine()
    if importlib.util.find_spec("ray") is None:
        emit("simulated_cluster", skipped="ray is not installed")
        return
    sized = plan(block_size=_BLOCK_TOKENS, kv_memory="16MiB")
    kv_memory = arguments.blocks * (sized.budget_bytes // sized.num_blocks)
    with LLM(block_size=_BLOCK_TOKENS, kv_memory=kv_memory, num_threads=1) as llm:
        cost, vocab_size = measured_cost(llm), llm.vocab_size
    emit("cost", line=str(cost))
    for seed in range(num_seeds):
        workload = made_trace(seed, num_requests, arguments.every_s)
        num_tokens = sum(request.num_prompt_tokens for request in workload.requests)
        with cluster(arguments.replicas, kv_memory) as url:  # an empty cache for each seed
            real = asyncio.run(_measured(url, workload, vocab_size))
        names = [f"replica-{number}" for number in range(arguments.replicas)]
        figures: dict[str, list[Measured]] = {
            "cluster": real,
            "scheduler": simulated(workload, names, arguments.blocks, cost, vocab_size, by_steps=True),
            "queue": simulated(workload, names, arguments.blocks, cost, vocab_size, by_steps=False),
        }
        for name, rows in figures.items():
            pairs = zip(real, rows, strict=True)
            emit(
                "simulated_cluster",
                seed=seed,
                replicas=arguments.replicas,
                requests=num_requests,
                time=name,
                hits=round(sum(row.num_cached_tokens for row in rows) / num_tokens, 4),
                equal=sum(one.num_cached_tokens == row.num_cached_tokens for one, row in pairs),
                first_token_ms=round(1e3 * statistics.mean(row.first_token_s for row in rows), 2),
            )


if __name__ == "__main__":
    main()
