"""Triton kernels that write keys and values to slots, as numbers or as codes, and rotate queries to match.

`quire.attention.codecs` defines the codes; the bytes are the same. `triton_attention` launches the kernels. A slot of
-1 is skipped. Scales are written as the 16 bits of a bfloat16. Triton is imported here.
"""

from __future__ import annotations

# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
from collections.abc import Iterator
from itertools import chain

import triton
import triton.language as tl

from quire.devices.cuda.attention_variants import code_variants, row_variants
from quire.devices.cuda.kernel_variants import KernelVariant

__all__ = ["numbers_of", "rotate_queries", "variants", "write_codes", "write_rows"]

_MIN_SCALE = tl.constexpr(2.0**-126)  # as in `quire.attention.codecs`
_TO_EVEN = tl.constexpr(12582912.0)  # 1.5 * 2**23: x + this - this is x rounded to an integer, even on a tie


@triton.jit
def _rotated(rows, NUM_ROWS: tl.constexpr, SIZE: tl.constexpr, LOG_SIZE: tl.constexpr):
    """Rows [NUM_ROWS, SIZE] times the Hadamard matrix, by sums and differences of pairs at distances 1, 2, 4, ...

    After each stage the index's bits are rotated by one, so that the pairs of the next stage are adjacent.
    """
    for _ in tl.static_range(LOG_SIZE):
        first, second = tl.split(tl.reshape(rows, (NUM_ROWS, SIZE // 2, 2)))
        pairs = tl.join(first + second, first - second)
        rows = tl.reshape(tl.permute(pairs, (0, 2, 1)), (NUM_ROWS, SIZE))
    return rows


@triton.jit
def _bfloat16_above(numbers):
    """Bits of the smallest bfloat16 that is not less than float32 `numbers` (0 or more), at least `_MIN_SCALE`."""
    return (tl.maximum(numbers, _MIN_SCALE).to(tl.int32, bitcast=True) + 0xFFFF) >> 16


@triton.jit
def numbers_of(scale_bits):
    """float32 numbers of the bits of bfloat16 ones."""
    return (scale_bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _nearest_codes(rows, scales):
    """Integers as float32: the nearest multiple, even on a tie; NaN becomes 0."""
    quotients = tl.div_rn(rows, scales)
    codes = quotients + _TO_EVEN - _TO_EVEN
    return tl.where(codes == codes, codes, 0.0)


@triton.jit
def _store_row(row, codes, scales, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """Encode a row float32 [BLOCK], zero from WIDTH on, as `quire.attention.codecs` defines it."""
    if BITS == 8:
        has_nan = tl.max((row != row).to(tl.int32), axis=0) > 0
        bits = _bfloat16_above(tl.div_rn(tl.max(tl.abs(row), axis=0), 127.0))
        bits = tl.where(has_nan, 0x7FC0, bits)
        columns = tl.arange(0, BLOCK)
        nearest = _nearest_codes(row, numbers_of(bits))
        tl.store(codes + columns, nearest.to(tl.int8), mask=columns < WIDTH)
        tl.store(scales, bits.to(tl.int16))
    else:
        groups = tl.reshape(row, (BLOCK // 32, 32))
        has_nan = tl.max((groups != groups).to(tl.int32), axis=1) > 0
        above, below = tl.max(groups, axis=1), -tl.min(groups, axis=1)
        bits = _bfloat16_above(tl.maximum(above, below) * 0.125)
        bits = tl.where(has_nan, 0x7FC0, tl.where(above >= below, bits | 0x8000, bits))
        nearest = _nearest_codes(groups, numbers_of(bits)[:, None])
        nearest = tl.minimum(tl.maximum(nearest, -8.0), 7.0).to(tl.int32) & 15
        low, high = tl.split(tl.reshape(nearest, (BLOCK // 2, 2)))
        columns = tl.arange(0, BLOCK // 2)
        tl.store(codes + columns, (low | (high << 4)).to(tl.uint8), mask=columns < (WIDTH + 1) // 2)
        at = tl.arange(0, BLOCK // 32)
        tl.store(scales + at, bits.to(tl.int16), mask=at < (WIDTH + 31) // 32)


@triton.jit
def _row_address(slot, head, BLOCK_SIZE: tl.constexpr, block_stride, head_stride, token_stride):
    """Offset of a slot's row, int64."""
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    return block * block_stride + head.to(tl.int64) * head_stride + offset * token_stride


@triton.jit
def write_rows(
    k_new,
    v_new,
    k,
    v,
    slots,
    k_new_token,
    k_new_head,
    v_new_token,
    v_new_head,
    k_block,
    k_head,
    k_token,
    v_block,
    v_head,
    v_token,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    K_COLUMNS: tl.constexpr,
    V_COLUMNS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Numbers of a token to its slot; grid [tokens]. V_WIDTH 0: V is a part of K."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        heads = tl.arange(0, HEADS)[:, None]
        columns = tl.arange(0, K_COLUMNS)[None, :]
        mask = (heads < NUM_HEADS) & (columns < K_WIDTH)
        row = tl.load(k_new + token * k_new_token + heads.to(tl.int64) * k_new_head + columns, mask=mask)
        tl.store(
            k + _row_address(slot, heads, BLOCK_SIZE, k_block, k_head, k_token) + columns, row, mask=mask
        )
        if V_WIDTH > 0:
            columns = tl.arange(0, V_COLUMNS)[None, :]
            mask = (heads < NUM_HEADS) & (columns < V_WIDTH)
            row = tl.load(v_new + token * v_new_token + heads.to(tl.int64) * v_new_head + columns, mask=mask)
            address = _row_address(slot, heads, BLOCK_SIZE, v_block, v_head, v_token)
            tl.store(v + address + columns, row, mask=mask)


_ROWS_OF_CODES = [
    f"{field}_{unit}" for field in ("k", "v", "k_scale", "v_scale") for unit in ("block", "head", "token")
]


@triton.jit(do_not_specialize=["k", "v", "k_scale", "v_scale", *_ROWS_OF_CODES])
def write_codes(
    k_new,
    v_new,
    k,
    v,
    k_scale,
    v_scale,
    k_offset,
    slots,
    k_new_token,
    k_new_head,
    v_new_token,
    v_new_head,
    k_block,
    k_head,
    k_token,
    v_block,
    v_head,
    v_token,
    k_scale_block,
    k_scale_head,
    k_scale_token,
    v_scale_block,
    v_scale_head,
    v_scale_token,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    K_COLUMNS: tl.constexpr,
    V_COLUMNS: tl.constexpr,
    K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    ROTATION: tl.constexpr,
    LOG_ROTATION: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Codes and scales of a token and head to its slot; grid [tokens, kv_heads]. Keys are rotated."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        columns = tl.arange(0, K_COLUMNS)
        inside = columns < K_WIDTH
        row = tl.load(k_new + token * k_new_token + head * k_new_head + columns, mask=inside, other=0.0)
        row = row.to(tl.float32)
        if k_offset is not None:
            row -= tl.load(k_offset + head * K_WIDTH + columns, mask=inside, other=0.0)
        blocks = tl.reshape(row, (K_COLUMNS // ROTATION, ROTATION))
        row = tl.reshape(_rotated(blocks, K_COLUMNS // ROTATION, ROTATION, LOG_ROTATION), (K_COLUMNS,))
        codes = k + _row_address(slot, head, BLOCK_SIZE, k_block, k_head, k_token)
        scales = k_scale + _row_address(slot, head, BLOCK_SIZE, k_scale_block, k_scale_head, k_scale_token)
        _store_row(row, codes, scales, K_WIDTH, K_COLUMNS, K_BITS)

        columns = tl.arange(0, V_COLUMNS)
        address = v_new + token * v_new_token + head * v_new_head + columns
        row = tl.load(address, mask=columns < V_WIDTH, other=0.0).to(tl.float32)
        codes = v + _row_address(slot, head, BLOCK_SIZE, v_block, v_head, v_token)
        scales = v_scale + _row_address(slot, head, BLOCK_SIZE, v_scale_block, v_scale_head, v_scale_token)
        _store_row(row, codes, scales, V_WIDTH, V_COLUMNS, V_BITS)


@triton.jit
def rotate_queries(
    query,
    rotated,
    query_token,
    query_head,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROTATION: tl.constexpr,
    LOG_ROTATION: tl.constexpr,
):
    """Queries rotated as keys of codes are, divided by the rotation's size; grid [tokens, q_heads]. rotated: dense."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    inside = columns < WIDTH
    row = tl.load(query + token * query_token + head * query_head + columns, mask=inside, other=0.0)
    blocks = tl.reshape(row.to(tl.float32), (COLUMNS // ROTATION, ROTATION))
    row = tl.reshape(_rotated(blocks, COLUMNS // ROTATION, ROTATION, LOG_ROTATION), (COLUMNS,))
    address = rotated + (token * tl.num_programs(1) + head) * WIDTH + columns
    tl.store(address, (row * (1.0 / ROTATION)).to(rotated.dtype.element_ty), mask=inside)


def variants() -> Iterator[KernelVariant]:
    """The launches to compile ahead of time."""
    return chain(row_variants(write_rows), code_variants(write_codes, rotate_queries))
