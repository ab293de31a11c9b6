"""The time of log probabilities of a prompt, against that of the prompt alone. JSON lines.

    python benchmarks/scores.py [--quick] [--tokens 2048] [--dtype bfloat16] [--repetitions 5]

Random weights in the shape of Qwen3-0.6B with a vocabulary of 32 000 (see engine.py). One prompt at a time, each round
another one; the cases take turns and the medians are printed: of the time and of the processor's time, which other
programs on the machine change less. `of_cold`: as a part of a cold score's. `computed`: prompt tokens that the engine
computed.
    prefill      the prompt, nothing else (max_tokens 0)
    cold         its scores, of all tokens
    cold top 5   and the five likeliest tokens
    behind hit   90 % of the prompt was computed before, and the scores begin behind it (start)
    kept         90 % of the prompt was scored before: the scores of all tokens
    kept whole   all of the prompt was scored before
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from engine import make_model, prompts_of
from machine import emit, emit_machine

from quire import LLM, SamplingParams

Measured = tuple[float, float, int]  # seconds, processor's seconds, computed tokens
PREFILL = SamplingParams(max_tokens=0)
SCORES = SamplingParams(max_tokens=0, prompt_logprobs=0)
TOP = SamplingParams(max_tokens=0, prompt_logprobs=5)


def from_position(start: int) -> SamplingParams:
    return SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=start)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small model and short prompts: under 30 s")
    parser.add_argument("--tokens", type=int, default=None)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--repetitions", type=int, default=None)
    arguments = parser.parse_args()
    emit_machine()
    num_tokens = arguments.tokens or (256 if arguments.quick else 2048)
    repetitions = arguments.repetitions or (2 if arguments.quick else 5)
    hit = num_tokens * 9 // 10
    model = make_model(quick=arguments.quick, dtype=arguments.dtype)
    with LLM((model, None), kv_memory="1GiB", max_model_len=num_tokens + 64) as llm:

        def run(prompt: list[int], params: SamplingParams) -> Measured:
            started, processor = time.perf_counter(), time.process_time()
            (output,) = llm.generate(prompt, params)
            computed = len(prompt) - output.num_cached_tokens
            return time.perf_counter() - started, time.process_time() - processor, computed

        def behind(
            before: SamplingParams, length: int, params: SamplingParams
        ) -> Callable[[list[int]], Measured]:
            def case(prompt: list[int]) -> Measured:
                llm.generate(prompt[:length], before)
                return run(prompt, params)

            return case

        cases: dict[str, Callable[[list[int]], Measured]] = {
            "prefill": lambda prompt: run(prompt, PREFILL),
            "cold": lambda prompt: run(prompt, SCORES),
            "cold top 5": lambda prompt: run(prompt, TOP),
            "behind hit": behind(PREFILL, hit, from_position(hit)),
            "kept": behind(SCORES, hit, SCORES),
            "kept whole": behind(SCORES, num_tokens, SCORES),
        }
        for case in cases.values():  # the first call of each finds no kernel warm
            case(prompts_of(1, num_tokens, 0)[0])
        found: dict[str, list[Measured]] = {name: [] for name in cases}
        seed = 1
        for _ in range(repetitions):
            for name, case in cases.items():
                found[name].append(case(prompts_of(1, num_tokens, seed)[0]))
                seed += 1
    medians = {
        name: [statistics.median(row[column] for row in rows) for column in (0, 1)]
        for name, rows in found.items()
    }
    for name, rows in found.items():
        (seconds, processor), cold = medians[name], medians["cold"]
        emit(
            benchmark="scores",
            case=name,
            tokens=num_tokens,
            computed=rows[-1][2],
            milliseconds=round(1000 * seconds, 1),
            of_cold=round(seconds / cold[0], 3),
            processor_milliseconds=round(1000 * processor, 1),
            processor_of_cold=round(processor / cold[1], 3),
            tokens_per_second=round(num_tokens / seconds),
        )


if __name__ == "__main__":
    main()
