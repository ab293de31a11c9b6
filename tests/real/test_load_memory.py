"""The peak memory of a start, compared with a process that has imported everything and made the tokenizer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quire.weights.load import without_weights

# Times the file. A start proves what it serves, and has the kernels' buffers.
LOAD_WITHIN, START_WITHIN = 1.15, 1.6
KV_MEMORY = 16 << 20

_PROGRAM = """
import gc, importlib, json, sys
from quire import LLM, plan
from quire.memory.heap import give_back_freed
from quire.weights.load_gguf import gguf_config, load_gguf_tokenizer
from quire.weights.sources import GGUFSource
from pathlib import Path

def status(name):
    lines = open("/proc/self/status")
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

path, kv_memory = Path(sys.argv[1]), int(sys.argv[2])
plan(path)  # imports what the model needs
source = GGUFSource(path)
tokenizer = load_gguf_tokenizer(source, gguf_config(source))
del source
loading = importlib.import_module("quire.weights.load")  # the package has a name like it
loading.load_gguf_tokenizer = lambda *_: tokenizer
gc.collect()
give_back_freed()
before = status("VmRSS:")
try:
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
except OSError:
    print(json.dumps(None))
    sys.exit()
loaded = loading.load(path)
of_load = status("VmHWM:") - before
del loaded
gc.collect()
give_back_freed()
with LLM(path, kv_memory=kv_memory, max_model_len=512) as llm:
    of_start = status("VmHWM:") - before
    weights = sum(llm.stats()["weight_bytes"].values())
print(json.dumps([of_load, of_start, weights]))
"""


def test_the_peak_of_a_start(checkpoint: Path) -> None:
    if checkpoint.suffix != ".gguf" or not without_weights(checkpoint).codes:
        pytest.skip("not a GGUF file of codes")
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(checkpoint), str(KV_MEMORY)],
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    if found is None:
        pytest.skip("the system does not let a process begin its VmHWM anew")
    of_load, of_start, weights = found
    size = checkpoint.stat().st_size
    print(
        f"{checkpoint.name} of {size >> 20} MiB: weights {weights >> 20} MiB, peak of load {of_load >> 20} MiB "
        f"({of_load / size:.2f} of the file), of a start {of_start >> 20} MiB ({of_start / size:.2f})"
    )
    assert of_load <= LOAD_WITHIN * size
    assert of_start - KV_MEMORY <= START_WITHIN * size
