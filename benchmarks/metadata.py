"""The cost of the cache's bookkeeping: no model, no tensors. JSON lines.

    python benchmarks/metadata.py [--quick] [--backend native|python|both] [--repetitions 200]

  step      `reserve` of one token for each of 256 decoding sequences, 16 of which need a block, ids as an int array
            its slots as an array; and `advance`, which commits these tokens and appends the next ones
  hit       `open` of a prompt of 8 192 tokens that is cached but for its last token: match and take
  insert    `commit` of 8 192 tokens that are new to the cache
  evict     `reserve` of 2 048 tokens out of a full pool that holds 10 000 or 100 000 cached prompts of 64 tokens; and
            with the `commit` after it, which finds the memory of the evicted nodes in the processor's cache
  pool      a pool of 1 048 576 blocks: time to make it, memory it takes empty and per block once all are cached

All through `quire.Cache`, at block size 16. Median and least of the repetitions, in microseconds; on a shared
machine the least says more. The Python back end is measured at smaller sizes, which its lines state.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from machine import emit, emit_machine

from quire import Cache, KVSpec
from quire.cache.cache import Sequence

Result = TypeVar("Result")

BLOCK_SIZE = 16
SPEC = KVSpec.uniform(num_layers=1, num_kv_heads=1, head_dim=8)


def make_cache(backend: str, num_blocks: int) -> Cache:
    return Cache(SPEC, num_blocks=num_blocks, block_size=BLOCK_SIZE, backend=backend)


def fresh_tokens(rng: np.random.Generator, num_tokens: int) -> np.ndarray:
    return rng.integers(0, 2**31 - 1, num_tokens, dtype=np.int32)


def compute(cache: Cache, tokens: np.ndarray) -> Sequence:
    """An open sequence whose tokens are all committed."""
    sequence = cache.open(tokens)
    if cache.reserve([sequence], [len(tokens) - sequence.num_computed_tokens]) is None:
        raise RuntimeError(f"no room for {len(tokens)} tokens: {cache.stats()}")
    cache.commit(sequence, len(tokens))
    return sequence


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Stopwatch:
    """Times of one call, in microseconds."""

    def __init__(self) -> None:
        self.times_us: list[float] = []

    def time(self, call: Callable[[], Result]) -> Result:
        start = time.perf_counter_ns()
        result = call()
        self.times_us.append((time.perf_counter_ns() - start) / 1e3)
        return result

    def figures(self) -> dict[str, float]:
        return {
            "median_us": round(statistics.median(self.times_us), 2),
            "least_us": round(min(self.times_us), 2),
            "repetitions": len(self.times_us),
        }


def step(backend: str, repetitions: int, num_sequences: int = 256) -> None:
    rng = np.random.default_rng(0)
    # Contexts end at every offset within a block alike, so that one in 16 needs a new block each step.
    contexts = [512 + index % BLOCK_SIZE for index in range(num_sequences)]
    cache = make_cache(
        backend, num_sequences * (sum(contexts) // num_sequences + repetitions + 32) // BLOCK_SIZE
    )
    sequences = [compute(cache, fresh_tokens(rng, context)) for context in contexts]
    ids = np.array([sequence.id for sequence in sequences], np.int64)
    ones = np.ones(num_sequences, np.int64)
    reserve, slots, advance = Stopwatch(), Stopwatch(), Stopwatch()
    sampled = np.zeros(num_sequences, np.int32)
    for sequence in sequences:
        sequence.append(sampled[:1])
    for _ in range(repetitions):
        plan = reserve.time(lambda: cache.reserve(ids, ones))
        assert plan is not None, "the pool has room for every step"
        slots.time(lambda plan=plan: plan.slot_mapping)
        advance.time(lambda plan=plan: cache.advance(ids, plan.context_lengths, sampled))
    for case, monitor in (("step", reserve), ("slots of the step", slots), ("end of the step", advance)):
        emit("metadata", case=case, backend=backend, num_sequences=num_sequences, **monitor.figures())


def hit_and_insert(backend: str, repetitions: int, num_tokens: int = 8192) -> None:
    rng = np.random.default_rng(1)
    cache = make_cache(backend, 4 * num_tokens // BLOCK_SIZE)
    prompt = fresh_tokens(rng, num_tokens)
    compute(cache, prompt)
    monitor = Stopwatch()
    for _ in range(repetitions):
        sequence = monitor.time(lambda: cache.open(prompt))
        if sequence.num_cached_tokens != num_tokens - 1:
            raise RuntimeError(f"expected a hit of {num_tokens - 1} tokens, got {sequence.num_cached_tokens}")
        cache.close(sequence)
    emit("metadata", case="hit", backend=backend, num_tokens=num_tokens, **monitor.figures())
    monitor = Stopwatch()
    for _ in range(repetitions):
        sequence = cache.open(fresh_tokens(rng, num_tokens))
        cache.reserve([sequence], [num_tokens])
        monitor.time(lambda sequence=sequence: cache.commit(sequence, num_tokens))
        cache.close(sequence)
    emit("metadata", case="insert", backend=backend, num_tokens=num_tokens, **monitor.figures())


def evict(backend: str, repetitions: int, numbers_of_prompts: list[int], num_tokens: int = 2048) -> None:
    rng = np.random.default_rng(2)
    prompt_tokens = 4 * BLOCK_SIZE
    caches = []
    for num_prompts in numbers_of_prompts:
        cache = make_cache(backend, num_prompts * prompt_tokens // BLOCK_SIZE)
        for _ in range(num_prompts):
            cache.close(compute(cache, fresh_tokens(rng, prompt_tokens)))
        caches.append((num_prompts, cache, Stopwatch(), Stopwatch()))
    # The two sizes take turns; they never evict more than was cached before the first turn.
    possible = min(numbers_of_prompts) * prompt_tokens // num_tokens
    for _ in range(min(repetitions, possible)):
        for _num_prompts, cache, monitor, inserting in caches:
            sequence = cache.open(fresh_tokens(rng, num_tokens))
            evicted = cache.stats()["evicted_blocks"]
            monitor.time(lambda cache=cache, sequence=sequence: cache.reserve([sequence], [num_tokens]))
            evicted = cache.stats()["evicted_blocks"] - evicted
            if evicted != num_tokens // BLOCK_SIZE:
                raise RuntimeError(f"expected {num_tokens // BLOCK_SIZE} evicted blocks, got {evicted}")
            inserting.time(lambda cache=cache, sequence=sequence: cache.commit(sequence, num_tokens))
            inserting.times_us[-1] += monitor.times_us[-1]
            cache.close(sequence)
    for num_prompts, _, evicting, inserting in caches:
        for case, monitor in (("evict", evicting), ("evict and insert", inserting)):
            emit(
                "metadata",
                case=case,
                backend=backend,
                num_tokens=num_tokens,
                num_cached_prompts=num_prompts,
                **monitor.figures(),
            )


def fill(cache: Cache, num_blocks: int) -> None:
    rng = np.random.default_rng(3)
    per_prompt = min(1024, num_blocks)
    for _ in range(num_blocks // per_prompt):
        cache.close(compute(cache, fresh_tokens(rng, per_prompt * BLOCK_SIZE)))


def pool(backend: str, num_blocks: int) -> None:
    fill(make_cache(backend, 1024), 1024)  # memory of imports and first calls does not belong to blocks
    before = resident_bytes()
    start = time.perf_counter()
    cache = make_cache(backend, num_blocks)
    elapsed_ms = (time.perf_counter() - start) * 1e3
    empty_bytes = resident_bytes() - before
    fill(cache, num_blocks)
    full_bytes = resident_bytes() - before
    emit(
        "metadata",
        case="pool",
        backend=backend,
        num_blocks=num_blocks,
        made_in_ms=round(elapsed_ms, 3),
        empty_bytes=empty_bytes,
        full_bytes=full_bytes,
        bytes_per_block=round(full_bytes / num_blocks, 1),
        bytes_per_block_without_tokens=round(full_bytes / num_blocks - 4 * BLOCK_SIZE, 1),
        num_cached_blocks=cache.num_cached_blocks,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer repetitions and prompts: a minute at most"
    )
    parser.add_argument("--backend", choices=["native", "python", "both"], default="both")
    parser.add_argument("--repetitions", type=int, default=200)
    arguments = parser.parse_args()
    repetitions = min(arguments.repetitions, 20) if arguments.quick else arguments.repetitions
    emit_machine()
    if arguments.backend in ("native", "both"):
        pool("native", 1 << (17 if arguments.quick else 20))
        step("native", repetitions)
        hit_and_insert("native", repetitions)
        evict("native", repetitions, [1_000, 10_000] if arguments.quick else [10_000, 100_000])
    if arguments.backend in ("python", "both"):
        fewer = max(1, repetitions // 10)
        pool("python", 1 << 14)
        step("python", fewer)
        hit_and_insert("python", fewer)
        evict("python", fewer, [200, 1_000])


if __name__ == "__main__":
    main()
