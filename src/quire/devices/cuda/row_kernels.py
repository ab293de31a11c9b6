# pyright: reportCallIssue=false
# ruff: noqa: SIM108
"""Operators of rows: sums, softmax, norms, sums along a prefix, the index of the maximum; one program a row.

A program reads its row in blocks of a fixed size, in order; a lane adds the numbers at its place of every block, in
float32, and the lanes are added at the end. No atomics, and no program knows how many rows there are.

Invariants
    W1  the bits of a row depend on that row, its length and the dtype. The compiler distributes a block over the lanes
        by the alignment of pointers and strides, and the order of the last sum follows. So kernels that sum are not
        specialised for alignment; a norm is, if its length is a multiple of 16: then its rows are aligned or copied.
    W2  softmax, logarithms of sums and prefix sums have one block size for all lengths: masked numbers behind a row's
        last (-inf, or 0) change no bit.
    W3  sums along another dimension than the last add one number after the other, per element of the result.

Cost: a launch each; a copy of an operand whose reduced dimensions are not adjacent. The current CUDA device must be
that of the operands.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from quire.devices.cuda.kernel_alignment import for_any_alignment
from quire.devices.cuda.kernel_variants import KernelVariant

__all__ = [
    "add_by_index",
    "argmax",
    "cumsum",
    "layer_norm",
    "log_softmax",
    "logsumexp",
    "mean",
    "rms_norm",
    "rms_norm_moments",
    "rotate",
    "silu_and_mul",
    "softmax",
    "sum_rows",
    "variance",
    "variants",
    "version",
]

_SOFTMAX_BLOCK = 1024
_MAX_BLOCK = 2048  # of norms
_MAX_UNALIGNED_BLOCK = 1024
_COLUMN_BLOCK = 256
_ELEMENT_BLOCK = 1024
_NUM_STAGES = 3  # triton's default


# -- kernels ---------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["n", "stride"], do_not_specialize_on_alignment=["x", "out"])
def sum_kernel(x, out, n, stride, correction, MODE: tl.constexpr, BLOCK: tl.constexpr):
    """MODE: "sum", "mean" or "var" (the mean squared distance from the mean, over n - correction)."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    x += row * stride
    acc = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        acc += tl.load(x + start + lanes, mask=start + lanes < n, other=0.0).to(tl.float32)
    total = tl.sum(acc, 0)
    if MODE != "sum":
        total = total / n
    if MODE == "var":
        acc = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, n, BLOCK):
            is_in = start + lanes < n
            distance = tl.load(x + start + lanes, mask=is_in, other=0.0).to(tl.float32) - total
            acc += tl.where(is_in, distance * distance, 0.0)
        total = tl.sum(acc, 0) / tl.maximum(n - correction, 0.0)
    tl.store(out + row, total.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["n", "inner"], do_not_specialize_on_alignment=["x", "out"])
def sum_columns_kernel(x, out, n, inner, MODE: tl.constexpr, BLOCK: tl.constexpr):
    """x [outer, n, inner] -> [outer, inner]; a lane adds its column, one number after the other."""
    outer = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < inner
    places = x + outer * n * inner + columns
    acc = tl.zeros((BLOCK,), tl.float32)
    for _ in range(0, n):
        acc += tl.load(places, mask=is_column, other=0.0).to(tl.float32)
        places += inner
    if MODE == "mean":
        acc = acc / n
    tl.store(out + outer * inner + columns, acc.to(out.dtype.element_ty), mask=is_column)


@triton.jit(do_not_specialize=["n", "stride"], do_not_specialize_on_alignment=["x", "out"])
def softmax_kernel(x, out, n, stride, MODE: tl.constexpr, BLOCK: tl.constexpr):
    """MODE: "softmax", "log_softmax" ([rows, n]) or "logsumexp" ([rows])."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    x += row * stride
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, n, BLOCK):
        values = tl.load(x + start + lanes, mask=start + lanes < n, other=float("-inf")).to(tl.float32)
        top = tl.maximum(top, values)
    peak = tl.max(top, 0)  # of the numbers that are no NaN; a NaN reaches the result by the sum
    shift = peak
    if MODE == "logsumexp":
        shift = tl.where((peak == float("-inf")) | (peak == float("inf")), 0.0, peak)
    acc = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        values = tl.load(x + start + lanes, mask=start + lanes < n, other=float("-inf")).to(tl.float32)
        acc += tl.where(start + lanes < n, tl.exp(values - shift), 0.0)
    total = tl.sum(acc, 0)
    if MODE == "logsumexp":
        tl.store(out + row, (shift + tl.log(total)).to(out.dtype.element_ty))
    else:
        out += row * n
        log_total = tl.log(total)
        for start in range(0, n, BLOCK):
            is_in = start + lanes < n
            values = tl.load(x + start + lanes, mask=is_in, other=0.0).to(tl.float32) - shift
            if MODE == "softmax":
                values = tl.exp(values) / total
            else:
                values = values - log_total
            tl.store(out + start + lanes, values.to(out.dtype.element_ty), mask=is_in)


@triton.jit
def norm_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    total_out,
    mean_out,
    rstd_out,
    n,
    stride,
    eps,
    IS_RMS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_MOMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(x + residual - mean) x rstd x weight + bias. The sum with the residual is rounded to its dtype and stored."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    x += row * stride
    out += row * n
    if HAS_RESIDUAL:
        residual += row * n
        total_out += row * n
        for start in range(0, n, BLOCK):
            is_in = start + lanes < n
            value = tl.load(x + start + lanes, mask=is_in, other=0.0).to(tl.float32)
            value += tl.load(residual + start + lanes, mask=is_in, other=0.0).to(tl.float32)
            tl.store(total_out + start + lanes, value.to(total_out.dtype.element_ty), mask=is_in)
        tl.debug_barrier()  # the row is read again by other lanes
        x = total_out
    mean = 0.0
    if not IS_RMS:
        acc = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, n, BLOCK):
            acc += tl.load(x + start + lanes, mask=start + lanes < n, other=0.0).to(tl.float32)
        mean = tl.sum(acc, 0) / n
    acc = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        is_in = start + lanes < n
        distance = tl.load(x + start + lanes, mask=is_in, other=0.0).to(tl.float32) - mean
        acc += tl.where(is_in, distance * distance, 0.0)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(acc, 0) / n + eps)
    for start in range(0, n, BLOCK):
        is_in = start + lanes < n
        value = (tl.load(x + start + lanes, mask=is_in, other=0.0).to(tl.float32) - mean) * rstd
        if HAS_WEIGHT:
            value = value * tl.load(weight + start + lanes, mask=is_in, other=0.0).to(tl.float32)
        if HAS_BIAS:
            value = value + tl.load(bias + start + lanes, mask=is_in, other=0.0).to(tl.float32)
        tl.store(out + start + lanes, value.to(out.dtype.element_ty), mask=is_in)
    if HAS_MOMENTS:
        tl.store(rstd_out + row, rstd)
        if not IS_RMS:
            tl.store(mean_out + row, mean)


@triton.jit(do_not_specialize=["n", "stride"], do_not_specialize_on_alignment=["x", "out"])
def cumsum_kernel(x, out, n, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    x += row * stride
    out += row * n
    before = 0.0
    for start in range(0, n, BLOCK):
        is_in = start + lanes < n
        values = tl.load(x + start + lanes, mask=is_in, other=0.0).to(tl.float32)
        tl.store(out + start + lanes, (before + tl.cumsum(values, 0)).to(out.dtype.element_ty), mask=is_in)
        before += tl.sum(values, 0)


@triton.jit(do_not_specialize=["n", "stride"], do_not_specialize_on_alignment=["x", "out"])
def argmax_kernel(x, out, n, stride, BLOCK: tl.constexpr):
    """The lowest index of the largest number; NaN is larger than any, as in torch."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    x += row * stride
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    places = tl.full((BLOCK,), 2147483647, tl.int32)
    for start in range(0, n, BLOCK):
        is_in = start + lanes < n
        values = tl.load(x + start + lanes, mask=is_in, other=float("-inf")).to(tl.float32)
        is_better = (values > best) | ((values != values) & (best == best)) | (places == 2147483647)
        is_better = is_better & is_in
        best = tl.where(is_better, values, best)
        places = tl.where(is_better, start + lanes, places)
    is_nan = (best != best) & (places != 2147483647)
    nan_place = tl.min(tl.where(is_nan, places, 2147483647), 0)
    peak = tl.max(tl.where(is_nan, float("-inf"), best), 0)
    place = tl.min(tl.where(best == peak, places, 2147483647), 0)
    place = tl.where(nan_place != 2147483647, nan_place, place)
    tl.store(out + row, place.to(tl.int64))


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["out", "source", "order", "starts"])
def add_by_index_kernel(out, source, order, starts, n, BLOCK: tl.constexpr):
    """out [rows, n] += the rows of source in `order` from starts[row] to starts[row + 1], one after the other."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < n
    first = tl.load(starts + row)
    end = tl.load(starts + row + 1)
    if end > first:
        places = out + row * n + columns
        acc = tl.load(places, mask=is_column, other=0.0).to(tl.float32)
        for index in range(first, end):
            source_row = tl.load(order + index)
            acc += tl.load(source + source_row * n + columns, mask=is_column, other=0.0).to(tl.float32)
        tl.store(places, acc.to(out.dtype.element_ty), mask=is_column)


@triton.jit(do_not_specialize=["num_rows"])
def silu_and_mul_kernel(gate, up, out, num_rows, n, gate_stride, up_stride, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_in = places < num_rows.to(tl.int64) * n
    rows = places // n
    columns = places % n
    g = tl.load(gate + rows * gate_stride + columns, mask=is_in, other=0.0).to(tl.float32)
    u = tl.load(up + rows * up_stride + columns, mask=is_in, other=0.0).to(tl.float32)
    activated = (g / (1.0 + tl.exp(-g))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + places, (activated * u).to(out.dtype.element_ty), mask=is_in)


@triton.jit(do_not_specialize=["num_heads"])
def rotary_kernel(
    x, cosines, sines, out, num_heads, n, token_stride, head_stride, angle_stride,
    HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Turns the first 2 x HALF numbers of a token's head, copies the rest; halves as in transformers' rotate_half."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    lanes = tl.arange(0, BLOCK)
    is_in = lanes < n
    is_turned = lanes < 2 * HALF
    partner = tl.where(lanes < HALF, lanes + HALF, lanes - HALF)
    x += token * token_stride + head * head_stride
    value = tl.load(x + lanes, mask=is_in, other=0.0).to(tl.float32)
    other = tl.load(x + partner, mask=is_in & is_turned, other=0.0).to(tl.float32)
    cosine = tl.load(cosines + token * angle_stride + lanes, mask=is_turned, other=1.0).to(tl.float32)
    sine = tl.load(sines + token * angle_stride + lanes, mask=is_turned, other=0.0).to(tl.float32)
    turned = value * cosine + tl.where(lanes < HALF, -other, other) * sine
    result = tl.where(is_turned, turned, value)
    tl.store(out + (token * num_heads + head) * n + lanes, result.to(out.dtype.element_ty), mask=is_in)


# -- launches --------------------------------------------------------------------------------------------

_any_norm_kernel = for_any_alignment(norm_kernel)
_any_silu_and_mul_kernel = for_any_alignment(silu_and_mul_kernel)
_any_rotary_kernel = for_any_alignment(rotary_kernel)


def sum_rows(
    x: torch.Tensor,
    dims: Sequence[int] = (),
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    *,
    mode: str = "sum",
) -> torch.Tensor:
    """The sum (or, by mode, the "mean") of x along `dims`, all of them if empty; dtype: of the result, x's if None."""
    dims = _ascending(dims, x.dim())
    dtype = dtype or x.dtype
    if x.numel() == 0:
        return (torch.mean if mode == "mean" else torch.sum)(x, dims, keepdim, dtype=dtype)
    shape = _reduced_shape(x, dims, keepdim)
    if dims[-1] == x.dim() - 1 or dims != [*range(dims[0], dims[-1] + 1)]:
        rows = _as_rows(x, dims)
        return _sum_of_rows(rows, mode, 0.0, dtype).view(shape)
    n, inner = _size(x, dims), _size(x, range(dims[-1] + 1, x.dim()))
    outer = x.numel() // (n * inner)
    out = x.new_empty(shape, dtype=dtype)
    sum_columns_kernel[(outer, -(-inner // _COLUMN_BLOCK))](
        x.contiguous(), out, n, inner, MODE=mode, BLOCK=_COLUMN_BLOCK, num_warps=4
    )
    return out


def mean(
    x: torch.Tensor, dims: Sequence[int] = (), keepdim: bool = False, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The mean of x along `dims`, as `sum_rows`."""
    return sum_rows(x, dims, keepdim, dtype, mode="mean")


def variance(
    x: torch.Tensor, dims: Sequence[int] = (), correction: float = 1, keepdim: bool = False
) -> torch.Tensor:
    """The sum of squared distances from the mean along `dims`, over their number less `correction`; float32."""
    dims = _ascending(dims, x.dim())
    if x.numel() == 0:
        return torch.var(x, dims, correction=correction, keepdim=keepdim).float()
    variances = _sum_of_rows(_as_rows(x, dims), "var", float(correction), torch.float32)
    return variances.view(_reduced_shape(x, dims, keepdim))


def softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Computed in float32; dtype: of the result, x's if None."""
    return _softmax(x, dim, dtype, "softmax")


def log_softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Computed in float32; dtype: of the result, x's if None."""
    return _softmax(x, dim, dtype, "log_softmax")


def logsumexp(x: torch.Tensor, dims: Sequence[int], keepdim: bool = False) -> torch.Tensor:
    """log(sum(exp(x))) along `dims`."""
    dims = _ascending(dims, x.dim())
    if x.numel() == 0:
        return torch.logsumexp(x, dims, keepdim)
    rows = _as_rows(x, dims)
    out = x.new_empty(len(rows))
    softmax_kernel[(len(rows),)](
        rows, out, rows.shape[1], rows.stride(0), MODE="logsumexp", BLOCK=_SOFTMAX_BLOCK, num_warps=4
    )
    return out.view(_reduced_shape(x, dims, keepdim))


def cumsum(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Sums of the numbers up to each along `dim`, in float32; dtype: of the result, x's if None."""
    moved = x.movedim(dim, -1) if x.dim() else x[None]
    out = torch.empty(moved.shape, dtype=dtype or x.dtype, device=x.device)
    if x.numel():
        rows = _as_rows(moved, [moved.dim() - 1])
        cumsum_kernel[(len(rows),)](
            rows, out, rows.shape[1], rows.stride(0), BLOCK=_SOFTMAX_BLOCK, num_warps=4
        )
    return out.movedim(-1, dim).contiguous() if x.dim() else out[0]


def argmax(x: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> torch.Tensor:
    """The lowest index of the largest number along `dim`, or of the flattened x."""
    dims = [*range(x.dim())] if dim is None else [dim % x.dim()]
    if x.numel() == 0 or x.dim() == 0:
        return torch.argmax(x, dim, keepdim)
    rows = _as_rows(x, dims)
    out = torch.empty(len(rows), dtype=torch.int64, device=x.device)
    block = min(max(_power_of_2(rows.shape[1]), 64), 4096)
    argmax_kernel[(len(rows),)](
        rows, out, rows.shape[1], rows.stride(0), BLOCK=block, num_warps=8 if block > 1024 else 4
    )
    return out.view(_reduced_shape(x, dims, keepdim))


def layer_norm(
    x: torch.Tensor, n: int, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of x's last n numbers -> the normed x, and the float32 mean and 1 / deviation of each row."""
    return _norm(x, n, weight, bias, None, eps, is_rms=False)[:3]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows of the last dimension over their root mean square x weight, the sum x + residual or x).

    Everything in float32 with one rounding; the sum with the residual is rounded to x's dtype first.
    """
    normed, _, _, total = _norm(x, x.shape[-1], weight, None, residual, eps, is_rms=True)
    return normed, total


def rms_norm_moments(
    x: torch.Tensor, n: int, weight: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of x's last n numbers over their root mean square x weight, and 1 / the float32 root of each row."""
    normed, _, rstd, _ = _norm(x, n, weight, None, None, eps, is_rms=True)
    return normed, rstd


def add_by_index(out: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """out [rows, ...] += source [count, ...] at index [count], in place; the rows of one index in order of source.

    A row's sum is float32 and rounded once.
    """
    if source.numel() == 0:
        return out
    rows = out.reshape(len(out), -1).contiguous()
    index, order = torch.sort(index.to(torch.int64), stable=True)
    starts = torch.searchsorted(index, torch.arange(len(out) + 1, device=out.device))
    n = rows.shape[1]
    add_by_index_kernel[(len(out), -(-n // _COLUMN_BLOCK))](
        rows, source.reshape(len(source), -1).contiguous(), order, starts, n, BLOCK=_COLUMN_BLOCK, num_warps=4
    )
    return out if rows.data_ptr() == out.data_ptr() else out.copy_(rows.view(out.shape))


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate), rounded, x up; any leading dimensions, views of one fused product among them."""
    n = gate.shape[-1]
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel():
        gate, up = _as_rows(gate, [gate.dim() - 1]), _as_rows(up, [up.dim() - 1])
        kernel = silu_and_mul_kernel if _is_aligned(gate, up) else _any_silu_and_mul_kernel
        kernel[(-(-out.numel() // _ELEMENT_BLOCK),)](
            gate, up, out, len(gate), n, gate.stride(0), up.stride(0), BLOCK=_ELEMENT_BLOCK, num_warps=4
        )
    return out


def rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, n] turned by angles [tokens, width] of its first `width` numbers, halves against each other.

    As transformers' `apply_rotary_pos_emb` (cosines and sines have each angle twice), with one rounding.
    """
    tokens, heads, n = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        x = x if x.stride(2) == 1 else x.contiguous()
        cosines, sines = cosines.contiguous(), sines.contiguous()
        kernel = rotary_kernel if _is_aligned(x, cosines, sines) else _any_rotary_kernel
        kernel[(tokens, heads)](
            x, cosines, sines, out, heads, n, x.stride(0), x.stride(1), cosines.shape[1],
            HALF=cosines.shape[1] // 2, BLOCK=_power_of_2(n), num_warps=1,
        )  # fmt: skip
    return out


def variants() -> Iterator[KernelVariant]:
    """Each kernel in each mode, for each dtype."""
    for dtype in ("bf16", "fp16", "fp32"):
        x = {"x": f"*{dtype}", "out": f"*{dtype}"}
        row = {**x, "n": "i32", "stride": "i32"}
        for block in (128, 1024):
            for mode in ("sum", "mean", "var"):
                yield _variant(
                    sum_kernel, f"{mode}_{dtype}_{block}", {**row, "correction": "fp32"}, (), block, MODE=mode
                )
        for mode in ("sum", "mean"):
            types = {**x, "n": "i32", "inner": "i32"}
            name = f"{mode}_columns_{dtype}"
            yield _variant(sum_columns_kernel, name, types, (), _COLUMN_BLOCK, MODE=mode)
        for mode in ("softmax", "log_softmax", "logsumexp"):
            yield _variant(softmax_kernel, f"{mode}_{dtype}", row, (), _SOFTMAX_BLOCK, MODE=mode)
        yield _variant(cumsum_kernel, f"cumsum_{dtype}", row, (), _SOFTMAX_BLOCK)
        for block in (64, 4096):
            types = {**row, "out": "*i64"}
            yield _variant(argmax_kernel, f"argmax_{dtype}_{block}", types, (), block)
        for is_rms in (True, False):
            for has_residual in (True, False) if is_rms else (False,):
                for is_aligned in (True, False):
                    for block in (128, _MAX_BLOCK if is_aligned else _MAX_UNALIGNED_BLOCK):
                        yield _norm_variant(dtype, is_rms, has_residual, block, is_aligned)
        types = {"out": f"*{dtype}", "source": f"*{dtype}", "order": "*i64", "starts": "*i64", "n": "i32"}
        yield _variant(add_by_index_kernel, f"add_by_index_{dtype}", types, (), _COLUMN_BLOCK)
        types = {"gate": f"*{dtype}", "up": f"*{dtype}", "out": f"*{dtype}"}
        types |= dict.fromkeys(("num_rows", "n", "gate_stride", "up_stride"), "i32")
        divisible = tuple(name for name in types if name != "num_rows")
        yield _variant(silu_and_mul_kernel, f"silu_and_mul_{dtype}", types, divisible, _ELEMENT_BLOCK)
        name = f"silu_and_mul_{dtype}_unaligned"
        yield _variant(_any_silu_and_mul_kernel, name, types, (), _ELEMENT_BLOCK)
        types = {"x": f"*{dtype}", "cosines": f"*{dtype}", "sines": f"*{dtype}", "out": f"*{dtype}"}
        types |= dict.fromkeys(("num_heads", "n", "token_stride", "head_stride", "angle_stride"), "i32")
        divisible = tuple(name for name in types if name != "num_heads")
        for width in (64, 128):
            yield _variant(rotary_kernel, f"rotary_{dtype}_{width}", types, divisible, width, HALF=width // 2)
        yield _variant(_any_rotary_kernel, f"rotary_{dtype}_unaligned", types, (), 128, HALF=40)


def _variant(
    kernel: Any, name: str, types: dict[str, str], divisible: tuple[str, ...], block: int, **constants: object
) -> KernelVariant:
    warps = {
        argmax_kernel: 8 if block > 1024 else 4,
        rotary_kernel: 1,
        _any_rotary_kernel: 1,
        sum_kernel: _warps(block),
    }
    return KernelVariant(
        kernel, name, types, {**constants, "BLOCK": block}, divisible, warps.get(kernel, 4), _NUM_STAGES
    )


def _norm_variant(
    dtype: str, is_rms: bool, has_residual: bool, block: int, is_aligned: bool
) -> KernelVariant:
    pointers = dict.fromkeys(["x", "weight", "bias", "residual", "out", "total_out"], f"*{dtype}")
    pointers |= {"mean_out": "*fp32", "rstd_out": "*fp32"}
    constants: dict[str, object] = {
        "IS_RMS": is_rms,
        "HAS_WEIGHT": True,
        "HAS_BIAS": not is_rms,
        "HAS_RESIDUAL": has_residual,
        "HAS_MOMENTS": not has_residual,
        "BLOCK": block,
    }
    absent = ["bias"] * is_rms + ["residual", "total_out"] * (not has_residual)
    for name in absent:
        del pointers[name]
        constants[name] = None
    name = f"{'rms' if is_rms else 'layer'}_norm{'_residual' if has_residual else ''}_{dtype}_{block}"
    types = {**pointers, "n": "i32", "stride": "i32", "eps": "fp32"}
    divisible = (*pointers, "n", "stride") if is_aligned else ()
    return KernelVariant(
        norm_kernel if is_aligned else _any_norm_kernel,
        name if is_aligned else name + "_unaligned",
        types,
        constants,
        divisible,
        _warps(block),
        _NUM_STAGES,
    )


def version() -> str:
    """Changes with the sources of these kernels."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]


def _softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None, mode: str) -> torch.Tensor:
    moved = x.movedim(dim, -1) if x.dim() else x[None]
    out = torch.empty(moved.shape, dtype=dtype or x.dtype, device=x.device)
    if x.numel():
        rows = _as_rows(moved, [moved.dim() - 1])
        softmax_kernel[(len(rows),)](
            rows, out, rows.shape[1], rows.stride(0), MODE=mode, BLOCK=_SOFTMAX_BLOCK, num_warps=4
        )
    return out.movedim(-1, dim).contiguous() if x.dim() else out[0]


def _sum_of_rows(rows: torch.Tensor, mode: str, correction: float, dtype: torch.dtype) -> torch.Tensor:
    out = rows.new_empty(len(rows), dtype=dtype)
    block = _block(rows.shape[1], 1024)
    sum_kernel[(len(rows),)](
        rows, out, rows.shape[1], rows.stride(0), correction, MODE=mode, BLOCK=block, num_warps=_warps(block)
    )
    return out


def _norm(
    x: torch.Tensor,
    n: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
    is_rms: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The normed x, mean and 1 / deviation of each row, and x + residual."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows = x.numel() // n if n else 0
    means, rstds = (torch.empty(num_rows, dtype=torch.float32, device=x.device) for _ in range(2))
    total = x if residual is None else torch.empty_like(out)
    if num_rows:
        is_aligned = n % 16 == 0
        rows = _with_unit_stride(x.reshape(num_rows, n))
        rest = [None if tensor is None else tensor.contiguous() for tensor in (weight, bias, residual)]
        if is_aligned:
            rows = rows if rows.stride(0) % 16 == 0 else rows.contiguous()
            rows, *rest = (_at_16_bytes(tensor) for tensor in (rows, *rest))
        block = _block(n, _MAX_BLOCK if is_aligned else _MAX_UNALIGNED_BLOCK)
        kernel = norm_kernel if is_aligned else _any_norm_kernel
        kernel[(num_rows,)](
            rows, *rest, out, None if residual is None else total, means, rstds,
            n, rows.stride(0) if num_rows > 1 else n, eps,
            IS_RMS=is_rms, HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None, HAS_MOMENTS=residual is None, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return out, means, rstds, total


def _as_rows(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """x as [rows, n]: `dims`, ascending, become the last dimension, whose numbers are adjacent. A view if it can be."""
    rest = [dim for dim in range(x.dim()) if dim not in dims]
    rows = x.permute(*rest, *dims).reshape(-1, _size(x, dims))
    return _with_unit_stride(rows)


def _with_unit_stride(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def _at_16_bytes(x: torch.Tensor | None) -> Any:
    """x at an aligned address, or None."""
    return x if x is None or x.data_ptr() % 16 == 0 else x.clone()


def _is_aligned(*tensors: torch.Tensor) -> bool:
    """Whether 16 bytes of the last dimension, of adjacent numbers, can be loaded at once in every row."""
    for x in tensors:
        if x.data_ptr() % 16 or x.shape[-1] % 16 or any(stride % 16 for stride in x.stride()[:-1]):
            return False
    return True


def _ascending(dims: Sequence[int], num_dims: int) -> list[int]:
    return sorted(dim % num_dims for dim in dims) if dims else [*range(num_dims)]


def _reduced_shape(x: torch.Tensor, dims: Sequence[int], keepdim: bool) -> list[int]:
    sizes = ((dim, size) for dim, size in enumerate(x.shape) if keepdim or dim not in dims)
    return [1 if dim in dims else size for dim, size in sizes]


def _size(x: torch.Tensor, dims: Sequence[int]) -> int:
    count = 1
    for dim in dims:
        count *= x.shape[dim]
    return count


def _block(n: int, most: int) -> int:
    return min(max(_power_of_2(n), 32), most)


def _power_of_2(n: int) -> int:
    """The lowest that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def _warps(block: int) -> int:
    return 1 if block <= 128 else 4
