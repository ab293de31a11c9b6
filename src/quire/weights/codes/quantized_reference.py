"""The product of rows with a quantized weight, in torch: it defines the kernels' bits, for any rows and processor.

    out[r, n] = acc + bias[n], rounded once to the dtype of x, where in float32
    acc  = 0; for each group g in order: acc = acc + scale[n, g] * s, and with minimums acc = acc - minimum[n, g] * t
    s    = 0; for each block of 32 inputs of g in order (the last may be shorter): s = s + (even + odd)
    even = the sum of the block's products x[r, k] * value[n, k], k = 0, 2, 4 ... from the block's start, in order
    odd  = the same for k = 1, 3, 5 ...
    t    = s with 1 for every value
    value = code - zero, the table's entry of the code, or the code

Every product, difference and sum is rounded separately to float32, to nearest even. If the product of an x and a value
is exact (x of 16 bits and values of 8), a fused multiply-add gives the same bits. So does the matrix unit, from which
this order comes: tdpbf16ps sums the even and the odd elements of 32 separately. An x below 2**-100 in size counts as 0,
so that no sum is a subnormal number, which that unit treats as 0.

On any device of torch. Not a fast path. Cost: some 70 operators of torch on [rows, N, K / 32] float32.
"""

from __future__ import annotations

import torch

from quire.errors import ArgumentError
from quire.weights.codes.weight import QuantizedWeight

__all__ = ["BLOCK", "multiply"]

BLOCK = 32
_SMALLEST = 2.0**-100
_ELEMENTS_AT_ONCE = 1 << 22


def multiply(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., K] of float32, bfloat16 or float16 times the weight, plus bias [N]: [..., N] of the dtype of x.

    *raises:* ArgumentError: x has another number of inputs.
    """
    inputs = weight.num_inputs
    if x.dim() == 0 or x.shape[-1] != inputs:
        raise ArgumentError(f"x times {weight.label}: expected [..., {inputs}], got {tuple(x.shape)}")
    rows = x.reshape(-1, inputs)
    if weight.order is not None:
        rows = rows[:, weight.order]
    rows = rows.float()
    rows = torch.where(rows.abs() < _SMALLEST, torch.zeros((), dtype=rows.dtype), rows)
    out = rows.new_empty(rows.shape[0], weight.num_outputs)
    num_blocks = -(-weight.group // BLOCK) * (inputs // weight.group)
    outputs_at_once = max(1, _ELEMENTS_AT_ONCE // max(1, num_blocks * rows.shape[0]))
    for first in range(0, weight.num_outputs, outputs_at_once):
        part = weight.slice_outputs(first, first + outputs_at_once)
        out[:, first : first + outputs_at_once] = _sums(rows, part)
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype).reshape(*x.shape[:-1], weight.num_outputs)


def _sums(rows: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """[rows, N] float32, before the bias."""
    x = _blocks(rows, weight.group)[:, :, None]
    scales = weight.scales.values()
    acc = rows.new_zeros(rows.shape[0], weight.num_outputs)
    minimums = sums_of_x = None
    if weight.minimums is not None:
        minimums = weight.minimums.values()
        sums_of_x = _by_group(x, None)
    by_group = _by_group(x, _blocks(weight.values(), weight.group)[:, None])
    for g in range(scales.shape[1]):
        acc = acc + scales[:, g] * by_group[g]
        if minimums is not None and sums_of_x is not None:
            acc = acc - minimums[:, g] * sums_of_x[g]
    return acc


def _blocks(values: torch.Tensor, group: int) -> torch.Tensor:
    """[R, K] -> [32, R, groups, blocks of a group], zeros where the last block of a group is shorter."""
    grouped = values.view(values.shape[0], -1, group)
    padded = torch.nn.functional.pad(grouped, (0, -group % BLOCK))
    return padded.unflatten(-1, (-1, BLOCK)).permute(3, 0, 1, 2).contiguous()


def _by_group(x: torch.Tensor, values: torch.Tensor | None) -> torch.Tensor:
    """s, or t without values: [groups, rows, N]. x [32, rows, 1, groups, blocks], values [32, 1, N, ...]."""
    halves = []
    for parity in (0, 1):
        half = torch.zeros(())
        for k in range(parity, BLOCK, 2):
            half = half + (x[k] if values is None else x[k] * values[k])
        halves.append(half)
    blocks = halves[0] + halves[1]
    sums = blocks.new_zeros(blocks.shape[:-1])
    for block in range(blocks.shape[-1]):
        sums = sums + blocks[..., block]
    return sums.permute(2, 0, 1)
