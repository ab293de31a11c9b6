"""The cost of the live page for a server with a pool of 100 000 blocks: share of a core, updates a second. JSON lines.

    python benchmarks/window.py [--quick] [--blocks 100000] [--seconds 20]

One process: the server on the embedded model, its pool filled with prefixes of several tenants (nothing computed:
only watching is measured), and a watcher that reads the events as they come and throws them away.
  1. idle: processor time of the whole process with one administrator watching, less that without watchers;
  2. busy: the same while requests run, from the feed's own clock (processor time of collecting, painting, writing), and
     the tokens a second with and without a watcher, taking turns;
  3. several watchers: the same as 1 with 16 of them.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import uvicorn
from machine import emit, emit_machine

from quire import LLM, AsyncEngine, SamplingParams
from quire.server.api_keys import ANYBODY, ApiTenant
from quire.server.app import create_app
from quire.server.run import bind
from quire.server.settings import ServerSettings


@contextmanager
def serving(llm: LLM) -> Iterator[tuple[str, AsyncEngine, Any, asyncio.AbstractEventLoop]]:
    listener = bind("127.0.0.1", 0)
    engine = AsyncEngine(llm)
    app = create_app(engine, ServerSettings(tenants=(ANYBODY, *TENANTS)))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off"))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(
        target=lambda: loop.run_until_complete(server.serve(sockets=[listener])), daemon=True
    )
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", engine, app, loop
    finally:
        app.state.service.draining = True  # ends the events
        time.sleep(0.6)
        server.should_exit = True
        thread.join(15)
        engine.close()
        listener.close()


TENANTS = [ApiTenant(f"tenant-{number}") for number in range(8)]


class Watcher:
    """Reads events until told to stop; how many, and their bytes."""

    def __init__(self, url: str) -> None:
        self.response = urllib.request.urlopen(url + "/window/events", timeout=30)
        self.num_events = self.num_bytes = 0
        self.cpu_s = 0.0
        self.stopped = False
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()

    def read(self) -> None:
        while not self.stopped:
            line = self.response.readline()
            self.num_events += line.startswith(b"data: ")
            self.num_bytes += len(line)
            self.cpu_s = time.thread_time()  # ours, and not the server's
            if not line:
                return

    def stop(self) -> None:
        self.stopped = True
        self.thread.join(15)
        self.response.close()


def fill(llm: LLM, share: float) -> None:
    """Prefixes of 8 tenants, each behind one of 32 beginnings, until `share` of the blocks are cached."""
    rng, cache = np.random.default_rng(0), llm.cache
    for each in TENANTS:
        llm.tenants.add(each.name)
    heads = [[rng.integers(0, 500, 128).astype(np.int32) for _ in range(32)] for _ in range(8)]
    while cache.stats()["free"] > (1 - share) * cache.num_blocks:
        tenant = int(rng.integers(0, 8))
        tail = rng.integers(0, 500, int(rng.integers(64, 512))).astype(np.int32)
        tokens = np.concatenate([heads[tenant][int(rng.integers(0, 32))], tail])
        sequence = cache.open(tokens, namespace=llm.engine.tenants.namespace(TENANTS[tenant].name))
        if cache.reserve([sequence], [len(tokens) - sequence.num_computed_tokens]) is None:
            cache.close(sequence)
            break
        cache.commit(sequence, len(tokens))
        cache.close(sequence)


def cpu_of(seconds: float, watchers: list[Watcher]) -> float:
    """Processor seconds a second of this process, less those of the watchers themselves."""
    own = sum(one.cpu_s for one in watchers)
    began, began_cpu = time.perf_counter(), time.process_time()
    time.sleep(seconds)
    used = time.process_time() - began_cpu - (sum(one.cpu_s for one in watchers) - own)
    return used / (time.perf_counter() - began)


def idle(url: str, app: Any, seconds: float, num_watchers: int) -> None:
    nobody = cpu_of(seconds / 2, [])
    watchers = [Watcher(url) for _ in range(num_watchers)]
    time.sleep(1.5)
    feed = app.state.live_page_feed
    number, cpu_s, slow_s = feed.number, feed.cpu_s, feed.slow_cpu_s
    num_bytes = watchers[0].num_bytes
    share = cpu_of(seconds, watchers)
    updates = feed.number - number
    emit(
        "window",
        case="idle engine",
        blocks=app.state.service.engine.llm.cache.num_blocks,
        watchers=num_watchers,
        updates_per_s=round(updates / seconds, 2),
        core_share=round(share - nobody, 5),
        core_share_at_2_updates_per_s=round((share - nobody) * 2 * seconds / updates, 5),
        ms_per_update=round(1e3 * (feed.cpu_s - cpu_s) / updates, 3),
        slow_ms_per_s=round(1e3 * (feed.slow_cpu_s - slow_s) / seconds, 3),
        bytes_per_s=round((watchers[0].num_bytes - num_bytes) / seconds),
    )
    for one in watchers:
        one.stop()


def busy(url: str, engine: AsyncEngine, app: Any, loop: Any, seconds: float, num_requests: int) -> None:
    stop = threading.Event()

    async def request(number: int) -> None:
        rng = np.random.default_rng(number)
        while not stop.is_set():
            prompt = rng.integers(0, 500, 200).tolist()
            params = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
            async for _ in engine.generate(prompt, params, deltas=True):
                if stop.is_set():
                    return

    running = [asyncio.run_coroutine_threadsafe(request(i), loop) for i in range(num_requests)]
    time.sleep(2)

    def rate() -> float:
        before = engine.llm.engine.stats()["num_generated_tokens"]
        time.sleep(seconds / 6)
        return (engine.llm.engine.stats()["num_generated_tokens"] - before) / (seconds / 6)

    alone, watched, shares, updates = [], [], [], []
    for _ in range(6):
        alone.append(rate())
        watcher = Watcher(url)
        time.sleep(0.5)
        feed = app.state.live_page_feed
        cpu_s, number, began = feed.cpu_s + feed.slow_cpu_s, feed.number, time.perf_counter()
        watched.append(rate())
        spent = time.perf_counter() - began
        shares.append((feed.cpu_s + feed.slow_cpu_s - cpu_s) / spent)
        updates.append((feed.number - number) / spent)
        watcher.stop()
        time.sleep(0.3)
    stop.set()
    for one in running:
        one.result(30)
    emit(
        "window",
        case="busy engine",
        blocks=engine.llm.cache.num_blocks,
        running=num_requests,
        updates_per_s=round(statistics.median(updates), 2),
        core_share=round(statistics.median(shares), 5),
        core_share_at_2_updates_per_s=round(
            statistics.median(share * 2 / number for share, number in zip(shares, updates, strict=True)), 5
        ),
        tokens_per_s_alone=round(statistics.median(alone), 1),
        tokens_per_s_watched=round(statistics.median(watched), 1),
        ratio=round(statistics.median(b / a for a, b in zip(alone, watched, strict=True)), 4),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    blocks, seconds = (2_000, 3.0) if arguments.quick else (arguments.blocks, arguments.seconds)
    emit_machine()
    block_bytes = 48 << 10  # of the embedded model, 16 tokens
    with LLM(kv_memory=blocks * block_bytes) as llm:
        fill(llm, 0.9)
        with serving(llm) as (url, engine, app, loop):
            idle(url, app, seconds, 1)
            idle(url, app, seconds, 16)
            busy(url, engine, app, loop, seconds, 8 if arguments.quick else 32)


if __name__ == "__main__":
    main()
