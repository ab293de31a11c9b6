"""Tokens per second of the whole engine, against transformers' own generate on the same weights. JSON lines.

    python benchmarks/engine.py [--quick] [--dtype bfloat16] [--repetitions 3] [--backend native]
    python benchmarks/engine.py --without-model

Random weights in the shape of Qwen3-0.6B with a vocabulary of 32 000 (473 M parameters), made here. Greedy, fixed
length, the end token ignored. Cases: decode at batch 1, 8 and 32 (128-token prompts, 64 new tokens), 8 sequences of
2 048 tokens (32 new), prefill of one prompt of 2 048. Decode counts the tokens after every request has its first one.
The baseline is `model.generate` with its DynamicCache at batch 8, in the same dtype or, on a processor without 16-bit
products, where that takes minutes a step, in float32 (`--baseline-dtype` chooses). Engine and baseline take turns;
medians are printed.
Without a model: what the engine's own Python takes of a decode step of 256 sequences, the cache's part included, over a
runner that computes nothing (`--without-model` prints this row alone, and needs nothing of another version of Quire but
`Engine`, `Cache` and the spec).
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch
from machine import emit, emit_machine
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, StoppingCriteriaList

from quire import LLM, Cache, KVSpec, SamplingParams
from quire.backends import extension
from quire.engine.engine import Engine
from quire.engine.engine_parts import EngineParts, StepLimits
from quire.scheduler.request_validator import ServedModel
from quire.spec import LayerSpec, Span

VOCAB_SIZE = 32_000
CASES = {  # name: (batch, prompt tokens, new tokens)
    "decode, batch 1": (1, 128, 64),
    "decode, batch 8": (8, 128, 64),
    "decode, batch 32": (32, 128, 64),
    "decode, 8 x 2048 context": (8, 2048, 32),
    "prefill 2048": (1, 2048, 1),
}


def make_model(*, quick: bool, dtype: str, num_layers: int | None = None) -> PreTrainedModel:
    """A model with random weights; the Qwen3-0.6B shape, or a small one of the same kind. num_layers: of it."""
    torch.manual_seed(0)
    shape: dict[str, Any] = (
        {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "head_dim": 32}
        if quick
        else {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "head_dim": 128}
    )
    shape |= {} if num_layers is None else {"num_hidden_layers": num_layers}
    heads: dict[str, Any] = (
        {"num_attention_heads": 4, "num_key_value_heads": 2}
        if quick
        else {"num_attention_heads": 16, "num_key_value_heads": 8}
    )
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE, tie_word_embeddings=True, max_position_embeddings=40_960, **shape, **heads
    )
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()


def prompts_of(batch: int, length: int, seed: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, (batch, length)).tolist()


def passed(seconds: float | None) -> float:
    """Of a timing that the request came to."""
    assert seconds is not None
    return seconds


def run_case(llm: LLM, batch: int, length: int, new: int, seed: int) -> float:
    """Tokens per second: of the prompt where one token is asked for, else of the decode steps."""
    params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    results = llm.generate(prompts_of(batch, length, seed), params)
    first = max(passed(result.timings.time_to_first_token_s) for result in results)
    if new == 1:
        return batch * length / first
    return batch * (new - 1) / (max(passed(result.timings.total_s) for result in results) - first)


def run_baseline(model: Any, batch: int, length: int, new: int, seed: int) -> float:
    """Decode tokens per second of `model.generate`, counted from the first token as for the engine."""
    ids = torch.tensor(prompts_of(batch, length, seed))
    times: list[float] = []

    def note_time(input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        times.append(time.perf_counter())
        return torch.zeros(batch, dtype=torch.bool)

    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([note_time]),
    )
    return batch * (new - 1) / (times[-1] - times[0])


class _NoModel:
    """A runner whose logits are the same for every row: token 1 is drawn."""

    def __init__(self, num_rows: int) -> None:
        self._logits = torch.zeros(num_rows, 8)
        self._logits[:, 1] = 1.0

    def run(self, step: Any, /) -> torch.Tensor:
        return self._logits[: len(step.logit_rows)]


def step_us(backend: str | None, num_sequences: int = 256, num_steps: int = 400) -> float:
    """Median microseconds of a decode step of so many sequences without a model."""
    spec = KVSpec((LayerSpec(Span(), 1, 8, 8),))
    cache = Cache(spec, num_blocks=num_sequences * (num_steps // 16 + 4), backend=backend)
    engine = Engine(
        EngineParts(_NoModel(num_sequences), cache, native=extension(backend)),
        ServedModel(8, num_steps + 64),
        limits=StepLimits(max_num_seqs=num_sequences),
    )
    params = SamplingParams(max_tokens=num_steps + 10, temperature=0.0, ignore_eos=True)
    prompts = np.random.default_rng(0).integers(0, 8, (num_sequences, 16)).tolist()
    for prompt in prompts:
        engine.submit(prompt, params)
    while len(engine.scheduler.running) < num_sequences or engine.scheduler.waiting:
        engine.step()
    engine.step()
    times: list[int] = []
    for _ in range(num_steps - 50):
        began = time.perf_counter_ns()
        engine.step()
        times.append(time.perf_counter_ns() - began)
    assert len(engine.scheduler.running) == num_sequences, "expected every sequence to run to the end"
    return statistics.median(times) / 1000


def emit_step(backend: str | None, repetitions: int) -> None:
    step_us(backend, num_steps=100)
    times = [step_us(backend) for _ in range(repetitions)]
    emit(
        "engine",
        case="decode step of 256 sequences without a model",
        step_us=round(statistics.median(times), 1),
        all=[round(one, 1) for one in times],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small model and short answers")
    parser.add_argument("--without-model", action="store_true", help="the step of 256 sequences alone")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--repetitions", type=int, default=None)
    parser.add_argument("--backend", default=None, choices=["native", "python"])
    parser.add_argument("--baseline-tokens", type=int, default=16, help="new tokens of the baseline's runs")
    parser.add_argument("--baseline-dtype", default=None, choices=["bfloat16", "float16", "float32"])
    arguments = parser.parse_args()
    baseline_dtype = arguments.baseline_dtype or (
        arguments.dtype if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"
    )
    repetitions = arguments.repetitions or (1 if arguments.quick else 3)
    emit_machine()
    emit_step(arguments.backend, repetitions)
    if arguments.without_model:
        return
    model = make_model(quick=arguments.quick, dtype=arguments.dtype)
    rates: dict[str, list[float]] = {}
    for repetition in range(repetitions):
        rates.setdefault(f"generate {baseline_dtype}", []).append(
            run_baseline(
                model.to(getattr(torch, baseline_dtype)), 8, 128, arguments.baseline_tokens, repetition
            )
        )
        model.to(getattr(torch, arguments.dtype))
        with LLM((model, None), kv_memory="4GiB", prefix_caching=False, backend=arguments.backend) as llm:
            run_case(llm, 1, 128, 4, seed=repetition)
            for name, (batch, length, new) in CASES.items():
                rates.setdefault(name, []).append(
                    run_case(llm, batch, length, 8 if arguments.quick and new > 1 else new, repetition)
                )
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name in CASES:
        emit(
            "engine",
            case=name,
            dtype=arguments.dtype,
            tokens_per_s=round(medians[name], 1),
            all=[round(rate, 1) for rate in rates[name]],
        )
    for name in rates:
        if name.startswith("generate"):
            emit(
                "engine",
                case="decode, batch 8, ratio to transformers " + name,
                baseline_tokens_per_s=round(medians[name], 2),
                ratio=round(medians["decode, batch 8"] / medians[name], 2),
            )


if __name__ == "__main__":
    main()
