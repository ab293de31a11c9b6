"""The cost of running out of memory: requests swapped out, or computed again, against enough memory. JSON lines.

    python benchmarks/pressure.py [--quick] [--repetitions 3] [--dtype bfloat16] [--layers N] [--only CASE] [--seed N]

Random weights in the shape of Qwen3-0.6B (`benchmarks/engine.py`); --layers takes so many of its 28 layers, each as
large as before, so that a token's bytes and its arithmetic stay in proportion; --quick takes a small model of the kind.
--only and --seed measure in parts: one case, with other prompts.
  throughput  the same greedy requests with memory for all, and with a tenth of that: swapped out, computed again, auto;
              the tokens are compared. Prompts are short and answers long, so that many requests begin and few can end:
              each is preempted several times. The engines take turns, another one first in each turn; medians, and
              medians of the turns' ratios to enough memory and to the better of swapping and computing.
  prefill     n tokens that were generated, computed again in one prefill after their prompt, against the n steps
              that generated them
  partial     one block of 16 tokens, 8 of them needed: copied, against computed again
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
from engine import make_model, prompts_of
from machine import emit, emit_machine

from quire import LLM, SamplingParams
from quire.cache.block_counts import num_blocks_for


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small model, fewer repetitions")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--layers", type=int, help="of the model, each of its full size")
    parser.add_argument("--only", choices=["throughput", "prefill", "partial"])
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    emit_machine()
    model = make_model(quick=arguments.quick, dtype=arguments.dtype, num_layers=arguments.layers)
    repetitions = 1 if arguments.quick else arguments.repetitions
    if arguments.only in (None, "throughput"):
        throughput(model, 32, 16, 112, repetitions, arguments.seed)
    if arguments.only in (None, "prefill"):
        for n in (16, 64, 256) if arguments.quick else (16, 64):
            prefill(model, 128, n, repetitions)
    if arguments.only in (None, "partial"):
        partial(model, repetitions)


SIDES = {  # name: (preemption, share of the memory for all)
    "enough memory": ("auto", 1.0),
    "a tenth, swapped out": ("swap", 0.1),
    "a tenth, computed again": ("recompute", 0.1),
    "a tenth, auto": ("auto", 0.1),
}
COUNTS = ("num_preemptions", "num_swapped", "num_computed_tokens", "num_restored_tokens")


def throughput(model: Any, num_requests: int, length: int, new: int, repetitions: int, seed: int) -> None:
    params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    counts: dict[str, dict[str, int]] = {}
    for turn in range(repetitions):
        prompts = prompts_of(num_requests, length, seed=seed + turn)
        expected = None
        names = [*SIDES]
        first = (seed + turn) % len(names)
        for name in names[first:] + names[:first]:
            preemption, share = SIDES[name]
            options: dict[str, Any] = {
                "max_model_len": length + new,
                "max_num_seqs": num_requests,
                "max_batch_tokens": 256,
                "preemption": preemption,
                "kv_memory": "1GiB",
                **({} if preemption == "recompute" else {"swap_memory": "1GiB"}),
            }
            # One after another: a model runs from one cache at a time.
            with LLM((model, None), **options) as llm:
                num_blocks = num_blocks_for(llm.spec, length + new, llm.block_size)
                llm.resize(
                    max(num_blocks + 1, int(num_blocks * num_requests * share)) * llm.cache.block_bytes
                )
                llm.generate(prompts_of(2, 32, seed=99), params)  # warm up, and something measured for auto
                before = llm.stats()
                began = time.perf_counter()
                tokens = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
                seconds[name].append(time.perf_counter() - began)
                after = llm.stats()
                num_blocks = llm.num_blocks
            expected = expected or tokens
            assert tokens == expected, f"{name}: other tokens than before"
            counts[name] = {key: after[key] - before[key] for key in COUNTS} | {"num_blocks": num_blocks}
    better = [min(pair) for pair in zip(*(seconds[name] for name in list(SIDES)[1:3]), strict=True)]
    for name in SIDES:
        ratios = [enough / own for own, enough in zip(seconds[name], seconds["enough memory"], strict=True)]
        to_better = [one / own for own, one in zip(seconds[name], better, strict=True)]
        emit(
            "pressure",
            case="throughput",
            memory=name,
            requests=num_requests,
            prompt_tokens=length,
            new_tokens=new,
            tokens_per_second=num_requests * new / statistics.median(seconds[name]),
            share_of_enough=statistics.median(ratios),
            share_of_better=statistics.median(to_better),
            seconds=[round(one, 3) for one in seconds[name]],
            layers=model.config.num_hidden_layers,
            **counts[name],
        )


def prefill(model: Any, length: int, n: int, repetitions: int) -> None:
    llm = LLM(
        (model, None),
        max_num_seqs=1,
        max_model_len=length + n + 1,
        max_batch_tokens=length + n,
        prefix_caching=False,
    )
    stepwise, at_once = [], []
    for turn in range(repetitions + 1):
        [prompt] = prompts_of(1, length, seed=turn)
        first = _time(llm, prompt, 1)
        whole = _time(llm, prompt, n + 1)
        again = _time(llm, prompts_of(1, length + n, seed=turn)[0], 1)
        if turn:
            stepwise.append(whole - first)
            at_once.append(again - first)
    llm.close()
    steps, once = statistics.median(stepwise), statistics.median(at_once)
    emit(
        "pressure",
        case="prefill",
        prompt=length,
        n=n,
        steps_s=steps,
        at_once_s=once,
        ratio=steps / once,
    )


def partial(model: Any, repetitions: int) -> None:
    llm = LLM((model, None), max_num_seqs=1, max_model_len=256, prefix_caching=False)
    storage: Any = llm._opened.storage
    storage.fill(1.0) if llm.num_blocks < 4096 else None
    copies = []
    for index in range(20 * repetitions):
        began = time.perf_counter()
        storage.copy(np.array([[index % 7, 8 + index % 7, 8]], np.int32))
        copies.append(time.perf_counter() - began)
    computed = []
    for turn in range(repetitions + 1):
        [prompt] = prompts_of(1, 72, seed=turn)
        took = _time(llm, prompt, 1) - _time(llm, prompt[:64], 1)
        if turn:
            computed.append(took)
    llm.close()
    copy_s, compute_s = statistics.median(copies), statistics.median(computed)
    emit(
        "pressure",
        case="partial",
        tokens=8,
        copy_s=copy_s,
        compute_s=compute_s,
        ratio=compute_s / copy_s,
    )


def _time(llm: LLM, prompt: list[int], new: int) -> float:
    began = time.perf_counter()
    llm.generate([prompt], SamplingParams(max_tokens=new, temperature=0, ignore_eos=True))
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
