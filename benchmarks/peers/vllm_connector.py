"""vLLM with and without Quire's tiers: time to the first token of prompts that an earlier process has computed.

    python benchmarks/peers/setup.py vllm                    once: the environment, the model
    python benchmarks/peers/vllm_connector.py [--peers DIR] [--model FOLDER] [--tokens 2000] [--prompts 5] [--turns 3]

The model: random weights in the shape of Qwen3-0.6B, bfloat16, or a folder of Hugging Face's. Three vLLMs one after
another in each turn, each in a new process that answers one other prompt first:

    alone       without the connector
    first       with `disk_cache`, an empty folder: computes and saves
    restarted   with the same folder: finds the prompts

A line of JSON for each: seconds of the first token, medians over prompts and turns; `of_alone`, the median of the
ratios of a turn. The first tokens are compared; the exit status is 1 if they differ between `alone` and `first`, which
compute the same.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

REPOSITORY = Path(__file__).parents[2]
NAMES = ("alone", "first", "restarted")


def main() -> int:
    from machine import emit, emit_machine
    from shape import FULL

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peers", type=Path, default=REPOSITORY / "build" / "peers")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    python = arguments.peers / "vllm" / "bin" / "python"
    model = arguments.model or arguments.peers / FULL.folder / "hf"
    if not python.exists() or not model.exists():
        parser.error(f"expected {python} and {model}; run python benchmarks/peers/setup.py vllm")
    emit_machine()
    seconds: dict[str, list[list[float]]] = {name: [] for name in NAMES}
    is_same = True
    for _ in range(arguments.turns):
        with tempfile.TemporaryDirectory() as folder:
            found = [run(python, model, arguments, None if name == "alone" else folder) for name in NAMES]
        for name, one in zip(NAMES, found, strict=True):
            seconds[name].append(one["seconds"])
        is_same = is_same and found[0]["tokens"] == found[1]["tokens"]
    alone = [statistics.median(turn) for turn in seconds["alone"]]
    for name in NAMES:
        turns = [statistics.median(turn) for turn in seconds[name]]
        ratios = [one / of for one, of in zip(turns, alone, strict=True)]
        emit(
            "vllm connector",
            vllm=name,
            prompt_tokens=arguments.tokens,
            first_token_s=round(statistics.median(turns), 3),
            of_alone=round(statistics.median(ratios), 3),
        )
    emit("vllm connector", first_tokens_equal=is_same)
    return 0 if is_same else 1


def run(python: Path, model: Path, arguments: argparse.Namespace, folder: str | None) -> dict[str, Any]:
    """One vLLM, in a process of its own."""
    with tempfile.TemporaryDirectory() as path:
        (Path(path) / "quire").symlink_to(REPOSITORY / "src" / "quire")
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        given = {
            "model": str(model),
            "folder": folder,
            "tokens": arguments.tokens,
            "prompts": arguments.prompts,
        }
        command = [str(python), __file__, "--child", json.dumps(given)]
        printed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    [line] = [line for line in printed.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


def child(given: dict[str, Any]) -> None:
    """Under vLLM's Python."""
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.config import KVTransferConfig  # pyright: ignore[reportMissingImports]

    transfer = {}
    if given["folder"] is not None:
        transfer["kv_transfer_config"] = KVTransferConfig(
            kv_connector="QuireConnector",
            kv_connector_module_path="quire.connect.vllm",
            kv_role="kv_both",
            kv_connector_extra_config={"disk_cache": given["folder"]},
        )
    llm = LLM(
        model=given["model"],
        skip_tokenizer_init=True,
        dtype="bfloat16",
        kv_cache_memory_bytes=2 << 30,
        max_model_len=given["tokens"] + 64,
        max_num_batched_tokens=2048,
        **transfer,
    )
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    seconds, tokens = [], []
    for seed in range(-1, given["prompts"]):
        prompt = random.Random(seed).choices(range(100, 4000), k=given["tokens"])
        began = time.perf_counter()
        [answer] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        if seed >= 0:
            seconds.append(time.perf_counter() - began)
            tokens += answer.outputs[0].token_ids
    print("RESULT " + json.dumps({"seconds": seconds, "tokens": tokens}), flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(json.loads(sys.argv[2]))
    else:
        sys.exit(main())
