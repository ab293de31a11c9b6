"""A prefix that another engine holds: time to the first token, and decodes beside or apart from a prefill. JSON lines.

    python benchmarks/peer_fetch.py [--quick] [--tokens 2000] [--turns 3] [--layers 28] [--tcp]

Random weights in the shape of Qwen3-0.6B (`benchmarks/engine.py`), bfloat16. Two processes with an engine of one thread
each on this machine, connected by a Unix socket: one computes prompts and gives its host memory to the other. `--tcp`:
by TCP with signed values, as replicas of a cluster are.
  first token   of a prompt of `--tokens` tokens: cold, held by the peer, held in own memory; medians
  decodes       gaps between tokens of four answers while such a prompt comes: `beside`, computed by the same engine;
                `apart`, computed by the peer, then fetched. Both with `long_prefill_tokens` 64, and 0 (no limit)
The first tokens are compared.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from engine import VOCAB_SIZE, make_model
from machine import emit, emit_machine

from quire import LLM, SamplingParams

FIRST = SamplingParams(max_tokens=1, temperature=0.0)
NUM_DECODES, SETTLED_STEPS = 4, 16
SECRET = b"of the two processes"


def engine(quick: bool, layers: int | None, **options: Any) -> LLM:
    memory = "64MiB" if quick else "1GiB"
    return LLM(
        (make_model(quick=quick, dtype="bfloat16", num_layers=layers), None),
        kv_memory=memory,
        host_cache=memory,
        dtype="bfloat16",
        num_threads=1,
        **options,
    )


def serve_peer(connection: Connection, quick: bool, layers: int | None, address: str) -> None:
    """The other process: computes each prompt that it receives, and answers when its host memory has it."""
    secret = None if address.startswith("unix:") else SECRET
    options = {"cache_write": "through", "peer_listen": address, "peer_secret": secret}
    with engine(quick, layers, **options) as llm:
        assert llm.tiers is not None
        assert llm.tiers.peer_server is not None
        connection.send(str(llm.tiers.peer_server.address))
        while (prompt := connection.recv()) is not None:
            llm.generate([prompt], FIRST)
            llm.tiers.stack.flush()
            connection.send(True)


class Peer:
    """The other process. address: at which it listens. options: of an engine that asks it."""

    def __init__(self, address: str, quick: bool, layers: int | None) -> None:
        self._connection, theirs = multiprocessing.get_context("spawn").Pipe()
        arguments = (theirs, quick, layers, address)
        self._process = multiprocessing.get_context("spawn").Process(
            target=serve_peer, args=arguments, daemon=True
        )
        self._process.start()
        self.options = {"peers": self._connection.recv()}
        if not address.startswith("unix:"):
            self.options["peer_secret"] = SECRET

    def begin(self, prompt: list[int]) -> None:
        self._connection.send(prompt)

    def is_ready(self) -> bool:
        return self._connection.poll()

    def wait(self) -> None:
        assert self._connection.recv()

    def close(self) -> None:
        self._connection.send(None)
        self._process.join()


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, num_tokens).tolist()


def time_first(llm: LLM, prompt: list[int]) -> tuple[float, int, int]:
    """(seconds, tokens found, first token)."""
    began = time.perf_counter()
    [output] = llm.generate([prompt], FIRST)
    return time.perf_counter() - began, output.num_cached_tokens, output.outputs[0].token_ids[0]


def first_tokens(llm: LLM, cold: LLM, peer: Peer, num_tokens: int, turns: int) -> None:
    seconds: dict[str, list[float]] = {"cold_s": [], "peer_s": [], "memory_s": []}
    for turn in range(turns + 1):  # the first one takes memory from the system
        prompt = prompt_of(turn, num_tokens)
        peer.begin(prompt)
        peer.wait()
        timed = time_first(cold, prompt), time_first(llm, prompt), time_first(llm, prompt)
        assert len({token for _, _, token in timed}) == 1
        assert timed[0][1] == 0
        assert min(found for _, found, _ in timed[1:]) >= num_tokens - 16
        if turn:
            for name, (taken, _, _) in zip(seconds, timed, strict=True):
                seconds[name].append(taken)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    emit("peer fetch", tokens=num_tokens, **medians, peer_of_cold=medians["peer_s"] / medians["cold_s"])


def gaps(llm: LLM, peer: Peer | None, num_tokens: int, seed: int) -> dict[str, float]:
    """Gaps of running answers until the prompt's first token; peer: computes it first."""
    running, prompt = llm.engine, prompt_of(seed, num_tokens)
    for number in range(NUM_DECODES):
        answer = SamplingParams(max_tokens=4096, temperature=0.0, ignore_eos=True)
        running.submit(np.asarray(prompt_of(1000 * seed + number, 32)), answer)
    for _ in range(SETTLED_STEPS):
        running.step()
    arrived, waited = time.perf_counter(), []
    request = None
    if peer is None:
        request = running.submit(np.asarray(prompt), FIRST)
    else:
        peer.begin(prompt)
    while request is None or request in running.scheduler.requests:
        if request is None and peer is not None and peer.is_ready():
            peer.wait()
            request = running.submit(np.asarray(prompt), FIRST)
        began = time.perf_counter()
        running.step()
        waited.append(time.perf_counter() - began)
    first_s = time.perf_counter() - arrived
    for name in list(running.scheduler.requests):
        running.abort(name)
    while running.has_work:
        running.step()
    return {
        "steps": len(waited),
        "gap_p50_ms": 1e3 * float(np.median(waited)),
        "gap_p99_ms": 1e3 * float(np.percentile(waited, 99)),
        "first_token_s": first_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small model and a short prompt")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tcp", action="store_true", help="signed values by TCP, as in a cluster")
    arguments = parser.parse_args()
    if arguments.tcp and arguments.quick:
        parser.error(
            "expected --tcp without --quick: the small model computes faster than signed values come"
        )
    emit_machine()
    quick, layers = arguments.quick, arguments.layers
    num_tokens = 256 if quick else arguments.tokens
    turns = 1 if quick else arguments.turns
    with tempfile.TemporaryDirectory() as folder:
        address = "127.0.0.1:0" if arguments.tcp else f"unix:{Path(folder) / 'peer'}"
        peer = Peer(address, quick, layers)
        with (
            engine(quick, layers, prefix_caching=True) as cold,
            engine(quick, layers, **peer.options) as llm,
        ):
            first_tokens(llm, cold, peer, num_tokens, turns)
        for limit in (64, 0):
            with engine(quick, layers, **peer.options, long_prefill_tokens=limit) as llm:
                for case in ("beside", "apart"):
                    rows = [
                        gaps(
                            llm,
                            peer if case == "apart" else None,
                            num_tokens,
                            seed=100 * (limit + 1) + turn + 10 * (case == "apart"),
                        )
                        for turn in range(turns)
                    ]
                    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
                    emit(
                        "decodes and a prefill",
                        case=case,
                        long_prefill_tokens=limit,
                        tokens=num_tokens,
                        **medians,
                    )
        peer.close()


if __name__ == "__main__":
    main()
