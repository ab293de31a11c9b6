# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: SIM102
"""Products whose sums have one order: out[m, n] = round(sum of a[m, k] x b[k, n] in order of k, + bias[n]).

    multiply           [M, K] x [K, N], one weight for all rows
    multiply_batch     [batch, M, K] x [batch, K, N]
    multiply_groups    [rows, K] x [groups, K, N], where consecutive rows belong to one group (an expert)

The order: tiles of BLOCK_K from k = 0, each a `tl.dot` onto the float32 sum of the tiles before; after SLICE numbers
the sum is added to a float32 total and begins again at 0; then the bias; then one rounding. For few rows the slices may
be computed in programs of their own (`is_apart`) and added in order afterwards, which are the same additions.

Invariants
    P1  the order of a sum depends on K and the dtype alone: never on M, N, the batch, the strides or the tile.
    P2  zeros behind the last nonzero k change no bit, so a padded row of K has the bits of the row without padding.
    P3  rows choose a tile of `TILES`, where all tiles of one architecture and dtype use one kind of matrix instruction:
        wgmma on sm_90 (from 64 rows on), tcgen05 on sm_100 (128) and mfma of 32 rows (32 and 32 columns) are other
        instructions than those of smaller tiles, so there is no smaller tile. No card has shown that two of them round
        alike.
    P4  no element outside of a, b and bias is read.

float32 is multiplied as IEEE float32 (no TF32), bfloat16 and float16 exactly; every sum is float32.

Cost: a launch, two if the slices are apart (and rows x N x slices x 4 bytes). Operands of which neither dimension is
contiguous are copied. The current CUDA device must be that of the operands.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.devices.cuda.kernel_alignment import for_any_alignment
from quire.devices.cuda.kernel_variants import TARGETS, KernelVariant

__all__ = [
    "TILES",
    "UNALIGNED_TILES",
    "Tile",
    "architecture_of",
    "choose_tile",
    "multiply",
    "multiply_batch",
    "multiply_groups",
    "variants",
    "version",
]

SLICE = 1024  # numbers of K that are summed before the total takes them
_MAX_BATCH = 65535  # of the third axis of a grid
_MERGE_BLOCK = 1024


class Tile(NamedTuple):
    """The part of the result that a program computes, and the launch options for it."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# (architecture, bytes of a number) -> (rows of the product up to which the tiles serve, tiles, the widest first).
# Checked in, never tuned at run time. Not yet measured on a card.
_ALL = 1 << 62
_AMPERE = (
    (16, (Tile(16, 128, 4, 4), Tile(16, 64, 4, 5), Tile(16, 32, 2, 6))),
    (32, (Tile(32, 128, 4, 4), Tile(32, 64, 4, 5), Tile(32, 32, 4, 5))),
    (64, (Tile(64, 128, 8, 4), Tile(64, 64, 4, 4), Tile(64, 32, 4, 5))),
    (_ALL, (Tile(128, 128, 8, 3), Tile(128, 64, 4, 3))),
)
_ADA = (
    (16, (Tile(16, 128, 4, 4), Tile(16, 64, 4, 5), Tile(16, 32, 2, 6))),
    (32, (Tile(32, 64, 4, 5), Tile(32, 32, 4, 5))),
    (64, (Tile(64, 128, 8, 3), Tile(64, 64, 4, 4), Tile(64, 32, 4, 5))),
    (_ALL, (Tile(128, 128, 8, 2), Tile(128, 64, 4, 3))),
)
_HOPPER = (
    (64, (Tile(64, 128, 4, 4), Tile(64, 64, 4, 5), Tile(64, 32, 4, 6), Tile(64, 16, 4, 8))),
    (_ALL, (Tile(128, 128, 8, 3), Tile(128, 64, 4, 4))),
)
_BLACKWELL = ((_ALL, (Tile(128, 128, 8, 4), Tile(128, 64, 4, 5), Tile(128, 32, 8, 5))),)
_MFMA = (
    (32, (Tile(32, 128, 4, 2), Tile(32, 64, 4, 2), Tile(32, 32, 2, 2))),
    (64, (Tile(64, 128, 4, 2), Tile(64, 64, 4, 2))),
    (_ALL, (Tile(128, 128, 8, 2), Tile(128, 64, 4, 2))),
)
_FLOAT32 = (
    (16, (Tile(16, 64, 4, 3), Tile(16, 32, 2, 4))),
    (_ALL, (Tile(64, 64, 8, 3), Tile(64, 32, 4, 3))),
)
_FLOAT32_BLACKWELL = (
    (16, (Tile(16, 32, 4, 3),)),
    (_ALL, (Tile(32, 32, 4, 3),)),
)
_FLOAT32_MFMA = (
    (32, (Tile(32, 64, 4, 2), Tile(32, 32, 2, 2))),
    (_ALL, (Tile(64, 64, 4, 2),)),
)
TILES: dict[tuple[str, int], tuple[tuple[int, tuple[Tile, ...]], ...]] = {
    ("sm_80", 2): _AMPERE,
    ("sm_86", 2): _ADA,  # and 89, 120: 99 KiB of shared memory
    ("sm_90", 2): _HOPPER,
    ("sm_100", 2): _BLACKWELL,
    ("gfx942", 2): _MFMA,
    ("sm_80", 4): _FLOAT32,
    ("sm_86", 4): _FLOAT32,
    ("sm_90", 4): _FLOAT32,
    ("sm_100", 4): _FLOAT32_BLACKWELL,
    ("gfx942", 4): _FLOAT32_MFMA,
}
# Of operands whose addresses are not aligned, loaded number by number: the addresses fill the registers.
UNALIGNED_TILES: dict[tuple[str, int], Tile] = {
    ("sm_80", 2): Tile(16, 32, 2, 3),
    ("sm_86", 2): Tile(16, 32, 2, 3),
    ("sm_90", 2): Tile(64, 32, 4, 3),
    ("sm_100", 2): Tile(128, 32, 8, 3),
    ("gfx942", 2): Tile(32, 32, 4, 2),
    ("sm_80", 4): Tile(16, 32, 2, 3),
    ("sm_86", 4): Tile(16, 32, 2, 3),
    ("sm_90", 4): Tile(16, 32, 2, 3),
    ("sm_100", 4): Tile(16, 32, 2, 3),
    ("gfx942", 4): Tile(32, 32, 2, 2),
}
# Programs that fill a card: a narrower tile, then slices apart, are chosen while there are fewer.
_PROGRAMS = {"sm_80": 108, "sm_86": 84, "sm_90": 132, "sm_100": 148, "gfx942": 304}
_BLOCK_K = {2: 64, 4: 32}  # by the bytes of a number: a constant of the order


# -- kernels ---------------------------------------------------------------------------------------------


@triton.jit
def _sum_tiles(
    a_rows,  # [BLOCK_M, 1], pointers to k = 0 of each row
    b_columns,  # [1, BLOCK_N], pointers to k = 0 of each column
    is_row,
    is_column,
    K,
    b_step,
    first,
    end,
    IN_ORDER: tl.constexpr,
    EVEN_K: tl.constexpr,
    UPCAST: tl.constexpr,
    SLICE_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The float32 sum of the tiles first .. end - 1 of K."""
    ks = tl.arange(0, BLOCK_K)
    start = first * BLOCK_K
    a_tile = a_rows + start + ks[None, :]
    b_tile = b_columns + (start + ks[:, None]).to(tl.int64) * b_step
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tile in range(first, end):
        if EVEN_K:
            left = tl.load(a_tile, mask=is_row, other=0.0)
            right = tl.load(b_tile, mask=is_column, other=0.0)
        else:
            is_k = tile * BLOCK_K + ks < K
            left = tl.load(a_tile, mask=is_row & is_k[None, :], other=0.0)
            right = tl.load(b_tile, mask=is_column & is_k[:, None], other=0.0)
        if UPCAST:
            left = left.to(tl.float32)
            right = right.to(tl.float32)
        acc = tl.dot(left, right, acc, input_precision="ieee")
        a_tile += BLOCK_K
        b_tile += BLOCK_K * b_step
        if IN_ORDER:
            if tile % SLICE_TILES == SLICE_TILES - 1:
                total += acc
                acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if IN_ORDER:
        acc += total
    return acc


@triton.jit
def _tile_of(program, num_m, num_n, GROUP: tl.constexpr):
    """Row and column of a program's tile: programs that run together share rows and columns in the second cache."""
    in_group = GROUP * num_n
    first = program // in_group * GROUP
    height = tl.minimum(num_m - first, GROUP)
    return first + program % in_group % height, program % in_group // height


@triton.jit(do_not_specialize=["M", "n_units", "batch_size"])
def product_kernel(
    a,
    b,
    bias,
    out,
    M,
    n_units,  # N / N_UNIT: known as a multiple of it
    K,
    a_stride,  # of a row; its numbers are contiguous
    b_stride,  # of a column (B_BY_COLUMNS) or of a row of b; the other dimension is contiguous
    a_batch_stride,
    b_batch_stride,
    batch_size,
    BIAS: tl.constexpr,  # "none", "columns" [N], "each" [batch, M, N]
    B_BY_COLUMNS: tl.constexpr,
    APART: tl.constexpr,  # out is then the float32 sums [slices, batch, M, N]
    IN_ORDER: tl.constexpr,  # several slices in this program
    EVEN_K: tl.constexpr,
    UPCAST: tl.constexpr,
    N_UNIT: tl.constexpr,
    SLICE_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    N = n_units * N_UNIT
    tile_m, tile_n = _tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), 8)
    batch = tl.program_id(2).to(tl.int64)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = (rows < M)[:, None]
    is_column = (columns < N)[None, :]
    first = 0
    end = tl.cdiv(K, BLOCK_K)
    if APART:
        first = tl.program_id(1) * SLICE_TILES
        end = tl.minimum(end, first + SLICE_TILES)
    a_rows = a + batch * a_batch_stride + rows.to(tl.int64)[:, None] * a_stride
    if B_BY_COLUMNS:
        b_columns = b + batch * b_batch_stride + columns.to(tl.int64)[None, :] * b_stride
        b_step = 1
    else:
        b_columns = b + batch * b_batch_stride + columns[None, :]
        b_step = b_stride
    acc = _sum_tiles(
        a_rows, b_columns, is_row, is_column, K, b_step, first, end,
        IN_ORDER, EVEN_K, UPCAST, SLICE_TILES, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    places = (batch * M + rows)[:, None] * N + columns[None, :]
    is_place = is_row & is_column
    if APART:
        places += tl.program_id(1).to(tl.int64) * batch_size * M * N
    elif BIAS == "columns":
        acc += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    elif BIAS == "each":
        acc += tl.load(bias + places, mask=is_place, other=0.0).to(tl.float32)
    tl.store(out + places, acc.to(out.dtype.element_ty), mask=is_place)


@triton.jit(do_not_specialize=["count", "N", "num_slices"])
def merge_slices_kernel(sums, bias, out, count, N, num_slices, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """The sums [slices, count] of `product_kernel`, added in order of the slices."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_place = places < count
    total = tl.zeros((BLOCK,), tl.float32)
    slice_sums = sums + places
    for _ in range(0, num_slices):
        total += tl.load(slice_sums, mask=is_place, other=0.0)
        slice_sums += count
    if BIAS == "columns":
        total += tl.load(bias + places % N, mask=is_place, other=0.0).to(tl.float32)
    elif BIAS == "each":
        total += tl.load(bias + places, mask=is_place, other=0.0).to(tl.float32)
    tl.store(out + places, total.to(out.dtype.element_ty), mask=is_place)


@triton.jit(do_not_specialize=["num_groups", "n_units"])
def grouped_product_kernel(
    a,
    b,
    ends,  # [groups], the row behind each group's last
    bias,  # [groups, N]
    out,
    num_groups,
    n_units,
    K,
    a_stride,
    b_stride,
    b_group_stride,
    HAS_BIAS: tl.constexpr,
    B_BY_COLUMNS: tl.constexpr,
    IN_ORDER: tl.constexpr,
    EVEN_K: tl.constexpr,
    UPCAST: tl.constexpr,
    N_UNIT: tl.constexpr,
    SLICE_TILES: tl.constexpr,
    GROUPS: tl.constexpr,  # a power of two, at least num_groups
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Tiles are counted group by group; programs behind the last tile end."""
    N = n_units * N_UNIT
    groups = tl.arange(0, GROUPS)
    is_group = groups < num_groups
    lasts = tl.load(ends + groups, mask=is_group, other=0)
    starts = tl.load(ends + groups - 1, mask=is_group & (groups > 0), other=0)
    heights = tl.where(is_group, (lasts - starts + BLOCK_M - 1) // BLOCK_M, 0)
    tiles_before = tl.cumsum(heights, 0) - heights
    tile_m = tl.program_id(0)
    if tile_m < tl.sum(heights, 0):
        is_mine = (tile_m >= tiles_before) & (tile_m < tiles_before + heights)
        group = tl.sum(tl.where(is_mine, groups, 0), 0).to(tl.int64)
        last = tl.sum(tl.where(is_mine, lasts, 0), 0)
        begin = tl.sum(tl.where(is_mine, starts + (tile_m - tiles_before) * BLOCK_M, 0), 0)
        rows = begin + tl.arange(0, BLOCK_M)
        columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_row = (rows < last)[:, None]
        is_column = (columns < N)[None, :]
        a_rows = a + rows.to(tl.int64)[:, None] * a_stride
        if B_BY_COLUMNS:
            b_columns = b + group * b_group_stride + columns.to(tl.int64)[None, :] * b_stride
            b_step = 1
        else:
            b_columns = b + group * b_group_stride + columns[None, :]
            b_step = b_stride
        acc = _sum_tiles(
            a_rows, b_columns, is_row, is_column, K, b_step, 0, tl.cdiv(K, BLOCK_K),
            IN_ORDER, EVEN_K, UPCAST, SLICE_TILES, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if HAS_BIAS:
            acc += tl.load(bias + group * N + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
        places = rows.to(tl.int64)[:, None] * N + columns[None, :]
        tl.store(out + places, acc.to(out.dtype.element_ty), mask=is_row & is_column)


# -- launches --------------------------------------------------------------------------------------------

_any_product_kernel = for_any_alignment(product_kernel)
_any_grouped_product_kernel = for_any_alignment(grouped_product_kernel)
_IS_INTERPRETED = not isinstance(product_kernel, triton.runtime.JITFunction)


def multiply(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """a [M, K] x b [K, N] + bias ([N] or [M, N], or None) -> [M, N]."""
    return multiply_batch(a[None], b[None], bias)[0]


def multiply_batch(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    is_apart: bool | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """a [batch, M, K] x b [batch, K, N] + bias ([N], or a shape that expands to [batch, M, N]) -> [batch, M, N].

    Any strides; operands of one dtype: float32, bfloat16 or float16. out_dtype: theirs unless given. is_apart and tile,
    for tests: slices in programs of their own, and the tile; chosen by the shape unless given.
    """
    batch_size, M, K = a.shape
    N = b.shape[2]
    if b.shape[:2] != (batch_size, K) or a.dtype is not b.dtype:
        raise RuntimeError(
            f"a product of {list(a.shape)} {a.dtype} and {list(b.shape)} {b.dtype}: expected [batch, M, K] and "
            "[batch, K, N] of one dtype"
        )
    if N == 1 and M > 1 and bias is None:  # a row of outputs: the weight is on the left
        swapped = multiply_batch(b.mT, a.mT, out_dtype=out_dtype, is_apart=is_apart, tile=tile)
        return swapped.reshape(batch_size, M, 1)
    out = a.new_empty((batch_size, M, N), dtype=out_dtype)
    if out.numel() == 0:
        return out
    if batch_size > _MAX_BATCH:
        whole = None if bias is None else bias.expand(batch_size, M, N)
        for first in range(0, batch_size, _MAX_BATCH):
            part = slice(first, first + _MAX_BATCH)
            rest = None if whole is None else whole[part]
            out[part] = multiply_batch(
                a[part], b[part], rest, out_dtype=out_dtype, is_apart=is_apart, tile=tile
            )
        return out
    a = _with_contiguous_rows(a)
    b, by_columns = _with_contiguous_side(b)
    kind, bias = _bias_form(bias, out.shape)
    num_bytes = a.element_size()
    num_slices = -(-K // SLICE)
    arch = architecture_of(a.device)
    is_aligned = _is_aligned(a, K) and _is_aligned(b, K)
    chosen, apart = choose_tile(arch, num_bytes, M, N, K, batch_size, is_aligned)
    tile = chosen if tile is None else tile
    apart = num_slices > 1 and (apart if is_apart is None else is_apart)
    sums = a.new_empty((num_slices, batch_size, M, N), dtype=torch.float32) if apart else out
    num_tiles = -(-M // tile.block_m) * -(-N // tile.block_n)
    kernel = product_kernel if is_aligned else _any_product_kernel
    n_unit = _n_unit(N, is_aligned)
    kernel[(num_tiles, num_slices if apart else 1, batch_size)](
        a, b, bias, sums, M, N // n_unit, K,
        _row_stride(a, 1, K), _row_stride(b, 2, K) if by_columns else _row_stride(b, 1, N),
        _row_stride(a, 0, M * K), _row_stride(b, 0, K * N), batch_size,
        BIAS=kind, B_BY_COLUMNS=by_columns, APART=apart, IN_ORDER=num_slices > 1 and not apart,
        EVEN_K=K % _BLOCK_K[num_bytes] == 0, UPCAST=_IS_INTERPRETED and a.dtype is torch.bfloat16, N_UNIT=n_unit,
        SLICE_TILES=SLICE // _BLOCK_K[num_bytes], BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        BLOCK_K=_BLOCK_K[num_bytes], num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if apart:
        merge_slices_kernel[(-(-out.numel() // _MERGE_BLOCK),)](
            sums, bias, out, out.numel(), N, num_slices, BIAS=kind, BLOCK=_MERGE_BLOCK, num_warps=4
        )
    return out


def multiply_groups(
    a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """a [rows, K] x b [groups, K, N] of each row's group + bias [groups, N] -> [rows, N].

    ends: int32 [groups], ascending: group g has the rows ends[g - 1] .. ends[g] - 1; rows behind the last are 0.
    """
    (num_rows, K), (num_groups, _, N) = a.shape, b.shape
    out = a.new_zeros((num_rows, N))
    if out.numel() == 0 or num_groups == 0:
        return out
    a = _with_contiguous_rows(a[None])[0]
    b, by_columns = _with_contiguous_side(b)
    num_bytes = a.element_size()
    arch = architecture_of(a.device)
    is_aligned = _is_aligned(a, K) and _is_aligned(b, K)
    rows_each = -(-num_rows // num_groups)
    tile, _ = choose_tile(arch, num_bytes, rows_each, N, K, min(num_rows, num_groups), is_aligned)
    max_tiles = min(num_rows, num_rows // tile.block_m + num_groups)
    kernel = grouped_product_kernel if is_aligned else _any_grouped_product_kernel
    n_unit = _n_unit(N, is_aligned)
    kernel[(max_tiles, -(-N // tile.block_n))](
        a, b, _at_16_bytes(ends.to(torch.int32)), None if bias is None else _at_16_bytes(bias), out,
        num_groups, N // n_unit, K,
        _row_stride(a, 0, K), b.stride(2) if by_columns else b.stride(1), b.stride(0),
        HAS_BIAS=bias is not None, B_BY_COLUMNS=by_columns, IN_ORDER=K > SLICE,
        EVEN_K=K % _BLOCK_K[num_bytes] == 0, UPCAST=_IS_INTERPRETED and a.dtype is torch.bfloat16, N_UNIT=n_unit,
        SLICE_TILES=SLICE // _BLOCK_K[num_bytes], GROUPS=max(2, triton.next_power_of_2(num_groups)),
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=_BLOCK_K[num_bytes],
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


@functools.lru_cache(maxsize=4096)
def choose_tile(
    arch: str, num_bytes: int, M: int, N: int, K: int, batch_size: int = 1, is_aligned: bool = True
) -> tuple[Tile, bool]:
    """The tile of a product, and whether its slices are in programs of their own. No effect on bits (P1)."""
    tiles = (UNALIGNED_TILES[arch, num_bytes],)
    if is_aligned:
        tiles = next(tiles for rows, tiles in TILES[arch, num_bytes] if rows >= M)
    for tile in tiles:
        programs = -(-M // tile.block_m) * -(-N // tile.block_n) * batch_size
        if programs >= _PROGRAMS[arch]:
            return tile, False
    return tiles[-1], K > SLICE


def variants() -> Iterator[KernelVariant]:
    """Every tile of `TILES` in each form of the sum, for aligned operands, and unaligned ones."""
    for (arch, num_bytes), by_rows in TILES.items():
        if arch not in TARGETS:
            continue
        tiles = list(dict.fromkeys(tile for _, tiles in by_rows for tile in tiles))
        narrowest = {tiles[-1] for _, tiles in by_rows}  # slices are apart for these alone
        for dtype in ("bf16", "fp16") if num_bytes == 2 else ("fp32",):
            for tile in tiles:
                for form in ("whole", "in_order", *(("apart",) if tile in narrowest else ())):
                    yield _product_variant(arch, dtype, tile, form)
                yield _product_variant(arch, dtype, tile, "in_order", b_by_columns=False)
                yield _product_variant(arch, dtype, tile, "in_order", bias="columns")
                yield _grouped_variant(arch, dtype, tile)
            unaligned = UNALIGNED_TILES[arch, num_bytes]
            for form in ("whole", "in_order", "apart"):
                yield _product_variant(arch, dtype, unaligned, form, is_aligned=False, n_unit=1)
            yield _product_variant(arch, dtype, tiles[0], "in_order", n_unit=1)
            yield _product_variant(arch, dtype, tiles[0], "whole", bias="each")
    for dtype in ("bf16", "fp16", "fp32"):
        for bias in ("none", "columns", "each"):
            types = {"sums": "*fp32", "bias": f"*{dtype}", "out": f"*{dtype}", "count": "i32", "N": "i32"}
            constants: dict[str, object] = {"BIAS": bias, "BLOCK": _MERGE_BLOCK}
            if bias == "none":
                del types["bias"]
                constants["bias"] = None
            yield KernelVariant(
                merge_slices_kernel,
                f"merge_slices_{dtype}_{bias}",
                {**types, "num_slices": "i32"},
                constants,
                divisible=tuple(name for name in types if types[name].startswith("*")),
                num_stages=3,
            )


def _product_variant(
    arch: str,
    dtype: str,
    tile: Tile,
    form: str,
    *,
    b_by_columns: bool = True,
    bias: str = "none",
    is_aligned: bool = True,
    n_unit: int = 16,
) -> KernelVariant:
    pointers = {"a": f"*{dtype}", "b": f"*{dtype}", "bias": f"*{dtype}", "out": f"*{dtype}"}
    if form == "apart":
        pointers["out"] = "*fp32"
    sizes = ["K", "a_stride", "b_stride", "a_batch_stride", "b_batch_stride"]
    constants: dict[str, object] = {
        "BIAS": bias,
        "B_BY_COLUMNS": b_by_columns,
        "APART": form == "apart",
        "IN_ORDER": form == "in_order",
        **_tile_constants(dtype, tile, is_aligned, n_unit),
    }
    if bias == "none":
        del pointers["bias"]
        constants["bias"] = None
    name = f"product_{arch}_{dtype}_{tile.block_m}x{tile.block_n}_{form}_{bias}"
    return KernelVariant(
        product_kernel if is_aligned else _any_product_kernel,
        name + ("" if b_by_columns else "_by_rows") + ("" if is_aligned else "_unaligned") + f"_n{n_unit}",
        {**pointers, **dict.fromkeys(["M", "n_units", *sizes, "batch_size"], "i32")},
        constants,
        divisible=(*pointers, *sizes) if is_aligned else (),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        targets=(arch,),
        promises=_promises(arch, dtype, is_aligned),
        tags={"form": form, "bias": bias, "tile": f"{tile.block_m}x{tile.block_n}"},
    )


def _grouped_variant(arch: str, dtype: str, tile: Tile) -> KernelVariant:
    pointers = {"a": f"*{dtype}", "b": f"*{dtype}", "ends": "*i32", "out": f"*{dtype}"}
    sizes = ["K", "a_stride", "b_stride", "b_group_stride"]
    return KernelVariant(
        grouped_product_kernel,
        f"grouped_product_{arch}_{dtype}_{tile.block_m}x{tile.block_n}",
        {**pointers, **dict.fromkeys(["num_groups", "n_units", *sizes], "i32")},
        {
            "bias": None,
            "HAS_BIAS": False,
            "B_BY_COLUMNS": False,
            "IN_ORDER": True,
            "GROUPS": 128,
            **_tile_constants(dtype, tile, True, 16),
        },
        divisible=(*pointers, *sizes),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        targets=(arch,),
        promises=_promises(arch, dtype, True),
        tags={"tile": f"{tile.block_m}x{tile.block_n}"},
    )


def _tile_constants(dtype: str, tile: Tile, is_even: bool, n_unit: int) -> dict[str, object]:
    block_k = _BLOCK_K[4 if dtype == "fp32" else 2]
    return {
        "EVEN_K": is_even,
        "UPCAST": False,
        "N_UNIT": n_unit,
        "SLICE_TILES": SLICE // block_k,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": block_k,
    }


def _promises(arch: str, dtype: str, is_aligned: bool) -> tuple[str, ...]:
    of_matrix = () if dtype == "fp32" else ("tensor_core", "wgmma") if arch == "sm_90" else ("tensor_core",)
    return (*of_matrix, *(("async_copy",) if is_aligned and arch != "gfx942" else ()))


def version() -> str:
    """Changes with the tiles and the sources of these kernels."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]


@functools.cache
def architecture_of(device: torch.device) -> str:
    """The key of `TILES` for a device; the interpreter's, on a CPU, are those of sm_90."""
    if device.type != "cuda":
        return "sm_90"
    if torch.version.hip is not None:
        return "gfx942"
    capability = torch.cuda.get_device_capability(device)
    if capability == (8, 0):
        return "sm_80"
    return {9: "sm_90", 10: "sm_100"}.get(capability[0], "sm_86")


def _is_aligned(x: torch.Tensor, K: int) -> bool:
    """Whether 16 bytes of x can be loaded at once, wherever in a row."""
    strides = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1 and stride != 1]
    return x.data_ptr() % 16 == 0 and K % 16 == 0 and not any(stride % 16 for stride in strides)


def _row_stride(x: torch.Tensor, dim: int, packed: int) -> int:
    """The stride of a dimension, where a dimension of one entry has that of packed memory: torch's is arbitrary."""
    return x.stride(dim) if x.shape[dim] > 1 else packed


def _with_contiguous_rows(a: torch.Tensor) -> torch.Tensor:
    return a if a.shape[-1] == 1 or a.stride(-1) == 1 else a.contiguous()


def _with_contiguous_side(b: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """b [..., K, N] with one contiguous dimension, and whether it is K."""
    if b.stride(-2) == 1 or (b.shape[-2] == 1 and b.stride(-1) != 1):
        return b, True
    return (b if b.stride(-1) == 1 or b.shape[-1] == 1 else b.contiguous()), False


def _bias_form(bias: torch.Tensor | None, shape: torch.Size) -> tuple[str, torch.Tensor | None]:
    if bias is None:
        return "none", None
    if bias.dim() == 1 and bias.shape[0] == shape[-1]:
        return "columns", _at_16_bytes(bias)
    return "each", _at_16_bytes(bias.expand(shape))


def _at_16_bytes(x: torch.Tensor) -> torch.Tensor:
    """x contiguous at an aligned address."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _n_unit(N: int, is_aligned: bool) -> int:
    return 16 if is_aligned and N % 16 == 0 else 1
