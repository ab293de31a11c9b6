"""A program that compares a plan's memory with the memory that the process then takes.

    python plan_run.py MODEL WEIGHTS    WEIGHTS: as of the engine, or "as they are"

Prints {"planned": bytes, "measured": bytes, "rows": {part: bytes}}. Bytes of libraries that other processes map too
count in full on both sides, the runtime row included: their share would depend on other processes.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

NUM_TOKENS = 512  # of the request: a prompt, and an answer of four tokens


def of_model(model: Path, weights: str | None = None) -> dict[str, Any]:
    """What the program prints."""
    command = [sys.executable, __file__, str(model), weights or "as they are"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        raise AssertionError(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def resident_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))


def main(model: str, weights: str | None) -> None:
    from quire import LLM, SamplingParams, plan
    from quire.weights.packed_parameter import PackedParameter

    options: dict[str, Any] = {"kv_memory": "64MiB", "max_batch_tokens": NUM_TOKENS, "weights": weights}
    said = plan(model, context=NUM_TOKENS, concurrency=1, **options)
    gc.collect()
    before = resident_bytes()
    with LLM(model, max_model_len=NUM_TOKENS, **options) as llm:
        prompt = llm.tokenizer(_TEXT * 64)["input_ids"][: NUM_TOKENS - 4]
        llm.generate(prompt, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
        embedding: Any = llm._opened.model.prepared._model.get_input_embeddings().weight
        dense = embedding.lazy_weight.dense if isinstance(embedding, PackedParameter) else embedding
        if dense is not None:
            dense.detach().view(-1)[::1024].float().sum()  # one that is read from its file counts whole
        measured = resident_bytes()
    rows: dict[str, int] = {}
    for row in said.rows:
        rows[row.part] = rows.get(row.part, 0) + row.num_bytes
    rows["runtime"] = before
    print(json.dumps({"planned": sum(rows.values()), "measured": measured, "rows": rows}))


_TEXT = "The meeting began at nine, and most of the figures of the year were known by noon. "

if __name__ == "__main__":
    main(sys.argv[1], None if sys.argv[2] == "as they are" else sys.argv[2])
