"""One model of each kind beside transformers' own generate on the same weights. JSON lines, then tables in Markdown.

    python benchmarks/architectures.py [--quick] [--kinds dense latent ...] [--repetitions 3]

Kinds: dense, a window in five of six layers, a mixture of experts with 1 of 8 active, Mamba in nine of ten layers, a
gated delta net in three of four, a latent in place of K and V. Each has 300 to 600 million random parameters in
bfloat16, in the shape of a model that people run, with a vocabulary of 32 000. Made here from a config, never stored.

Speed: tokens/s of decode at batch 1 and 8 (behind prompts of 128 tokens) and of one prompt of 1 024 (`--prefill`),
greedy, fixed length. transformers and Quire take turns, each on a copy of its own; a ratio is taken within a round, and
medians are told. On a processor without 16-bit products transformers runs in float32, as it is minutes faster there.

Second turn: a conversation of 2 000 tokens and an answer of 16 goes on with 64 more. `hit`: time to the first token of
that; `cold`: the same length, seen by nobody; `alone`: as many tokens as the hit had to compute, with nothing before
them. `hit_to_alone` is what the 2 000 tokens cost that are found and attended to.

Bytes of a sequence of 2 048 tokens: its keys, values or latents, and its states, as the allocator reckons.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from engine import VOCAB_SIZE, passed, prompts_of, run_baseline, run_case
from machine import emit, emit_machine
from prefix import print_table
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from quire import LLM, SamplingParams
from quire.spec import KVSpec

PAUSE_SECONDS = 0.2  # whoever ran before may have left threads that spin for a while
GOAL, HIT_GOAL = 3.0, 1.05
MEASURED_LENGTH = 2048  # of the sequence whose bytes are told

_DELTA = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
# name: (model type, fields, what is other in --quick, where the kinds are the same and the sizes those of toys).
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense": (
        "qwen3",
        {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "head_dim": 128},
        {"num_hidden_layers": 2},
    ),
    "windowed hybrid": (
        "gemma3_text",
        {
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 18,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
        },
        {"num_hidden_layers": 6, "num_attention_heads": 2, "sliding_window": 32},
    ),
    "mixture of experts": (
        "qwen3_moe",
        {
            "hidden_size": 1024,
            "moe_intermediate_size": 1024,
            "num_hidden_layers": 14,
            "head_dim": 128,
            "num_experts": 8,
            "num_experts_per_tok": 1,
            "norm_topk_prob": False,
        },
        {"num_hidden_layers": 2, "moe_intermediate_size": 128},
    ),
    "Mamba hybrid": (
        "granitemoehybrid",
        {
            "hidden_size": 1024,
            "intermediate_size": 2560,
            "shared_intermediate_size": 2560,
            "num_hidden_layers": 30,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "mamba_n_heads": 32,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "layer_types": (["linear_attention"] * 5 + ["full_attention"] + ["linear_attention"] * 4) * 3,
        },
        {
            "num_hidden_layers": 2,
            "shared_intermediate_size": 256,
            "mamba_n_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "delta-net hybrid": (
        "qwen3_5_text",
        {
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            **_DELTA,
        },
        {
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
        },
    ),
    "latent": (
        "youtu",
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 24,
            "num_key_value_heads": 16,
            "q_lora_rank": 768,
            **_LATENT,
        },
        {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 64},
    ),
}
_ALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_QUICK = {"hidden_size": 128, "intermediate_size": 256}

Cases = dict[str, tuple[int, int, int]]  # name: (batch, prompt tokens, new tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="toys, one round, for CI")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--repetitions", type=int, default=None)
    parser.add_argument(
        "--prefill", type=int, default=None, help="tokens of the prompt whose prefill is timed"
    )
    parser.add_argument(
        "--baseline-tokens", type=int, default=16, help="new tokens of transformers' decode runs"
    )
    arguments = parser.parse_args()
    repetitions = arguments.repetitions or (1 if arguments.quick else 3)
    length = arguments.prefill or (64 if arguments.quick else 1024)
    prompt, new = (16, 4) if arguments.quick else (128, 32)
    cases = {
        "decode, batch 1": (1, prompt, new),
        "decode, batch 8": (8, prompt, new),
        "prefill": (1, length, 1),
    }
    emit_machine()
    speeds, turns = [], []
    for kind in arguments.kinds:
        baseline, model = (make_model(kind, quick=arguments.quick) for _ in range(2))
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            baseline.float()
        spec = KVSpec.from_config(model.config, dtype="bfloat16")
        with LLM((model, None), kv_memory="256MiB" if arguments.quick else "2GiB", max_num_seqs=16) as llm:
            run_case(llm, 1, prompt, 2, seed=10**6)
            run_generate(baseline, 1, prompt, 2, seed=10**6)
            about = {"kind": kind, "type": model.config.model_type}
            about["million_parameters"] = round(baseline.num_parameters() / 1e6)
            speeds.append(measure_speed(about, llm, baseline, cases, arguments.baseline_tokens, repetitions))
            turns.append(measure_turns(about, llm, spec, 128 if arguments.quick else 2000, repetitions))
        del llm, baseline, model  # before the next kind's weights come
        gc.collect()
    print_table(
        "Tokens/s, Quire and transformers, and the median of their ratios "
        f"(asked: {GOAL:g}, and never below 1); rounds: {repetitions}",
        ["kind", "type", "million parameters", *cases],
        speeds,
    )
    print_table(
        f"Second turn, time to the first token (asked of hit / alone: {HIT_GOAL:g}); MiB of a sequence of "
        f"{MEASURED_LENGTH} tokens",
        ["kind", "cold, ms", "hit, ms", "alone, ms", "hit / alone", "K and V, or latents", "states"],
        turns,
    )


def make_model(kind: str, *, quick: bool) -> PreTrainedModel:
    """A random bfloat16 model of the kind, the same each time."""
    model_type, fields, small = KINDS[kind]
    fields = {**_ALL, **fields, **(_QUICK | small if quick else {})}
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **fields)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def measure_speed(
    about: dict[str, Any], llm: LLM, baseline: Any, cases: Cases, baseline_tokens: int, repetitions: int
) -> list[str]:
    """Emits each case, and answers the kind's row of the table."""
    row = [str(value) for value in about.values()]
    for index, (name, (batch, length, new)) in enumerate(cases.items()):
        ours = partial(run_case, llm, batch, length, new)
        theirs = partial(run_generate, baseline, batch, length, min(new, baseline_tokens))
        rates = run_here({"ours": ours, "theirs": theirs}, 100 * index, repetitions)
        ratios = [a / b for a, b in zip(rates["ours"], rates["theirs"], strict=True)]
        own, other = (statistics.median(rates[who]) for who in ("ours", "theirs"))
        ratio = statistics.median(ratios)
        emit(
            "architectures",
            **about,
            case=name,
            tokens_per_s=round(own, 1),
            generate_tokens_per_s=round(other, 1),
            generate_dtype=str(baseline.dtype).removeprefix("torch."),
            ratio=round(ratio, 2),
            least_ratio=round(min(ratios), 2),
            all=[round(rate, 1) for rate in rates["ours"]],
            all_generate=[round(rate, 1) for rate in rates["theirs"]],
        )
        row.append(f"{own:.1f}, {other:.1f}: {ratio:.1f} x")
    return row


def run_here(cases: dict[str, Callable[[int], float]], seed: int, repetitions: int) -> dict[str, list[float]]:
    """What each case returns in each round; who is first alternates. A seed is a prompt that nobody has seen."""
    found: dict[str, list[float]] = {name: [] for name in cases}
    for repetition in range(repetitions):
        for name in list(cases)[:: 1 if repetition % 2 else -1]:
            time.sleep(PAUSE_SECONDS)
            found[name].append(cases[name](seed + repetition))
    return found


def run_generate(model: Any, batch: int, length: int, new: int, seed: int) -> float:
    """Tokens a second of `model.generate`: of the prompt where one token is asked for, else of the decode steps."""
    if new > 1:
        return run_baseline(model, batch, length, new, seed)
    ids = torch.tensor(prompts_of(batch, length, seed))
    start = time.perf_counter()
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False, pad_token_id=0
    )
    return batch * length / (time.perf_counter() - start)


def measure_turns(about: dict[str, Any], llm: LLM, spec: KVSpec, length: int, repetitions: int) -> list[str]:
    """Emits the second turn and the bytes, and answers the kind's row of the table."""
    found: dict[str, list[float]] = {"cold": [], "hit": [], "alone": []}
    ratios: list[float] = []
    num_computed = 0
    for repetition in range(repetitions):
        first, added, other = (
            prompts_of(1, count, 1000 + 10 * repetition + part)[0]
            for part, count in enumerate((length, 64, 2 * length))
        )
        answer = llm.generate([first], greedy(16))[0].outputs[0].token_ids
        prompt = [*first, *answer, *added]
        time.sleep(PAUSE_SECONDS)
        hit = llm.generate([prompt], greedy(1))[0]
        num_computed = len(prompt) - hit.num_cached_tokens
        time.sleep(PAUSE_SECONDS)
        alone = llm.generate([other[-num_computed:]], greedy(1))[0]
        time.sleep(PAUSE_SECONDS)
        cold = llm.generate([other[: len(prompt)]], greedy(1))[0]
        for name, result in (("cold", cold), ("hit", hit), ("alone", alone)):
            found[name].append(passed(result.timings.time_to_first_token_s) * 1e3)
        ratios.append(found["hit"][-1] / found["alone"][-1])
    medians = {name: statistics.median(values) for name, values in found.items()}
    ratio = statistics.median(ratios)
    kv_mib, state_mib = spec.bytes_for(MEASURED_LENGTH) / 2**20, spec.bytes_per_state / 2**20
    emit(
        "architectures",
        **about,
        case="second turn",
        tokens=length,
        computed=num_computed,
        **{f"{name}_ms": round(value, 1) for name, value in medians.items()},
        hit_to_alone=round(ratio, 3),
        hit_to_cold=round(medians["hit"] / medians["cold"], 3),
        all_hit_ms=[round(value, 1) for value in found["hit"]],
    )
    emit(
        "architectures",
        **about,
        case="bytes of a sequence",
        tokens=MEASURED_LENGTH,
        kv_mib=round(kv_mib, 2),
        state_mib=round(state_mib, 2),
        kv_bytes_per_token=spec.bytes_per_token if spec.stores_kv else 0,
    )
    times = [f"{medians[name]:.1f}" for name in ("cold", "hit", "alone")]
    return [about["kind"], *times, f"{ratio:.2f}", f"{kv_mib:.1f}", f"{state_mib:.1f}"]


def greedy(new: int) -> SamplingParams:
    return SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)


if __name__ == "__main__":
    main()
