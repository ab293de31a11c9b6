"""Start to first token, and peak memory, against `import torch, transformers` in the same run. JSON lines.

    python benchmarks/start.py [--quick] [--repetitions 5] [--prompt-tokens 16] [--model DIR] [--packed-weights DIR]
        [--weights FORMAT]

Every measurement is a fresh process, timed by itself from its first statement; the kinds take turns: importing torch
and transformers and nothing else; the embedded model, nothing saved; then the larger model with its weights as they are
and, with --weights, rounded as `LLM(weights=)` does, each with nothing saved, as a first start, whose folder of packed
weights is empty, and as a second one, which maps the files of the first. `LLM(folder)` and one greedy token.
Random weights in the shape of Qwen3-0.6B with a vocabulary of 32 000 (473 M parameters, bfloat16, 903 MiB), saved to a
temporary folder (or to --model, and taken from there if it exists). The file is in the kernel's page cache.
--packed-weights is an empty or new folder for saved weights; a temporary one if not given.
Memory is the process's peak (VmHWM) at the end. Phases are timed by wrapping functions; all other time is in `rest`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import emit, emit_machine

_IMPORTS = """
import time; start = time.perf_counter()
import torch, transformers
print(time.perf_counter() - start)
"""

_ENGINE = """
import json, time; start = time.perf_counter()
from quire import LLM, SamplingParams
phases = {"import quire.LLM (torch)": time.perf_counter() - start}

def timed(owner, name, phase):
    function = getattr(owner, name)
    def call(*arguments, **options):
        begin = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            phases[phase] = phases.get(phase, 0.0) + time.perf_counter() - begin
    setattr(owner, name, call)

begin = time.perf_counter()
import quire.model.prepare as prepare
phases["import transformers' models"] = time.perf_counter() - begin
import sys
timed(sys.modules["quire.weights.load"].AutoModelForCausalLM, "from_pretrained", "read the weights")
timed(sys.modules["quire.weights.load"], "quantize_saved", "round")
timed(prepare, "pack_linears", "pack")
timed(prepare.PreparedModel, "_prove", "prove")
llm = LLM({model!r}, kv_memory="1GiB", packed_weights={packed_weights!r}, weights={weights!r})
begin = time.perf_counter()
llm.generate([list(range(1, {prompt_tokens} + 1))], SamplingParams(max_tokens=1, temperature=0))
phases["first token"] = time.perf_counter() - begin
total = time.perf_counter() - start
phases["rest"] = total - sum(phases.values())
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
decode = {decode_tokens}
rate = None
if decode:
    params = SamplingParams(max_tokens=decode, temperature=0, ignore_eos=True)
    timings = llm.generate([list(range(1, {prompt_tokens} + 1))], params)[0].timings
    rate = (decode - 1) / (timings.total_s - timings.time_to_first_token_s)
print(json.dumps({"seconds": total, "phases": phases, "peak_mib": int(peak.split()[1]) // 1024, "rate": rate}))
"""


def run(program: str) -> Any:
    """The last line that a fresh interpreter prints, as JSON."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small model and one run")
    parser.add_argument("--repetitions", type=int, default=None)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--packed-weights", default=None, help="an empty folder for packed weights")
    parser.add_argument(
        "--weights", default=None, help="format of the rounded weights of the larger model, such as int4"
    )
    parser.add_argument(
        "--decode-tokens", type=int, default=0, help="decoded afterwards, at batch 1; the rate"
    )
    parser.add_argument("--model", default=None, help="folder of the model; made if it does not exist")
    arguments = parser.parse_args()
    repetitions = arguments.repetitions or (1 if arguments.quick else 5)
    emit_machine()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.model or str(Path(temporary) / "model")
        if not Path(folder).is_dir():
            from engine import make_model

            make_model(quick=arguments.quick, dtype="bfloat16").save_pretrained(folder)
        kept = Path(arguments.packed_weights or Path(temporary) / "kept")
        if kept.is_dir() and any(kept.iterdir()):
            raise SystemExit(f"expected an empty folder for packed weights, got {kept} with files in it")
        cases: dict[str, tuple[str | None, str | None, str]] = {"embedded model": (None, None, "off")}
        for weights in dict.fromkeys((None, arguments.weights)):
            name = f"473 M parameters, {weights or 'bfloat16'}"
            cases[f"{name}, nothing kept"] = (folder, weights, "off")
            cases[f"{name}, first start"] = (folder, weights, str(kept))
            cases[f"{name}, second start"] = (folder, weights, str(kept))
        imports: list[float] = []
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
        for _ in range(repetitions):
            imports.append(run(_IMPORTS))
            for name, (model, weights, packed_weights) in cases.items():
                if name.endswith("first start"):
                    shutil.rmtree(kept, ignore_errors=True)
                given = {"model!r": repr(model), "packed_weights!r": repr(packed_weights),
                         "weights!r": repr(weights), "prompt_tokens": str(arguments.prompt_tokens),
                         "decode_tokens": str(arguments.decode_tokens)}  # fmt: skip
                program = _ENGINE
                for field, value in given.items():
                    program = program.replace("{" + field + "}", value)
                runs[name].append(run(program))
    base = statistics.median(imports)
    emit(
        "start", case="import torch, transformers", seconds=round(base, 2), all=[round(s, 2) for s in imports]
    )
    for name, results in runs.items():
        seconds = statistics.median(result["seconds"] for result in results)
        phases = {
            phase: round(statistics.median(result["phases"].get(phase, 0.0) for result in results), 3)
            for phase in results[0]["phases"]
        }
        emit(
            "start",
            case=f"start to first token, {name}",
            seconds=round(seconds, 2),
            beyond_imports_s=round(seconds - base, 2),
            peak_mib=statistics.median(result["peak_mib"] for result in results),
            phases_s=phases,
            all=[round(result["seconds"], 2) for result in results],
            decode_tokens_per_s=[round(result["rate"], 2) for result in results if result["rate"]],
        )


if __name__ == "__main__":
    main()
