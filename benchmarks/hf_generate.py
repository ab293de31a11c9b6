"""`generate()` on the caches of transformers and on QuireCache: time of a decode step, memory, forking. JSON lines.

    python benchmarks/hf_generate.py [--quick] [--context 1024 --context 8192 --context 32768] [--turns 4] [--steps 10]

Random weights in the shape of Qwen3-0.6B with a vocabulary of 32 000 (see engine.py), bfloat16, one sequence. A cache
is filled with random keys and values of `context` tokens (a prompt that long would take minutes and is the same for
all), then `model.generate` goes on from there, greedily. `step_ms` is the median time between two of its tokens, the
first two left out; `times` that of DynamicCache over it. `peak_mib` is the rise of the process's peak
memory (VmHWM) over its memory when the cache was filled: a second copy of a layer's keys shows there.

Ways: dynamic, static (sized for the run), and QuireCache on `virtual` and `growing` memory as they are, and in codes
(`virtual:int8`), then virtual, in codes and growing on the accelerated model, and dynamic on it too. They take turns,
each turn with its own cache, so that a disturbance of the machine affects all; the medians are over all
turns. `turns_ms`: each turn's median. `cache_mib`: the memory of the context.

`fork`: time of QuireCache.fork() of a filled cache with pieces of 2 MiB, of the first step after it, and the memory
that the step took.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from engine import make_model
from machine import emit, emit_machine
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.generation.streamers import BaseStreamer

from quire.hf import QuireCache, accelerate
from quire.model.cache_keyword import cache_keyword

WAYS = (
    "dynamic",
    "static",
    "virtual",
    "growing",
    "virtual:int8",
    "virtual+accelerate",
    "virtual:int8+accelerate",
    "growing+accelerate",
    "dynamic+accelerate",
)
SKIPPED_TOKENS = 2
FILLED_AT_ONCE = 4096
SLOW_STEPS = 6  # and one turn, where a step takes seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="1 024 tokens, one turn, about half a minute")
    parser.add_argument("--context", action="append", type=int, help="tokens before the first step")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="of each turn")
    arguments = parser.parse_args()
    if arguments.steps < SKIPPED_TOKENS + 2:
        parser.error(
            f"expected at least {SKIPPED_TOKENS + 2} --steps: the first {SKIPPED_TOKENS} tokens are not timed"
        )
    contexts = arguments.context or ([1024] if arguments.quick else [1024, 8192, 32768])
    emit_machine()
    plain, accelerated = (make_model(quick=False, dtype="bfloat16") for _ in range(2))
    accelerate(accelerated)
    emit("hf_generate", case="setup", torch_threads=torch.get_num_threads(), dtype="bfloat16")
    for context in contexts:
        turns, steps = (
            (1 if arguments.quick else arguments.turns, arguments.steps)
            if context < 16_384
            else (1, SLOW_STEPS)
        )
        found: dict[str, list[Turn]] = {way: [] for way in WAYS}
        for _ in range(turns):
            for way, taken in found.items():
                kind, _, on = way.partition("+")
                taken.append(take_turn(accelerated if on else plain, kind, context, steps))
        dynamic = statistics.median(gap for turn in found["dynamic"] for gap in turn.gaps)
        for way, taken in found.items():
            gaps = [gap for turn in taken for gap in turn.gaps]
            median = statistics.median(gaps)
            figures = {
                "step_ms": round(median * 1e3, 2),
                "fastest_ms": round(min(gaps) * 1e3, 2),
                "turns_ms": [round(statistics.median(turn.gaps) * 1e3, 1) for turn in taken],
                "times": round(dynamic / median, 2),
                "cache_mib": round(taken[0].cache_bytes / 2**20),
                "peak_mib": round(max(turn.peak for turn in taken) / 2**20, 1),
            }
            emit("hf_generate", case="decode", context=context, way=way, **figures)
        emit("hf_generate", case="fork", context=context, **measure_fork(plain, context))


class Turn(NamedTuple):
    """gaps: seconds between tokens. peak: bytes the process rose by. cache_bytes: those of the context."""

    gaps: list[float]
    peak: int
    cache_bytes: int


def take_turn(model: PreTrainedModel, kind: str, context: int, steps: int) -> Turn:
    """Decode steps behind `context` tokens in a new cache."""
    cache = make_cache(model, kind, context + 64)
    fill(model, cache, context)
    cache_bytes = cache.used_bytes if isinstance(cache, QuireCache) else context * kv_bytes(model)
    ids = torch.randint(3, 32_000, (1, context + 1), generator=torch.Generator().manual_seed(1))
    gc.collect()
    before = resident(reset=True)
    clock = Clock()
    cast(Any, model).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **{str(cache_keyword(model.forward)): cache},
        max_new_tokens=steps,
        min_new_tokens=steps,
        do_sample=False,
        streamer=clock,
        pad_token_id=0,
    )
    peak = resident() - before
    times = clock.times[SKIPPED_TOKENS:]
    return Turn([b - a for a, b in itertools.pairwise(times)], peak, cache_bytes)


def measure_fork(model: PreTrainedModel, context: int) -> dict[str, Any]:
    """Forking a filled virtual cache, and the first token after it."""
    cache = QuireCache(model.config, kv_memory="12GiB", piece_size="2MiB", max_length=context + 64)
    fill(model, cache, context)
    times: list[float] = []
    forks = []
    used = cache.used_bytes
    for _ in range(5):
        start = time.perf_counter()
        forks.append(cache.fork())
        times.append(time.perf_counter() - start)
    taken = cache.used_bytes - used
    new = torch.zeros(1, model.config.num_key_value_heads, 1, model.config.head_dim, dtype=torch.bfloat16)
    start = time.perf_counter()
    for layer in range(model.config.num_hidden_layers):
        forks[0].update(new, new, layer)
    first_step = time.perf_counter() - start
    return {
        "fork_ms": round(statistics.median(times) * 1e3, 2),
        "fork_worst_ms": round(max(times) * 1e3, 2),
        "first_step_ms": round(first_step * 1e3, 2),
        "fork_mib": round(taken / 2**20, 1),
        "first_step_mib": round((cache.used_bytes - used - taken) / 2**20, 1),
        "cache_mib": round(used / 2**20, 1),
    }


def make_cache(model: PreTrainedModel, kind: str, longest: int) -> Any:
    if kind == "dynamic":
        return DynamicCache(config=model.config)
    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=longest)
    storage, _, kv_dtype = kind.partition(":")
    options: dict[str, Any] = {"storage": storage, "kv_dtype": kv_dtype or "auto"}
    return QuireCache(model.config, kv_memory="12GiB", max_length=longest, **options)


def fill(model: PreTrainedModel, cache: Any, context: int) -> None:
    """Random keys and values of `context` tokens in every layer."""
    config = model.config
    generator = torch.Generator().manual_seed(0)
    for start in range(0, context, FILLED_AT_ONCE):
        length = min(FILLED_AT_ONCE, context - start)
        shape = (1, config.num_key_value_heads, length, config.head_dim)
        k, v = (torch.randn(shape, generator=generator).to(torch.bfloat16) for _ in range(2))
        for layer in range(config.num_hidden_layers):
            cache.update(k, v, layer)


def kv_bytes(model: PreTrainedModel) -> int:
    """Bytes of a token's keys and values in all layers."""
    config = model.config
    return 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


def resident(*, reset: bool = False) -> int:
    """The peak memory of the process, in bytes, since the last reset (Linux)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("expected VmHWM in /proc/self/status; this figure needs Linux")


class Clock(BaseStreamer):
    """Notes when tokens come."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


if __name__ == "__main__":
    main()
