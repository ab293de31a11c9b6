# ruff: noqa: SIM102
# pyright: reportCallIssue=false, reportAssignmentType=false
"""Products of rows with a quantized weight, whose codes are widened in the kernel.

    out[r, n] = round(acc + bias[n]), where in float32
    acc = 0; for each group g in order: acc = acc + scale[n, g] * s, and with minimums acc = acc - minimum[n, g] * t
    s   = the sum of x[r, k] * value[n, k] over the group, in steps of 32 inputs (16 in groups of 16), each a `tl.dot`
          onto the sum before
    t   = s with 1 for every value
    value = code - zero, the table's entry of the code, or the code, in the dtype of x


A table whose entries the dtype of x does not have (the quantiles of nf4 in 16 bits) is two: each entry rounded, and the
rest; s is then a sum of two `tl.dot` a step. `laid_out_codes` has the layout, `quire.weights.codes.quantized_reference`
is the twin; inside a group it adds in the order of a processor's units, so that results are close and not equal.

Invariants
    X1  the order of a sum depends on the form of the weight: never on the number of rows, or the tile.
    X2  tiles keep to one kind of matrix instruction (`product_kernels`, P3).

Cost: a launch; a half or one byte a value is read for all rows of a tile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import _disable_current_modes

from quire.devices.cuda import laid_out_codes
from quire.devices.cuda.kernel_variants import TARGETS, KernelVariant
from quire.devices.cuda.laid_out_codes import OUTPUT_UNIT, LaidOutCodes
from quire.devices.cuda.product_kernels import Tile, architecture_of
from quire.errors import ArgumentError

__all__ = ["DeviceCodes", "variants", "version"]

# Architecture and bytes of a number -> rows up to which the tile serves.
CODE_TILES: dict[tuple[str, int], tuple[tuple[int, Tile], ...]] = {
    ("sm_80", 2): ((16, Tile(16, 32, 4, 4)), (1 << 62, Tile(64, 64, 4, 3))),
    ("sm_86", 2): ((16, Tile(16, 32, 4, 4)), (1 << 62, Tile(64, 64, 4, 3))),
    ("sm_90", 2): ((64, Tile(64, 32, 4, 4)), (1 << 62, Tile(128, 64, 8, 3))),
    ("sm_100", 2): ((1 << 62, Tile(128, 32, 8, 3)),),
    ("gfx942", 2): ((32, Tile(32, 32, 4, 2)), (1 << 62, Tile(64, 64, 4, 2))),
    ("sm_80", 4): ((1 << 62, Tile(16, 32, 4, 3)),),
    ("sm_86", 4): ((1 << 62, Tile(16, 32, 4, 3)),),
    ("sm_90", 4): ((1 << 62, Tile(16, 32, 4, 3)),),
    ("sm_100", 4): ((1 << 62, Tile(16, 32, 4, 3)),),
    ("gfx942", 4): ((1 << 62, Tile(32, 32, 4, 2)),),
}


@triton.jit
def _values(
    codes,
    zeros,
    table,
    HAS_ZEROS: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    ZERO: tl.constexpr,
    DTYPE: tl.constexpr,
):
    if HAS_TABLE:
        return tl.load(table + codes.to(tl.int32))
    values = codes.to(tl.float32) - ZERO
    if HAS_ZEROS:
        values = values - zeros[None, :]
    return values.to(DTYPE)


@triton.jit(do_not_specialize=["M", "N", "n_units", "k_units", "num_groups"])
def code_product_kernel(
    x,  # [M, K] contiguous
    codes,  # uint8 [steps, STEP, width], or two steps in a byte (IS_PACKED)
    scales,  # [groups, width] of any dtype, as zeros and minimums
    zeros,
    minimums,
    table,  # of the dtype of x, [codes] or [2, codes]
    bias,
    out,
    M,
    N,
    n_units,  # width / N_UNIT
    k_units,  # K / K_UNIT
    num_groups,
    GROUP_STEPS: tl.constexpr,  # steps of a group, 0: one group
    IS_PACKED: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    TABLE_REST: tl.constexpr,  # place of the table's second half, 0: it has one
    ZERO: tl.constexpr,  # of all codes
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
    K_UNIT: tl.constexpr,
    N_UNIT: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    width = n_units * N_UNIT
    K = k_units * K_UNIT
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, STEP)
    is_row = (rows < M)[:, None]
    is_column = columns < N
    x_tile = x + rows.to(tl.int64)[:, None] * K + ks[None, :]
    code_tile = codes + ks.to(tl.int64)[:, None] * width + columns[None, :]
    dtype: tl.constexpr = tl.float32 if UPCAST else x.dtype.element_ty
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    total_x = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    ones = tl.full((STEP, BLOCK_N), 1.0, dtype)
    zero = tl.zeros((BLOCK_N,), tl.float32)
    PER_LOAD: tl.constexpr = 2 if IS_PACKED else 1
    num_steps = tl.cdiv(K, STEP)
    for load in range(0, tl.cdiv(num_steps, PER_LOAD)):
        loaded = tl.load(code_tile, mask=is_column[None, :], other=0)
        code_tile += STEP * width
        for part in tl.static_range(PER_LOAD):
            step = load * PER_LOAD + part
            group = 0
            if GROUP_STEPS > 0:
                group = step // GROUP_STEPS
            if HAS_ZEROS:
                is_group = is_column & (group < num_groups)
                zero = tl.load(zeros + group * width + columns, mask=is_group, other=0).to(tl.float32)
            step_codes = loaded
            if IS_PACKED:
                step_codes = loaded & 15
                if part == 1:
                    step_codes = loaded >> 4
            left = tl.load(x_tile, mask=is_row & (step * STEP + ks < K)[None, :], other=0.0).to(dtype)
            x_tile += STEP
            right = _values(step_codes, zero, table, HAS_ZEROS, HAS_TABLE, ZERO, dtype)
            total = tl.dot(left, right, total, input_precision="ieee")
            if TABLE_REST > 0:
                rest = tl.load(table + TABLE_REST + step_codes.to(tl.int32))
                total = tl.dot(left, rest, total, input_precision="ieee")
            if HAS_MINIMUMS:
                total_x = tl.dot(left, ones, total_x, input_precision="ieee")
            if GROUP_STEPS > 0:
                if step % GROUP_STEPS == GROUP_STEPS - 1:
                    is_group = is_column & (group < num_groups)
                    scale = tl.load(scales + group * width + columns, mask=is_group, other=0.0)
                    acc += scale.to(tl.float32)[None, :] * total
                    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                    if HAS_MINIMUMS:
                        minimum = tl.load(minimums + group * width + columns, mask=is_group, other=0.0)
                        acc -= minimum.to(tl.float32)[None, :] * total_x
                        total_x = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if GROUP_STEPS == 0:
        acc = tl.load(scales + columns, mask=is_column, other=0.0).to(tl.float32)[None, :] * total
        if HAS_MINIMUMS:
            acc -= tl.load(minimums + columns, mask=is_column, other=0.0).to(tl.float32)[None, :] * total_x
    if HAS_BIAS:
        acc += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    places = rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(out + places, acc.to(out.dtype.element_ty), mask=is_row & is_column[None, :])


_IS_INTERPRETED = not isinstance(code_product_kernel, triton.runtime.JITFunction)


class DeviceCodes(LaidOutCodes):
    """`LaidOutCodes` multiplied by the kernel: bits of a row depend on that row alone."""

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        self._kernel_table, self._table_rest = _table_in(self.dtype, self._table)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [..., num_inputs] of `dtype`, bias [num_outputs] or None -> [..., num_outputs]."""
        inputs = self.num_inputs
        if x.dim() == 0 or x.shape[-1] != inputs or x.dtype is not self.dtype:
            raise ArgumentError(
                f"expected x [..., {inputs}] of {self.dtype}, got {list(x.shape)} of {x.dtype}"
            )
        rows = x.reshape(-1, inputs)
        rows = rows.contiguous() if self._order is None else rows[:, self._order]
        rows = rows if rows.data_ptr() % 16 == 0 else rows.clone()
        out = rows.new_empty((len(rows), self.num_outputs))
        if len(rows):
            # The interpreter copies tensors by torch's operators, which an exact mode would judge.
            with _disable_current_modes() if _IS_INTERPRETED else nullcontext():
                self._launch(rows, bias, out, self._tile(len(rows)))
        return out.view(*x.shape[:-1], self.num_outputs)

    def _tile(self, num_rows: int) -> Tile:
        key = architecture_of(self._codes.device), self.dtype.itemsize
        return next(tile for rows, tile in CODE_TILES[key] if rows >= num_rows)

    def _launch(self, rows: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tile: Tile) -> None:
        k_unit = 16 if self.num_inputs % 16 == 0 else 1
        bias = None if bias is None else bias.contiguous()
        bias = bias if bias is None or bias.data_ptr() % 16 == 0 else bias.clone()
        code_product_kernel[(-(-self.num_outputs // tile.block_n), -(-len(rows) // tile.block_m))](
            rows, self._codes, self._scales, self._zeros, self._minimums, self._kernel_table, bias, out,
            len(rows), self.num_outputs, self._codes.shape[-1] // OUTPUT_UNIT, self.num_inputs // k_unit,
            self._scales.shape[0], GROUP_STEPS=self._group_steps, IS_PACKED=self._is_packed,
            HAS_ZEROS=self._zeros is not None, HAS_MINIMUMS=self._minimums is not None,
            HAS_TABLE=self._table is not None, TABLE_REST=self._table_rest, ZERO=self._zero,
            HAS_BIAS=bias is not None, UPCAST=_IS_INTERPRETED and self.dtype is torch.bfloat16, K_UNIT=k_unit,
            N_UNIT=OUTPUT_UNIT, STEP=self._step, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip


def _table_in(dtype: torch.dtype, table: torch.Tensor | None) -> tuple[torch.Tensor | None, int]:
    """The kernel's table in `dtype` and the place of its second half; 0 if `dtype` has each entry (also NaN)."""
    if table is None:
        return None, 0
    rounded = table.to(dtype)
    rest = (table - rounded.float()).nan_to_num(0.0, 0.0, 0.0)
    return (torch.cat((rounded, rest.to(dtype))), len(table)) if bool(rest.any()) else (rounded, 0)


def variants() -> Iterator[KernelVariant]:
    """Each tile with packed and whole bytes; zeros, minimums and tables with the first."""
    for (arch, num_bytes), by_rows in CODE_TILES.items():
        if arch not in TARGETS:
            continue
        for dtype in ("bf16", "fp16") if num_bytes == 2 else ("fp32",):
            for index, (_, tile) in enumerate(by_rows):
                for is_packed in (True, False):
                    yield _variant(arch, dtype, tile, is_packed, 0)
                    yield _variant(arch, dtype, tile, is_packed, 4)
                    if index == 0:
                        for part in ("zeros", "minimums", "table", "two tables"):
                            yield _variant(arch, dtype, tile, is_packed, 1, part)


def _variant(
    arch: str, dtype: str, tile: Tile, is_packed: bool, group_steps: int, part: str = ""
) -> KernelVariant:
    scale = "*fp32" if dtype == "fp32" or part == "minimums" else "*fp16"
    pointers = {"x": f"*{dtype}", "codes": "*u8", "scales": scale, "zeros": "*u8", "minimums": scale}
    pointers |= {"table": f"*{dtype}", "bias": f"*{dtype}", "out": f"*{dtype}"}
    name = "table" if part == "two tables" else part
    absent = [optional for optional in ("zeros", "minimums", "table", "bias") if optional != name]
    constants: dict[str, object] = {}
    for optional in absent:
        del pointers[optional]
        constants[optional] = None
    constants |= {
        "GROUP_STEPS": group_steps,
        "IS_PACKED": is_packed,
        "HAS_ZEROS": part == "zeros",
        "HAS_MINIMUMS": part == "minimums",
        "HAS_TABLE": name == "table",
        "TABLE_REST": 0 if part != "two tables" else 16 if is_packed else 256,
        "ZERO": 0.0 if part else 8.0 if is_packed else 128.0,
        "HAS_BIAS": False,
        "UPCAST": False,
        "K_UNIT": 16,
        "N_UNIT": OUTPUT_UNIT,
        "STEP": 32,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
    }
    form = f"{'packed' if is_packed else 'bytes'}_{group_steps}{'_' + part.replace(' ', '_') if part else ''}"
    return KernelVariant(
        code_product_kernel,
        f"code_product_{arch}_{dtype}_{tile.block_m}x{tile.block_n}_{form}",
        {**pointers, **dict.fromkeys(["M", "N", "n_units", "k_units", "num_groups"], "i32")},
        constants,
        divisible=tuple(pointers),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        targets=(arch,),
        promises=() if dtype == "fp32" else ("tensor_core",),
        tags={"codes": form},
    )


def version() -> str:
    """Changes with the tiles and the sources of this kernel and of the layout that it reads."""
    sources = (__file__, laid_out_codes.__file__)
    return hashlib.sha256(b"".join(Path(source).read_bytes() for source in sources)).hexdigest()[:16]
