"""Requests of every kind over the embedded model's KV shape, without the model, and the checks after all have ended.

python tests/support/request_soak.py FOLDER [--requests N] [--seed N] [--twin N]

The scheduler, the cache, the storage on its heap, tenants, pins, swapping and the tiers are real; the model is a sum: a
step writes a number made of token and position into the storage and draws each token from a sum over all that it reads
back through the block tables. So a wrong slot, copy, hit, swapped out or loaded byte changes the tokens, and each
request's tokens are compared with those computed from its token list alone. --twin: number of requests that run twice
with tiers without threads: the digests of all scheduler decisions must be equal. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from support.soak_engine import MAX_TOKENS, SoakEngine, expected_tokens
from support.soak_load import SoakLoad


def run(
    folder: Path, num_requests: int, seed: int, *, threads: bool, remote: str | None = None
) -> dict[str, Any]:
    """One run to its end; figures, with the digest of all decisions. *raises:* AssertionError: something was lost."""
    engine = SoakEngine(folder, threads=threads, remote=remote)
    try:
        load = SoakLoad(engine, num_requests, seed)
        load.run()
        for tokens, num_prompt in load.answers:
            assert tokens[num_prompt:] == expected_tokens(tokens[:num_prompt], len(tokens) - num_prompt)
        figures = {**load.counts, **engine.figures(), "digest": engine.runner.digest.hexdigest()[:16]}
        load.let_go()
        figures |= engine.owner_id()
    finally:
        engine.close()
    return figures


def resources() -> dict[str, int]:
    """What a process has that can leak: descriptors, threads, mappings that are no library's."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "reserved_mib": sum(_size(line) for line in maps if len(line.split()) == 5) >> 20,
    }


def _size(line: str) -> int:
    start, stop = (int(part, 16) for part in line.split()[0].split("-"))
    return stop - start


def soak(folder: Path, num_requests: int, seed: int, num_twins: int) -> dict[str, Any]:
    began = time.perf_counter()
    twins = [_in_folder(folder, num_twins, seed) for _ in range(2)]
    assert twins[0]["digest"] == twins[1]["digest"], "two runs of one seed decided differently"
    before = resources()
    with _redis(folder) as remote:
        figures = run(folder / "threads", num_requests, seed, threads=True, remote=remote)
    after = resources()
    for name in ("descriptors", "threads"):
        assert after[name] == before[name], f"{name}: {before[name]} before, {after[name]} after"
    # The heap's reservation is as large as the machine's memory; allocators keep some pages.
    assert after["reserved_mib"] < before["reserved_mib"] + 1024
    return {
        "requests": num_requests,
        "seed": seed,
        **figures,
        "twin_requests": num_twins,
        "twin_digest": twins[0]["digest"],
        "seconds": round(time.perf_counter() - began, 1),
    }


def _in_folder(folder: Path, num_requests: int, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=folder) as inside:
        return run(Path(inside), num_requests, seed, threads=False)


@contextlib.contextmanager
def _redis(folder: Path) -> Iterator[str | None]:
    """A server of its own, where there is one to start."""
    import shutil

    if shutil.which("redis-server") is None:
        print("soak: no redis-server, so without the remote tier", file=sys.stderr)
        yield None
        return
    from support.redis_server import redis_server

    with redis_server(folder, "--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru") as url:
        yield url


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--twin", type=int, default=5_000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as inside:
        print(json.dumps(soak(Path(inside), asked.requests, asked.seed, asked.twin)))


__all__ = ["MAX_TOKENS", "resources", "run", "soak"]

if __name__ == "__main__":
    main()
