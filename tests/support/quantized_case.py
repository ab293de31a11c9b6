"""Random quantized weights of every kind that readers return, and their product computed number by number."""

from __future__ import annotations

import numpy as np
import torch

from quire.weights.codes import Factor, QuantizedWeight

KINDS = {
    # kind: (bits, group; 0: all inputs)
    "int8": (8, 0),
    "int8:32": (8, 32),
    "int4": (4, 0),
    "int4:128": (4, 128),
    "int4:64 with zeros": (4, 64),
    "int8:128 with zeros": (8, 128),
    "int4:32 with fractions for zeros": (4, 32),
    "int4:32 with minimums": (4, 32),
    "int5:32": (5, 32),
    "int5:32 with super-blocks and minimums": (5, 32),
    "int6:16 with super-blocks": (6, 16),
    "int2:16 with super-blocks and minimums": (2, 16),
    "int3:16 with super-blocks": (3, 16),
    "table of 4 bits": (4, 32),
    "table of 4 bits not exact": (4, 64),
    "table of 8 bits": (8, 128),
}


def random_weight(kind: str, outputs: int, inputs: int, seed: int = 0) -> QuantizedWeight:
    """One of `kind`; `inputs` a multiple of the kind's group, of 256 for super-blocks."""
    bits, group = KINDS[kind]
    group = group or inputs
    make = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (outputs, inputs), generator=make, dtype=torch.uint8)
    shape = (outputs, inputs // group)

    def factor(signed: bool) -> Factor:
        if "super-blocks" not in kind:
            values = torch.rand(shape, generator=make) * 0.01 + 0.001
            return Factor(values.to(torch.float16 if group < 128 else torch.bfloat16))
        low, high, dtype = (-32, 31, torch.int8) if signed else (0, 63, torch.uint8)
        fine = torch.randint(low, high, shape, generator=make).to(dtype)
        coarse = torch.rand(outputs, inputs // 256, generator=make) * 1e-3
        return Factor(fine, coarse.to(torch.float16))

    zeros: torch.Tensor | float | None = None
    if kind.endswith("with zeros"):
        zeros = torch.randint(0, 1 << bits, shape, generator=make, dtype=torch.uint8)
    elif kind.endswith("fractions for zeros"):
        zeros = torch.rand(shape, generator=make) * 15
    elif "minimums" not in kind and "table" not in kind:
        zeros = float(1 << (bits - 1))
    table = None
    if kind == "table of 4 bits":
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    elif kind == "table of 4 bits not exact":
        table = torch.randn(16, generator=make)
    elif kind == "table of 8 bits":
        table = torch.randn(256, generator=make).to(torch.bfloat16).float()
    minimums = factor(False) if "minimums" in kind else None
    return QuantizedWeight(codes, bits, group, factor(True), kind, zeros, minimums, table)


def product_by_number(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """[rows, N]: `quire.weights.codes.quantized_reference`'s definition, one float32 operation after the other."""
    f = np.float32
    values, scales = weight.values().numpy(), weight.scales.values().numpy()
    minimums = None if weight.minimums is None else weight.minimums.values().numpy()
    rows = x.float().numpy()
    group, out = weight.group, np.zeros((len(rows), weight.num_outputs), dtype=f)

    def sum_of(row: np.ndarray, value: np.ndarray) -> np.float32:
        total = f(0)
        for first in range(0, group, 32):
            halves = [f(0), f(0)]
            for k in range(first, min(first + 32, group)):
                a = f(0) if abs(row[k]) < 2.0**-100 else row[k]
                halves[(k - first) % 2] = f(halves[(k - first) % 2] + f(a * value[k]))
            total = f(total + f(halves[0] + halves[1]))
        return total

    for r, row in enumerate(rows):
        for n in range(weight.num_outputs):
            acc = f(0)
            for g in range(weight.num_inputs // group):
                part = slice(g * group, (g + 1) * group)
                acc = f(acc + f(scales[n, g] * sum_of(row[part], values[n, part])))
                if minimums is not None:
                    acc = f(acc - f(minimums[n, g] * sum_of(row[part], np.ones(group, dtype=f))))
            out[r, n] = acc
    result = torch.from_numpy(out)
    return (result if bias is None else result + bias.float()).to(x.dtype)
