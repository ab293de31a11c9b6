"""The packed linear layer against torch's F.linear and oneDNN's packed operator, in one run. JSON lines.

    python benchmarks/linear.py [--quick] [--dtype bfloat16 --dtype float32] [--repetitions 7]

One figure per case, number of rows and way: the time of one pass over the linear layers of a decoder layer of
Qwen3-0.6B (q, k, v, o, gate, up, down), or over a vocabulary projection of 32 000 (up to 64 rows). The ways take
turns; medians. Up to 32 rows a pass goes over several copies of the weights, so that it reads them from memory, not
from a cache: `gb_s` is weights read per second, `share` that over the read bandwidth measured in the same run. Beyond,
`gflop_s` is the figure to look at. A way that takes more than 2 s a pass is measured once.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from machine import emit, emit_machine
from torch.nn import functional as F

from quire import _native  # pyright: ignore[reportAttributeAccessIssue]
from quire.devices.cpu.packed_weights import NativeWeight, OneDnnWeight
from quire.devices.cpu.packed_weights import onednn_serves as onednn_serves

LAYER = {
    "q": (2048, 1024),
    "k": (1024, 1024),
    "v": (1024, 1024),
    "o": (1024, 2048),
    "gate": (3072, 1024),
    "up": (3072, 1024),
    "down": (1024, 3072),
}
VOCABULARY: tuple[int, int] = (32_000, 1024)
COLD_BYTES = 150e6  # of all copies together at least
FEW_ROWS = 32
VOCABULARY_ROWS = 64
PAUSE_SECONDS = 0.02  # the way before may have left threads that spin for a while


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few rows and repetitions, about a minute")
    parser.add_argument("--dtype", action="append", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--repetitions", type=int, default=9)
    arguments = parser.parse_args()
    repetitions = 3 if arguments.quick else arguments.repetitions
    all_rows = [1, 8, 32, 128] if arguments.quick else [1, 2, 4, 8, 16, 32, 64, 128, 512, 2048]
    emit_machine()
    bandwidth = _native.read_bandwidth(1 << 28, 5)
    emit(
        "linear",
        case="setup",
        isa=_native.isa(),
        threads=_native.num_threads(),
        torch_threads=torch.get_num_threads(),
        read_gb_s=round(bandwidth / 1e9, 1),
    )
    for name in arguments.dtype or ["bfloat16", "float32"]:
        for case, shapes in (("layer", list(LAYER.values())), ("vocabulary", [VOCABULARY])):
            copies = make_copies(shapes, getattr(torch, name))
            for rows in all_rows:
                if case == "layer" or rows <= VOCABULARY_ROWS:
                    inputs = [torch.randn(rows, width).to(getattr(torch, name)) for _, width in shapes]
                    products = sum(outputs * width for outputs, width in shapes)
                    report(case, name, rows, measure(copies, inputs, repetitions), products, bandwidth)


Product = Callable[[torch.Tensor], torch.Tensor]


def make_copies(shapes: list[tuple[int, int]], dtype: torch.dtype) -> dict[str, list[list[Product]]]:
    """Way -> copies of the layers, each a list of functions of the rows, one per shape."""
    num_bytes = sum(outputs * inputs for outputs, inputs in shapes) * dtype.itemsize
    torch.manual_seed(0)
    ways: dict[str, list[list[Product]]] = {"quire": [], "F.linear": []}
    if onednn_serves(dtype):
        ways["onednn packed"] = []
    for _ in range(1 + int(COLD_BYTES // num_bytes)):
        dense = [torch.randn(outputs, inputs).to(dtype) * inputs**-0.5 for outputs, inputs in shapes]
        ways["quire"].append([partial(NativeWeight(weight).multiply, bias=None) for weight in dense])
        ways["F.linear"].append([partial(F.linear, weight=weight) for weight in dense])
        if "onednn packed" in ways:
            ways["onednn packed"].append(
                [partial(OneDnnWeight(weight).multiply, bias=None) for weight in dense]
            )
    return ways


def measure(
    ways: dict[str, list[list[Product]]], inputs: list[torch.Tensor], repetitions: int
) -> dict[str, float]:
    """Median seconds of a pass of each way; `inputs` one per layer."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    cold = len(inputs[0]) <= FEW_ROWS
    for turn in range(repetitions + 1):  # the first warms up
        for name, copies in ways.items():
            if taken[name] and taken[name][0] > 2.0:
                continue
            # Few rows: every copy once, so that each comes from memory.
            passes = copies if cold else copies[:1]
            time.sleep(PAUSE_SECONDS)
            start = time.perf_counter()
            with torch.inference_mode():
                for layers in passes:
                    for layer, x in zip(layers, inputs, strict=True):
                        layer(x)
            seconds = (time.perf_counter() - start) / len(passes)
            if turn > 0 or seconds > 2.0:
                taken[name].append(seconds)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def report(
    case: str, dtype: str, rows: int, taken: dict[str, float], products: int, bandwidth: float
) -> None:
    """Prints a line per way. `products`: weights of a pass."""
    for name, seconds in taken.items():
        read = products * getattr(torch, dtype).itemsize / seconds
        emit(
            "linear",
            case=case,
            way=name,
            dtype=dtype,
            rows=rows,
            ms=round(seconds * 1e3, 3),
            gb_s=round(read / 1e9, 2),
            share=round(read / bandwidth, 3),
            gflop_s=round(2 * rows * products / seconds / 1e9, 1),
        )


if __name__ == "__main__":
    main()
