"""What prefix caching buys and costs, end to end. JSON lines.

    python benchmarks/prefix.py [--quick] [--dtype bfloat16] [--repetitions 3]

On random weights in the shape of Qwen3-0.6B (see engine.py):
  1. time to first token and throughput of a 1 024-token prompt of which 0, 25, 50, 75, 100 % are cached;
  2. caching on against off on prompts where nothing ever hits: what the feature costs who does not need it;
  3. block sizes 1, 16, 128, 512: the same work end to end.
The two sides of a comparison take turns; medians and the median of the pairwise ratios are printed.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
from engine import VOCAB_SIZE, make_model
from machine import emit, emit_machine
from transformers import PreTrainedModel

from quire import LLM, SamplingParams


def tokens(rng: np.random.Generator, length: int) -> list[int]:
    return rng.integers(0, VOCAB_SIZE, length).tolist()


def timed(llm: LLM, prompts: list[list[int]], new: int) -> float:
    start = time.perf_counter()
    llm.generate(prompts, SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True))
    return time.perf_counter() - start


def by_share(model: PreTrainedModel, length: int, repetitions: int) -> None:
    rng = np.random.default_rng(0)
    times: dict[int, list[float]] = {}
    rates: dict[int, list[float]] = {}
    with LLM((model, None), kv_memory="2GiB") as llm:
        llm.generate([tokens(rng, 32)], SamplingParams(max_tokens=2, temperature=0.0))
        for _ in range(repetitions):
            for percent in (0, 25, 50, 75, 100):
                shared = tokens(rng, length)
                llm.generate([shared], SamplingParams(max_tokens=1, temperature=0.0))
                cut = length * percent // 100
                prompt = shared[:cut] + tokens(rng, length - cut)
                result = llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0))[0]
                times.setdefault(percent, []).append(result.timings.time_to_first_token_s)
                batch = [shared[:cut] + tokens(rng, length - cut) for _ in range(4)]
                rates.setdefault(percent, []).append(4 * 16 / timed(llm, batch, 16))
    for percent, values in times.items():
        emit(
            "prefix",
            case="share of the prompt cached",
            percent=percent,
            prompt_tokens=length,
            time_to_first_token_ms=round(statistics.median(values) * 1e3, 2),
            ratio_to_cold=round(statistics.median(values) / statistics.median(times[0]), 4),
            generated_tokens_per_s=round(statistics.median(rates[percent]), 2),
        )


def cost_without_hits(model: PreTrainedModel, length: int, repetitions: int) -> None:
    """On against off, in turn, on the same prompts that nobody has seen before."""
    rng = np.random.default_rng(1)
    ratios, on_times = [], []
    on = LLM((model, None), kv_memory="512MiB", prefix_caching=True)
    for repetition in range(repetitions):
        prompts = [tokens(rng, length) for _ in range(8)]
        seconds = {}
        for caching in (True, False) if repetition % 2 else (False, True):
            on.close()
            on = LLM((model, None), kv_memory="512MiB", prefix_caching=caching)
            timed(on, [tokens(rng, 32)], 2)
            seconds[caching] = timed(on, prompts, 16)
        ratios.append(seconds[True] / seconds[False])
        on_times.append(seconds[True])
    on.close()
    emit(
        "prefix",
        case="prefix caching on against off, nothing ever hits",
        seconds_on=round(statistics.median(on_times), 3),
        ratio=round(statistics.median(ratios), 4),
        all_ratios=[round(ratio, 4) for ratio in ratios],
    )


def by_block_size(model: PreTrainedModel, length: int, repetitions: int) -> None:
    rng = np.random.default_rng(2)
    seconds: dict[int, list[float]] = {}
    for _ in range(repetitions):
        prompts = [tokens(rng, length) for _ in range(8)]
        for block_size in (1, 16, 128, 512):
            with LLM((model, None), kv_memory="2GiB", block_size=block_size) as llm:
                timed(llm, [tokens(rng, 32)], 2)
                seconds.setdefault(block_size, []).append(timed(llm, prompts, 32))
    for block_size, values in seconds.items():
        emit(
            "prefix",
            case="block size, end to end",
            block_size=block_size,
            seconds=round(statistics.median(values), 3),
            ratio_to_16=round(statistics.median(a / b for a, b in zip(values, seconds[16], strict=True)), 4),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small model and short prompts")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--repetitions", type=int, default=None)
    arguments = parser.parse_args()
    repetitions = arguments.repetitions or (1 if arguments.quick else 3)
    emit_machine()
    model = make_model(quick=arguments.quick, dtype=arguments.dtype)
    by_share(model, 256 if arguments.quick else 1024, repetitions)
    cost_without_hits(model, 128 if arguments.quick else 512, 1 if arguments.quick else 2 * repetitions + 1)
    by_block_size(model, 128 if arguments.quick else 512, repetitions)


if __name__ == "__main__":
    main()
