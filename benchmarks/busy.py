"""Decode speed while another program is busy, against the same engine alone in the same run. JSON lines.

    python benchmarks/busy.py [--quick] [--repetitions 3] [--batch 8]

Random weights in the shape of Qwen3-0.6B (see engine.py), bfloat16. Cases: alone; with a process that spins on one
of the cores (pinned there); with a torch program that multiplies matrices on all cores with its own OpenMP threads.
The cases take turns; medians and their ratios to "alone" are printed. With the scheduler's fair share a program that
keeps one of two cores busy leaves three quarters of the machine at best.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from engine import make_model, run_case
from machine import emit, emit_machine

from quire import LLM

_SPIN = "import os\nos.sched_setaffinity(0, [{core}])\nprint(flush=True)\nwhile True: pass"
_TORCH = (
    "import torch\ntorch.set_num_threads({cores})\na = torch.ones(1024, 1024)\na @ a\nprint(flush=True)\n"
    "while True: a @ a"
)


@contextmanager
def beside(program: str | None) -> Iterator[None]:
    """The program runs, and has begun its work, inside the block."""
    if program is None:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.2)
            yield
        finally:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small model and short answers")
    parser.add_argument("--repetitions", type=int, default=None)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=None, help="new tokens of a run")
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    programs = {
        "alone": None,
        "with a spinning process pinned to the last core": _SPIN.format(core=cores[-1]),
        "with torch on all cores": _TORCH.format(cores=len(cores)),
    }
    emit_machine()
    rates: dict[str, list[float]] = {case: [] for case in programs}
    model = make_model(quick=arguments.quick, dtype="bfloat16")
    new = arguments.tokens or (8 if arguments.quick else 32)
    with LLM((model, None), kv_memory="1GiB", prefix_caching=False) as llm:
        run_case(llm, arguments.batch, 16, 4, seed=0)
        for repetition in range(arguments.repetitions or (1 if arguments.quick else 3)):
            for case, program in programs.items():
                with beside(program):
                    rates[case].append(run_case(llm, arguments.batch, 16, new, seed=repetition))
    alone = statistics.median(rates["alone"])
    for case, values in rates.items():
        emit(
            "busy",
            case=f"decode, batch {arguments.batch}, {case}",
            tokens_per_s=round(statistics.median(values), 1),
            ratio_to_alone=round(statistics.median(values) / alone, 2),
            all=[round(value, 1) for value in values],
        )


if __name__ == "__main__":
    main()
