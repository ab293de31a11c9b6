"""A mixture of experts held as codes against the same in bfloat16, whole models in one run. JSON lines.

    python benchmarks/quantized_experts.py [--quick] [--repetitions 5] [--format int4 --format int8]

The model is the mixture of experts of benchmarks/architectures.py: 1 of 8 experts active in each of 14 layers, random
weights. Its checkpoint is written to a temporary folder. Decode behind prompts of 128 tokens at batch 1 and 8, and
prefill of one prompt of 1 024; formats take turns. `of_bf16`: the median of the ratios to bfloat16 within a round.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from functools import partial

from architectures import make_model, run_here
from engine import run_case
from machine import emit, emit_machine

from quire import LLM

FORMATS = ["int8", "int4"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a toy and one round, for CI")
    parser.add_argument("--repetitions", type=int, default=None)
    parser.add_argument("--format", action="append", help=f"of {', '.join(FORMATS)} and others of `weights=`")
    arguments = parser.parse_args()
    repetitions = arguments.repetitions or (1 if arguments.quick else 5)
    prompt, new, length = (16, 4, 64) if arguments.quick else (128, 32, 1024)
    emit_machine()
    formats: list[str | None] = [None, *(arguments.format or FORMATS)]
    with tempfile.TemporaryDirectory() as folder:
        make_model("mixture of experts", quick=arguments.quick).save_pretrained(folder)
        opened = {
            str(weights or "bf16"): LLM(
                folder,
                weights=weights,
                kv_memory="64MiB" if arguments.quick else "512MiB",
                max_num_seqs=8,
                packed_weights="off",
            )
            for weights in formats
        }
    for name, llm in opened.items():
        run_case(llm, 1, prompt, 2, seed=10**6)
        emit("quantized_experts", case="setup", format=name, weight_bytes=llm.stats()["weight_bytes"])
    cases = {
        "decode, batch 1": (1, prompt, new),
        "decode, batch 8": (8, prompt, new),
        "prefill": (1, length, 1),
    }
    for index, (case, sizes) in enumerate(cases.items()):
        runs = {name: partial(run_case, llm, *sizes) for name, llm in opened.items()}
        rates = run_here(runs, 100 * index, repetitions)
        for name, found in rates.items():
            ratios = [mine / plain for mine, plain in zip(found, rates["bf16"], strict=True)]
            emit(
                "quantized_experts",
                case=case,
                format=name,
                tokens_per_s=round(statistics.median(found), 1),
                of_bf16=round(statistics.median(ratios), 2),
                all=[round(rate, 1) for rate in found],
            )
    for llm in opened.values():
        llm.close()


if __name__ == "__main__":
    main()
