"""The memory that `quire.plan` predicts against the memory that an engine takes: committed bytes and smaps. JSON lines.

    python benchmarks/plan.py [--quick] [--kind KIND ...] [--model DIR]

Each kind is a random model of 100 to 250 M parameters in bfloat16, saved to a temporary folder, and has its own
process: plan, start with the planned options and the `kv_memory` that the plan needs, requests that fill it, then the
resident memory less that after the imports (the plan's process is the engine's). `total_over_measured` counts the
imports on both sides. An embedding that lies in its file counts as read whole.
--model: your own folder or GGUF file in place of the kinds, with its tokenizer. --weights: as of `quire serve`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from typing import Any

from machine import emit, emit_machine

_COMMON: dict[str, Any] = {"vocab_size": 32000, "max_position_embeddings": 8192, "num_attention_heads": 16,
                           "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 10,
                           "num_key_value_heads": 4}  # fmt: skip
_MOE = {"moe_intermediate_size": 384, "num_experts_per_tok": 4}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense, tied": ("qwen3", {"head_dim": 128, "num_key_value_heads": 8, "tie_word_embeddings": True}),
    "dense, untied": ("llama", {"tie_word_embeddings": False}),
    "windows": ("gemma3_text", {"hidden_size": 640, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
                                "num_hidden_layers": 18, "sliding_window": 512}),
    "experts": ("qwen3_moe", {**_MOE, "head_dim": 64, "num_experts": 16, "num_hidden_layers": 6}),
    "latents": ("deepseek_v3", {**_MOE, "num_key_value_heads": 16, "q_lora_rank": 384, "kv_lora_rank": 256,
                                "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64,
                                "n_routed_experts": 16,
                                "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
                                "num_hidden_layers": 6}),
    "Mamba hybrid": ("bamba", {"mamba_n_heads": 32, "mamba_d_head": 64, "mamba_d_state": 64,
                               "attn_layer_indices": [3, 7]}),
    "delta-net hybrid": ("qwen3_next", {**_MOE, "num_experts": 8, "shared_expert_intermediate_size": 256,
                                        "head_dim": 128,
                                        "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 8,
                                        "linear_num_key_heads": 8, "linear_num_value_heads": 16,
                                        "linear_key_head_dim": 64, "linear_value_head_dim": 64}),
    "states alone": ("mamba2", {"num_heads": 32, "head_dim": 64, "state_size": 64, "n_groups": 1,
                                "num_hidden_layers": 16}),
}  # fmt: skip

_MAKE = """
import sys, json, torch
from transformers import AutoConfig, AutoModelForCausalLM
model_type, fields, folder = json.loads(sys.argv[1])
config = AutoConfig.for_model(model_type, eos_token_id=None, pad_token_id=0, bos_token_id=1, **fields)
torch.manual_seed(0)
AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
"""

_MEASURE = """
import gc, json, sys
import numpy as np
from quire import LLM, SamplingParams, plan

folder, context, concurrency, step, weights = json.loads(sys.argv[1])
def taken():
    # Not proportional: the share of the libraries in other processes changes meanwhile.
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/smaps_rollup") if line.startswith("Rss:"))

asked = dict(context=context, concurrency=concurrency, max_batch_tokens=step, max_num_seqs=concurrency, weights=weights)
said = plan(folder, **asked)
said = plan(folder, **asked, kv_memory=said.needed_bytes)
gc.collect()
before = taken()
options = dict(packed_weights="off", max_model_len=context, max_batch_tokens=step, max_num_seqs=concurrency,
               kv_memory=said.needed_bytes, weights=weights)
with LLM(folder, **options) as llm:
    draw = np.random.default_rng(0)
    prompts = [draw.integers(3, llm.vocab_size, context - 4).tolist() for _ in range(concurrency)]
    llm.generate(prompts, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    embedding = llm._opened.prepared._model.get_input_embeddings().weight
    held = getattr(embedding, "lazy_weight", None)
    dense = embedding if held is None else held.dense
    if dense is not None:
        float(dense.detach().view(-1)[:: 1024].float().sum())
    measured, committed = taken() - before, llm.kv_committed_bytes
    start_says = llm.max_num_full_sequences
parts = {part: said.num_bytes(part) for part in ("weights", "tokenizer", "kv", "states", "scratch")}
print(json.dumps(dict(fits=said.fits, max_concurrency=said.max_concurrency, start_says=start_says, **parts,
                      committed=committed, planned=sum(parts.values()), measured=measured,
                      runtime=said.num_bytes("runtime"))))
"""


def run(program: str, *arguments: Any) -> str:
    """The last line that a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(arguments)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return (done.stdout.splitlines() or [""])[-1]


def measure(kind: str, folder: str, context: int, concurrency: int, step: int, weights: str | None) -> None:
    found = json.loads(run(_MEASURE, folder, context, concurrency, step, weights))
    mib = {
        f"{name}_mib": round(found[name] / 2**20, 1)
        for name in (
            "weights",
            "tokenizer",
            "kv",
            "states",
            "scratch",
            "committed",
            "planned",
            "measured",
            "runtime",
        )
    }
    emit(
        "plan",
        kind=kind,
        context=context,
        concurrency=concurrency,
        step_tokens=step,
        same_verdict=found["fits"] and found["max_concurrency"] == min(found["start_says"], concurrency),
        **mib,
        planned_over_measured=round(found["planned"] / found["measured"], 3),
        total_over_measured=round(
            (found["planned"] + found["runtime"]) / (found["measured"] + found["runtime"]), 3
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one model and few tokens")
    parser.add_argument("--kind", action="append", choices=KINDS, help="of the models; all")
    parser.add_argument("--model", help="a folder or GGUF file in place of the models")
    parser.add_argument("--weights", help="form of the weights, as int4")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--step-tokens", type=int, default=512)
    given = parser.parse_args()
    emit_machine()
    shape = (given.context, given.concurrency, given.step_tokens)
    if given.quick:
        shape = (512, 2, 512)
    if given.model:
        measure(given.model, given.model, *shape, given.weights)
        return
    for kind in given.kind or (["dense, tied"] if given.quick else KINDS):
        model_type, fields = KINDS[kind]
        with tempfile.TemporaryDirectory(prefix="quire-") as folder:
            run(_MAKE, model_type, {**_COMMON, **fields}, folder)
            measure(kind, folder, *shape, given.weights)


if __name__ == "__main__":
    main()
