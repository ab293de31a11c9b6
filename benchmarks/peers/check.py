"""Whether each peer computes the model that it was given: its greedy tokens beside transformers' logits, in float32.

    python benchmarks/peers/check.py [--kind dense|lfm2|granite4|qwen3.5] [--peers DIR] [--engines NAME ...]

A wrong conversion makes a wrong row of `comparison.py`, and a fast one. Three prompts of 30 tokens, 16 new ones each.
transformers is given the prompt and the engine's own tokens; counted is how many of these it would have drawn too.
Rounding to 16 bits turns some, a wrong conversion nearly all (of 32 000 words): exit status 1 below `LEAST`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from cases import Case
from driver import Options
from engines import ENGINES
from machine import emit
from process import EngineError, EngineProcess
from shape import KINDS, shape_of
from transformers import AutoConfig, AutoModelForCausalLM

CASE = Case("check", "seconds", 3, 30, 16, target=None)
LEAST = 0.75
CHUNK = 16  # tokens that transformers' Mamba computes at a time: it pads to it, and takes minutes with its own 256


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peers", type=Path, default=Path(__file__).parents[2] / "build" / "peers")
    parser.add_argument("--kind", choices=KINDS, default="dense")
    parser.add_argument("--engines", nargs="+", metavar="NAME")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    shape = shape_of(arguments.kind)
    models: Path = arguments.peers / shape.folder
    torch.set_num_threads(arguments.threads)
    prompts = CASE.prompts(shape.vocab_size, 0)
    answers: dict[str, list[list[int]]] = {}
    failed = False
    for engine in ENGINES:
        if arguments.engines and engine.name not in arguments.engines:
            continue
        if reason := engine.missing(arguments.peers, models, arguments.kind, quick=False):
            emit("check", engine=engine.name, kind=arguments.kind, left_out=reason)
            continue
        options = Options(
            model=str(models / engine.model),
            mode=engine.mode,
            dtype=shape.dtype,
            threads=arguments.threads,
            kv_bytes=256 << 20,
            kv_bytes_per_token=shape.kv_bytes_per_token,
            tight=False,
            vocab_size=shape.vocab_size,
            max_len=CASE.length,
            max_requests=CASE.batch,
        )
        with tempfile.NamedTemporaryFile() as log:
            try:
                process = EngineProcess(
                    engine, engine.python(arguments.peers, quick=False), options, Path(log.name)
                )
                answers[engine.name] = process.run(CASE, prompts, limit_s=600)["tokens"]
                process.end()
            except EngineError as error:
                failed = True
                lines = Path(log.name).read_text(errors="replace").splitlines()
                emit("check", engine=engine.name, kind=arguments.kind, failed=str(error), log=lines[-6:])
    model = _reference(models / "hf")
    for name, tokens in answers.items():
        same = sum(_num_same(model, *pair) for pair in zip(prompts, tokens, strict=True))
        total = CASE.batch * CASE.new
        failed = failed or same < LEAST * total
        emit(
            "check", engine=name, kind=arguments.kind, same=same, total=total, is_right=same >= LEAST * total
        )
    return 1 if failed else 0


def _reference(directory: Path) -> Any:
    config = AutoConfig.from_pretrained(directory)
    if hasattr(config, "mamba_chunk_size"):
        config.mamba_chunk_size = CHUNK
    return AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=torch.float32).eval()


def _num_same(model: Any, prompt: list[int], answer: list[int]) -> int:
    """Tokens of the answer that are the model's most likely ones behind those before them."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return int((logits.argmax(-1) == torch.tensor(answer)).sum())


if __name__ == "__main__":
    sys.exit(main())
