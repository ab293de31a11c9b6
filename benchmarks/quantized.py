"""Quantized linear layers against the same in bfloat16, in one run. JSON lines.

    python benchmarks/quantized.py [--quick] [--repetitions 9] [--format int4:128 --format int8] [--isa avx2]

One figure per format and number of rows (1, 8, 32, and without --quick 480): the time of one pass over the linear
layers of 28 decoder layers of Qwen3-0.6B (fewer with --quick), each with its own memory, so that few rows read it
from there; formats take turns, medians. `gb_s`: bytes of codes and scales read per second; `share`: that over the read
bandwidth measured in the same run, which is the limit of a decode row; `of_bf16`: how many times as fast as bfloat16;
`tokens_s`: the decode rate of a model of these linear layers alone, rows over time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from machine import emit, emit_machine

from quire import _native  # pyright: ignore[reportAttributeAccessIssue]
from quire.devices.cpu.packed_weights import NativeWeight
from quire.spec.weight_formats import parse_rounding
from quire.weights.codes import QuantizedPanels, round_to_codes

LAYER = [(2048, 1024), (1024, 1024), (1024, 1024), (1024, 2048), (3072, 1024), (3072, 1024), (1024, 3072)]
LAYERS = 28
FORMATS = ["int4:128", "int4:32", "int8", "int8:32"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="few layers, formats and repetitions: under 20 s"
    )
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--format", action="append", help=f"of {', '.join(FORMATS)} and others of `weights=`")
    parser.add_argument("--isa", help="a variant of the kernels; the one in use if not given")
    arguments = parser.parse_args()
    repetitions = 3 if arguments.quick else arguments.repetitions
    num_layers = 3 if arguments.quick else LAYERS
    formats = arguments.format or (["int4:128", "int8"] if arguments.quick else FORMATS)
    emit_machine()
    bandwidth = _native.read_bandwidth(1 << 28, 3 if arguments.quick else 5)
    isa = arguments.isa or _native.isa()
    emit(
        "quantized", case="setup", isa=isa, threads=_native.num_threads(), read_gb_s=round(bandwidth / 1e9, 1)
    )
    torch.manual_seed(0)
    weights = [(torch.randn(shape) * 0.02).to(torch.bfloat16) for shape in LAYER]
    ways: dict[str, list[QuantizedPanels | NativeWeight]] = {
        "bfloat16": [NativeWeight(weight, isa) for _ in range(num_layers) for weight in weights]
    }
    for name in formats:
        rounding = parse_rounding(name)
        if rounding is None:
            raise SystemExit(f"expected a format of codes, got {name!r}")
        codes = [round_to_codes(weight, rounding) for weight in weights]
        ways[name] = [QuantizedPanels(code, torch.bfloat16, isa) for _ in range(num_layers) for code in codes]
    for rows in (1, 8, 32) if arguments.quick else (1, 8, 32, 480):
        inputs = [torch.randn(rows, width).to(torch.bfloat16) for _, width in LAYER] * num_layers
        seconds = measure(ways, inputs, repetitions)
        for name, layers in ways.items():
            num_bytes = sum(layer.native.num_bytes for layer in layers)
            emit(
                "quantized",
                case=name,
                rows=rows,
                ms=round(seconds[name] * 1e3, 3),
                gb_s=round(num_bytes / seconds[name] / 1e9, 2),
                share=round(num_bytes / seconds[name] / bandwidth, 3),
                of_bf16=round(seconds["bfloat16"] / seconds[name], 2),
                tokens_s=round(rows / seconds[name] * num_layers / LAYERS, 1),
            )


def measure(
    ways: dict[str, list[QuantizedPanels | NativeWeight]], inputs: list[torch.Tensor], repetitions: int
) -> dict[str, float]:
    """Seconds of one pass over the layers of each way, medians; the first pass of each is not counted."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repetition in range(repetitions + 1):
        for name, layers in ways.items():
            passed = timed(
                lambda layers=layers: [
                    layer.multiply(x, None) for layer, x in zip(layers, inputs, strict=True)
                ]
            )
            if repetition:
                times[name].append(passed)
    return {name: statistics.median(found) for name, found in times.items()}


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
