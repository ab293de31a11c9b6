"""Gaps between tokens of running answers while a long prompt arrives, against throughput, by chunk size. JSON lines.

    python benchmarks/long_prompts.py [--quick] [--tokens 32768] [--limits 0,1024,512,256,128,64]
        [--layers 4] [--cpu-time]

Random weights in the shape of Qwen3-0.6B, of `--layers` layers, with a vocabulary of 32 000 (see engine.py), bfloat16.
Eight requests decode; after 32 steps a prompt of `--tokens` tokens arrives. The work is the same for each value of
`long_prefill_tokens`, 0 (no limit) first: the answers are long enough to outlast the prompt at the smallest value.
Printed for each value: gaps between two steps (median and 99th percentile) in the quiet steps before the prompt and in
those that compute it, their ratio, the time to the prompt's first token, and tokens/s of the whole run, prompts and
answers. `--cpu-time`: one thread, and seconds of this process's CPU in place of the clock's, for a busy machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
from engine import VOCAB_SIZE, make_model
from machine import emit, emit_machine

from quire import LLM, SamplingParams

NUM_DECODES, QUIET_STEPS = 8, 32


def run(llm: LLM, num_tokens: int, new: int, clock: Callable[[], float]) -> dict[str, float]:
    """The figures of one run."""
    draw, engine = np.random.default_rng(1), llm.engine
    params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    began = clock()
    for _ in range(NUM_DECODES):
        engine.submit(draw.integers(0, VOCAB_SIZE, 32), params)
    for _ in range(4):  # the first steps compute the prompts
        engine.step()

    def gap() -> float:
        before = clock()
        engine.step()
        return clock() - before

    quiet = [gap() for _ in range(QUIET_STEPS)]
    arrived = clock()
    long = engine.submit(
        draw.integers(0, VOCAB_SIZE, num_tokens), SamplingParams(max_tokens=1, temperature=0.0)
    )
    gaps: list[float] = []
    while long in engine.scheduler.requests:
        gaps.append(gap())
    first_s = clock() - arrived
    while engine.has_work:
        engine.step()
    total_s = clock() - began
    quiet_p99, p99 = np.percentile(quiet, 99), np.percentile(gaps, 99)
    return {
        "steps": len(gaps),
        "quiet_p50_ms": 1e3 * float(np.median(quiet)),
        "quiet_p99_ms": 1e3 * float(quiet_p99),
        "gap_p50_ms": 1e3 * float(np.median(gaps)),
        "gap_p99_ms": 1e3 * float(p99),
        "gap_p99_to_quiet_p50": float(p99 / np.median(quiet)),
        "first_token_s": first_s,
        "tokens_per_s": (num_tokens + NUM_DECODES * (32 + new)) / total_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small model and a short prompt")
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--limits", default="0,1024,512,256,128,64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--cpu-time", action="store_true", help="one thread, timed by its CPU time")
    arguments = parser.parse_args()
    emit_machine()
    limits = [0, 128] if arguments.quick else [int(limit) for limit in arguments.limits.split(",")]
    num_tokens = 1024 if arguments.quick else arguments.tokens
    model = make_model(quick=arguments.quick, dtype="bfloat16", num_layers=arguments.layers)
    new = QUIET_STEPS + 16 + -(-num_tokens // min(limit for limit in limits if limit))
    for limit in limits:
        with LLM(
            (model, None),
            kv_memory="2GiB" if not arguments.quick else "64MiB",
            dtype="bfloat16",
            prefix_caching=False,
            long_prefill_tokens=limit,
            num_threads=1 if arguments.cpu_time else None,
        ) as llm:
            clock = time.process_time if arguments.cpu_time else time.perf_counter
            figures = run(llm, num_tokens, new, clock)
        emit("long prompt", long_prefill_tokens=limit, prompt=num_tokens, **figures)


if __name__ == "__main__":
    main()
