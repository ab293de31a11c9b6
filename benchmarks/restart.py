"""Time to the first token of a long prompt: cold, warm in memory, and warm after a restart from disk. JSON lines.

    python benchmarks/restart.py [--quick] [--tokens 2048] [--repetitions 3] [--dtype bfloat16] [--folder DIR]

Random weights in the shape of Qwen3-0.6B (`benchmarks/engine.py`); --quick takes a small model and 512 tokens.
  cold     nothing known
  memory   the same prompt again: only its last token is computed; median of three, the first while its KV is stored
  restart  a new engine over the same folder: the prefix is loaded, its last token computed; asked once the engine has
           memory for it from the system (`memory_ahead_s` after its first answer), and at once
compared with a decode step after the same prompt, and the disk tier's own speed: all segments of the prompt through
the stack, checked and discarded. The file system's cache is warm. The first tokens of all three are compared.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import numpy as np
from engine import make_model, prompts_of
from machine import emit, emit_machine

from quire import LLM, SamplingParams
from quire.cache.block_hash import root_key
from quire.tiers.segment_key import segment_keys


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small model, 512 tokens, one repetition")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--folder", help="where the disk cache is made; a temporary folder if not given")
    arguments = parser.parse_args()
    emit_machine()
    model = make_model(quick=arguments.quick, dtype=arguments.dtype)
    length = 512 if arguments.quick else arguments.tokens
    repetitions = 1 if arguments.quick else arguments.repetitions
    rows: list[dict[str, float]] = []
    for turn in range(repetitions):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            rows.append(one_turn(model, prompts_of(1, length, seed=turn)[0], folder))
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    step, read = medians["decode_step_s"], medians["read_s"]
    emit(
        "restart",
        case="restart",
        tokens=length,
        **medians,
        memory_in_decode_steps=medians["memory_s"] / step,
        restart_less_reading_in_decode_steps=(medians["restart_s"] - read) / step,
        cold_over_memory=medians["cold_s"] / medians["memory_s"],
        cold_over_restart=medians["cold_s"] / medians["restart_s"],
    )


def one_turn(model: Any, prompt: list[int], folder: str) -> dict[str, float]:
    options: dict[str, Any] = {
        "max_num_seqs": 2,
        "max_model_len": len(prompt) + 64,
        "disk_cache": folder,
        "disk_cache_size": "4GiB",
    }
    with LLM((model, None), **options) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))  # warm up
        cold, first = first_token(llm, prompt)
        again = [first_token(llm, prompt) for _ in range(3)]
        memory, second = statistics.median(seconds for seconds, _ in again), again[-1][1]
        step = decode_step(llm, prompt)
        num_bytes = len(prompt) * llm.spec.bytes_per_token
    at_once, third, _, _ = restarted(model, options, prompt, at_once=True)
    restart, fourth, ahead, read = restarted(model, options, prompt, at_once=False)
    assert first == second == third == fourth, "the first token differs"
    return {
        "cold_s": cold,
        "memory_s": memory,
        "restart_s": restart,
        "restart_at_once_s": at_once,
        "memory_ahead_s": ahead,
        "decode_step_s": step,
        "read_s": read,
        "bytes": num_bytes,
        "read_bytes_per_s": num_bytes / read,
    }


def restarted(
    model: Any, options: dict[str, Any], prompt: list[int], *, at_once: bool
) -> tuple[float, int, float, float]:
    """Seconds to the first token of a new engine, the token, seconds waited before, seconds of reading alone."""
    with LLM((model, None), **options) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
        assert llm.tiers is not None
        began = time.perf_counter()
        if not at_once:
            llm.tiers.ahead.wait()
        waited = time.perf_counter() - began
        seconds, token = first_token(llm, prompt)
        found = llm.stats()["num_loaded_tokens"]
        assert found == len(prompt) - 1, f"{found} of {len(prompt)} tokens came from the disk"
        return seconds, token, waited, reading(llm, prompt)


def first_token(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    began = time.perf_counter()
    [output] = llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
    return time.perf_counter() - began, output.outputs[0].token_ids[0]


def decode_step(llm: LLM, prompt: list[int]) -> float:
    """Median of the steps behind the prompt."""
    llm.engine.submit(prompt, SamplingParams(max_tokens=16, temperature=0, ignore_eos=True))
    took = []
    while llm.engine.has_work:
        began = time.perf_counter()
        llm.engine.step()
        took.append(time.perf_counter() - began)
    return statistics.median(took[2:])


def reading(llm: LLM, prompt: list[int]) -> float:
    """Seconds for all segments of the prompt, checked, and thrown away."""
    assert llm.tiers is not None
    loads, stack = llm.tiers.loads, llm.tiers.stack
    size = loads._segment_tokens
    root, tokens = root_key(loads._fingerprint, b""), np.array(prompt)
    whole = len(tokens) // size * size
    keys = segment_keys(root, tokens[:whole], size)
    if len(tokens) - whole >= llm.block_size:  # what ends within a segment is kept block by block
        blocks = tokens[whole : len(tokens) // llm.block_size * llm.block_size]
        parent = keys[-1].hash if keys else None
        keys += segment_keys(root, blocks, llm.block_size, start=whole, parent=parent)
    took = []
    for _ in range(3):
        began = time.perf_counter()
        load = stack.load(keys, into=lambda _, payload: None)
        load.wait(60)
        took.append(time.perf_counter() - began)
        assert load.outcome == "complete", load.outcome
    return statistics.median(took)


if __name__ == "__main__":
    main()
