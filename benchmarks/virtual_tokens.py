"""Tokens a second of the storages, decoding side by side in one process. JSON lines.

    python benchmarks/virtual_tokens.py [--quick] [--rounds 5] [--sequences 4] [--context 1024]

One engine for each storage on the same random weights (8 layers in the shape of Qwen3-0.6B's, bfloat16, a vocabulary of
1000). A round lets each decode 48 steps behind prompts of `--context` tokens, in turns; rates are medians over the
rounds, ratios to `contiguous` are medians of each round's ratio. Steps in which virtual maps a unit are among them.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import numpy as np
import torch
from machine import emit, emit_machine
from transformers import Qwen3Config, Qwen3ForCausalLM

from quire import LLM, SamplingParams

STORAGES = ("contiguous", "virtual", "paged")
STEPS = 48


def random_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1000, hidden_size=1024, intermediate_size=3072, num_hidden_layers=8, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to(torch.bfloat16).eval()


def decode_rate(llm: LLM, prompts: list[list[int]]) -> float:
    """Tokens a second over STEPS steps in which every prompt has been computed already."""
    engine = llm.engine
    params = SamplingParams(max_tokens=STEPS + 16, temperature=0, ignore_eos=True)
    for prompt in prompts:
        engine.submit(prompt, params)
    while any(
        sample.num_tokens <= len(sample.request.prompt_token_ids) + 1
        for request in engine.scheduler.requests.values()
        for sample in request.samples
    ):
        engine.step()
    start = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    seconds = time.perf_counter() - start
    engine.abort_all()
    return len(prompts) * STEPS / seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round, short contexts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--context", type=int, default=1024)
    options = parser.parse_args()
    rounds, context = (1, 64) if options.quick else (options.rounds, options.context)
    emit_machine()
    model = random_model()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 1000, context).tolist() for _ in range(options.sequences)]
    llms = {
        name: LLM(
            (copy.deepcopy(model), None),
            storage=name,
            kv_memory="1GiB",
            max_model_len=context + 256,
            max_num_seqs=options.sequences,
        )
        for name in STORAGES
    }
    rates: dict[str, list[float]] = {name: [] for name in STORAGES}
    for llm in llms.values():  # memory is taken, caches are warm
        decode_rate(llm, prompts)
    for _ in range(rounds):
        for name, llm in llms.items():
            rates[name].append(decode_rate(llm, prompts))
    for name in STORAGES:
        ratios = [rate / base for rate, base in zip(rates[name], rates["contiguous"], strict=True)]
        emit(
            benchmark="virtual_tokens", storage=name, sequences=options.sequences, context=context, rounds=rounds,
            tokens_per_second=round(statistics.median(rates[name]), 1),
            to_contiguous=round(statistics.median(ratios), 3), to_contiguous_least=round(min(ratios), 3),
        )  # fmt: skip
    for llm in llms.values():
        llm.close()


if __name__ == "__main__":
    main()
