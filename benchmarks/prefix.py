"""The gain and the cost of prefix caching, end to end: three tables, in Markdown, below the machine's line.

    python benchmarks/prefix.py [--quick] [--dtype bfloat16] [--repetitions 3]

On random weights in the shape of Qwen3-0.6B (see engine.py), greedy:
  1. Hit rate: 1 024-token prompts, 0, 25, 50, 75, 100 % cached. Time to first token of one request alone;
     tokens/s (prompts and outputs together) of 4 requests with 16 output tokens each.
  2. Nothing hits: caching on against off, on new prompts.
  3. Block sizes 1 to 512: the same requests end to end.
Both sides of a comparison take turns; medians are printed. The last prompt token is always computed, at 100 % too.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
from engine import VOCAB_SIZE, make_model, passed
from machine import emit_machine
from transformers import PreTrainedModel

from quire import LLM, SamplingParams

BATCH, NEW_TOKENS = 4, 16  # of the first table
PERCENTS = (0, 25, 50, 75, 100)
BLOCK_SIZES = (1, 4, 16, 64, 256, 512)
BASE_SIZE = 16  # the block size that the others are compared with


def tokens(rng: np.random.Generator, length: int) -> list[int]:
    return rng.integers(0, VOCAB_SIZE, length).tolist()


def timed(llm: LLM, prompts: list[list[int]], new: int) -> float:
    """Seconds until all have ended."""
    start = time.perf_counter()
    llm.generate(prompts, SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True))
    return time.perf_counter() - start


def print_table(title: str, head: list[str], rows: list[list[str]]) -> None:
    print(f"\n{title}\n")
    for cells in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join(cells) + " |", flush=True)


def by_hit_rate(model: PreTrainedModel, length: int, repetitions: int) -> None:
    rng = np.random.default_rng(0)
    first: dict[int, list[float]] = {percent: [] for percent in PERCENTS}
    rates: dict[int, list[float]] = {percent: [] for percent in PERCENTS}
    with LLM((model, None), kv_memory="2GiB") as llm:
        timed(llm, [tokens(rng, 32)], 2)
        for _ in range(repetitions):
            for percent in PERCENTS:
                cached = tokens(rng, length)
                timed(llm, [cached], 1)
                kept = cached[: length * percent // 100]
                prompts = [kept + tokens(rng, length - len(kept)) for _ in range(1 + BATCH)]
                one = llm.generate([prompts[0]], SamplingParams(max_tokens=1, temperature=0.0))[0]
                first[percent].append(passed(one.timings.time_to_first_token_s))
                rates[percent].append(BATCH * (length + NEW_TOKENS) / timed(llm, prompts[1:], NEW_TOKENS))
    seconds = {percent: statistics.median(values) for percent, values in first.items()}
    rate = {percent: statistics.median(values) for percent, values in rates.items()}
    print_table(
        f"Hit rate, prompts of {length} tokens, {repetitions} runs",
        ["hit rate", "time to first token, ms", "of cold", "tokens/s", "times cold"],
        [
            [
                f"{p} %",
                f"{1e3 * seconds[p]:.1f}",
                f"{seconds[p] / seconds[0]:.3f}",
                f"{rate[p]:.0f}",
                f"{rate[p] / rate[0]:.2f}",
            ]
            for p in PERCENTS
        ],
    )


def cost_without_hits(model: PreTrainedModel, length: int, repetitions: int) -> None:
    rng = np.random.default_rng(1)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for repetition in range(repetitions):
        prompts = [tokens(rng, length) for _ in range(8)]
        for caching in (True, False) if repetition % 2 else (False, True):
            with LLM((model, None), kv_memory="512MiB", prefix_caching=caching) as llm:
                timed(llm, [tokens(rng, 32)], 2)
                seconds[caching].append(timed(llm, prompts, NEW_TOKENS))
    ratios = [on / off for on, off in zip(seconds[True], seconds[False], strict=True)]
    print_table(
        f"Nothing hits, 8 prompts of {length} tokens, {repetitions} pairs",
        ["caching off, s", "caching on, s", "on / off, median", "least", "most"],
        [
            [f"{statistics.median(seconds[False]):.3f}", f"{statistics.median(seconds[True]):.3f}"]
            + [f"{value:.4f}" for value in (statistics.median(ratios), min(ratios), max(ratios))]
        ],
    )


def by_block_size(model: PreTrainedModel, length: int, repetitions: int) -> None:
    rng = np.random.default_rng(2)
    seconds: dict[int, list[float]] = {size: [] for size in BLOCK_SIZES}
    for _ in range(repetitions):
        prompts = [tokens(rng, length) for _ in range(8)]
        for size in BLOCK_SIZES:
            with LLM((model, None), kv_memory="2GiB", block_size=size) as llm:
                timed(llm, [tokens(rng, 32)], 2)
                seconds[size].append(timed(llm, prompts, 32))

    def relative(size: int) -> float:
        return statistics.median(a / b for a, b in zip(seconds[size], seconds[BASE_SIZE], strict=True))

    print_table(
        f"Block sizes, 8 prompts of {length} tokens and 32 new ones, {repetitions} runs",
        ["block size", "seconds", f"of block size {BASE_SIZE}"],
        [
            [str(size), f"{statistics.median(values):.3f}", f"{relative(size):.3f}"]
            for size, values in seconds.items()
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small model and short prompts: seconds")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--repetitions", type=int, default=None)
    arguments = parser.parse_args()
    repetitions = arguments.repetitions or (1 if arguments.quick else 3)
    emit_machine()
    model = make_model(quick=arguments.quick, dtype=arguments.dtype)
    by_hit_rate(model, 256 if arguments.quick else 1024, repetitions)
    cost_without_hits(model, 128 if arguments.quick else 512, 1 if arguments.quick else 2 * repetitions + 1)
    by_block_size(model, 128 if arguments.quick else 512, repetitions)


if __name__ == "__main__":
    main()
