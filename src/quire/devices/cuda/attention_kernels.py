"""Triton kernels of attention over paged keys and values: attend, merge. `kv_write_kernels` writes to slots.

`triton_attention` launches them; `attention_tiles` has the sizes of tiles; `quire.attention.reference_attention` is the
definition. Triton is imported here, so only an open Triton device imports this file.

Invariants
    T1  Positions count from token 0 of a sequence. A *split* is `SPLIT` positions from a multiple of `SPLIT`; it is
        computed from zero in tiles of `TOKENS` positions, which begin at multiples of `TOKENS`. Splits are merged in
        order of position by one program. `attend` and `merge_partials` use the same two functions for it
        (`_attend_split`, `_merged`), so a row has the same bits in every kind of launch.
    T2  Tiles of query rows hold rows of one sequence. A tile that a row does not see leaves the row's bits unchanged.
    T3  Sums over a tile's tokens, the softmax's denominator included, are products (`tl.dot`), whose order does not
        depend on the layout of a tile in registers. Maxima are exact in any order. Products and sums that could be
        fused in two ways are explicit `tl.fma`; launches turn fusing off in addition (`enable_fp_fusion`).
    T4  A table entry is read only for positions that a row of the tile sees; it is widened to int64 at once.
    T5  Keys and values of other positions are loaded as 0.

Formats: K_BITS, V_BITS are 0 for numbers, 8 and 4 for codes (`quire.attention.codecs`). Codes are decoded to the
model's dtype; scales are read as the 16 bits of a bfloat16.
"""

from __future__ import annotations

# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
from collections.abc import Iterator
from itertools import chain

import triton
import triton.language as tl

from quire.devices.cuda.attention_variants import attend_variants, merge_variants
from quire.devices.cuda.kernel_variants import KernelVariant
from quire.devices.cuda.kv_write_kernels import numbers_of

__all__ = ["attend", "attend_codes", "merge_partials", "variants"]

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_tokens(
    numbers,
    rows,
    scales,
    scale_rows,
    live,
    FIRST: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Columns FIRST .. FIRST + COLUMNS - 1 of a tile's tokens [NUM_TOKENS, COLUMNS] in DTYPE; 0 where not live and from
    WIDTH on. rows, scale_rows: int64 [NUM_TOKENS], offsets of the tokens' rows and scales."""
    if BITS == 4:
        cells = FIRST // 2 + tl.arange(0, COLUMNS // 2)[None, :]
        mask = live[:, None]
        if FIRST + COLUMNS > WIDTH:
            mask = mask & (cells < (WIDTH + 1) // 2)
        codes = tl.load(numbers + rows[:, None] + cells, mask=mask, other=0).to(tl.int32)
        pairs = tl.join(((codes & 15) ^ 8) - 8, ((codes >> 4) ^ 8) - 8)
        GROUP_SIZE: tl.constexpr = min(COLUMNS, 32)
        NUM_GROUPS: tl.constexpr = COLUMNS // GROUP_SIZE
        groups = FIRST // 32 + tl.arange(0, NUM_GROUPS)[None, :]
        mask = live[:, None] & (groups < (WIDTH + 31) // 32)
        bits = tl.load(scales + scale_rows[:, None] + groups, mask=mask, other=0)
        tile = tl.reshape(pairs, (NUM_TOKENS, NUM_GROUPS, GROUP_SIZE)).to(tl.float32)
        tile = tl.reshape(tile * numbers_of(bits)[:, :, None], (NUM_TOKENS, COLUMNS)).to(DTYPE)
    else:
        columns = FIRST + tl.arange(0, COLUMNS)[None, :]
        mask = live[:, None]
        if FIRST + COLUMNS > WIDTH:
            mask = mask & (columns < WIDTH)
        tile = tl.load(numbers + rows[:, None] + columns, mask=mask, other=0)
        if BITS == 8:
            bits = tl.load(scales + scale_rows, mask=live, other=0)
            tile = (tile.to(tl.float32) * numbers_of(bits)[:, None]).to(DTYPE)
    return tile


@triton.jit
def _finite(maximum):
    """0 for the maximum of no score at all."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def _merged(maximum, total, sums, split_maximum, split_total, split_sums):
    """The softmax over the positions of both; the second follows the first."""
    highest = tl.maximum(maximum, split_maximum)
    factor, split_factor = tl.exp2(maximum - _finite(highest)), tl.exp2(split_maximum - _finite(highest))
    total = tl.fma(split_total, split_factor, total * factor)
    sums = tl.fma(split_sums, tl.broadcast_to(split_factor[:, None], sums.shape), sums * factor[:, None])
    return highest, total, sums


@triton.jit
def _finished(maximum, total, sums, sinks, heads, mask):
    """Values [rows, columns] of the softmax of all positions, and of the head's sink."""
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=mask, other=float("-inf")) * _LOG2_E
        highest = _finite(tl.maximum(maximum, sink))
        factor = tl.exp2(maximum - highest)
        total = tl.fma(total, factor, tl.exp2(sink - highest))
        sums = sums * factor[:, None]
    inverse = 1.0 / tl.where(total == 0.0, 1.0, total)
    return sums * inverse[:, None]


@triton.jit
def _attend_split(
    q_first,
    q_rest,
    positions,
    slopes_of_rows,
    k,
    v,
    k_scale,
    v_scale,
    table,
    begin,
    end,
    split,
    k_block,
    k_token,
    v_block,
    v_token,
    k_scale_block,
    k_scale_token,
    v_scale_block,
    v_scale_token,
    scale,
    softcap,
    window,
    chunk,
    HAS_SPAN: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    K_FIRST: tl.constexpr,
    K_REST: tl.constexpr,
    V_COLUMNS: tl.constexpr,
    V_IS_K: tl.constexpr,
    K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Maxima and totals [ROWS] and sums of values [ROWS, V_COLUMNS] over the positions of a split in begin .. end - 1,
    which a row of the tile sees. Scores are in units of log 2."""
    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    totals = tl.zeros((ROWS, 16), tl.float32)
    sums = tl.zeros((ROWS, V_COLUMNS), tl.float32)
    ones = tl.full((TOKENS, 16), 1.0, DTYPE)
    first = tl.maximum(split * SPLIT, begin // TOKENS * TOKENS)
    last = tl.minimum(split * SPLIT + SPLIT, end)
    visible_from = positions - window + 1
    visible_from = tl.maximum(visible_from, 0)
    visible_from = visible_from - visible_from % chunk
    for start in range(first, last, TOKENS):
        tokens = start + tl.arange(0, TOKENS)
        live = (tokens >= begin) & (tokens < end)
        blocks = tl.load(table + tokens // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        offsets = tokens % BLOCK_SIZE
        k_rows = blocks * k_block + offsets * k_token
        k_scale_rows = k_rows
        if K_BITS > 0:
            k_scale_rows = blocks * k_scale_block + offsets * k_scale_token
        k_tile = _load_tokens(
            k, k_rows, k_scale, k_scale_rows, live, 0, K_FIRST, K_WIDTH, K_BITS, TOKENS, DTYPE
        )
        scores = tl.dot(q_first, tl.trans(k_tile), input_precision="ieee")
        if K_REST > 0:
            rest = _load_tokens(
                k, k_rows, k_scale, k_scale_rows, live, K_FIRST, K_REST, K_WIDTH, K_BITS, TOKENS, DTYPE
            )
            scores = tl.dot(q_rest, tl.trans(rest), scores, input_precision="ieee")
        if HAS_SOFTCAP:
            halves = tl.exp2(scores * (scale / softcap * (2.0 * _LOG2_E)))
            scores = (softcap * _LOG2_E) * (1.0 - 2.0 / (halves + 1.0))
        else:
            scores = scores * (scale * _LOG2_E)
        if HAS_SLOPES:
            distances = (tokens[None, :] - positions[:, None]).to(tl.float32)
            slopes = tl.broadcast_to(slopes_of_rows[:, None], scores.shape)
            scores = tl.fma(slopes, distances, scores)
        visible = live[None, :] & (tokens[None, :] <= positions[:, None])
        if HAS_SPAN:
            visible = visible & (tokens[None, :] >= visible_from[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        highest = tl.maximum(maximum, tl.max(scores, axis=1))
        factor = tl.exp2(maximum - _finite(highest))
        weights = tl.exp2(scores - _finite(highest)[:, None]).to(DTYPE)
        maximum = highest
        totals = tl.dot(weights, ones, totals * factor[:, None], input_precision="ieee")
        if V_IS_K:
            v_tile = k_tile
        else:
            v_rows = blocks * v_block + offsets * v_token
            v_scale_rows = v_rows
            if V_BITS > 0:
                v_scale_rows = blocks * v_scale_block + offsets * v_scale_token
            v_tile = _load_tokens(
                v, v_rows, v_scale, v_scale_rows, live, 0, V_COLUMNS, V_WIDTH, V_BITS, TOKENS, DTYPE
            )
        sums = tl.dot(weights, v_tile, sums * factor[:, None], input_precision="ieee")
    return maximum, tl.max(totals, axis=1), sums


@triton.jit
def _first_visible(position, window, chunk):
    """Position of the first key that the query at `position` sees."""
    first = tl.maximum(position - window + 1, 0)
    return first - first % chunk


@triton.jit
def _sequence_of(tile, query_start, num_sequences, TILE_TOKENS: tl.constexpr):
    """The sequence i whose tiles begin at tile query_start[i] // TILE_TOKENS + i, by bisection."""
    low, high = 0, num_sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // TILE_TOKENS + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


def _attend(
    query,
    k,
    v,
    k_scale,
    v_scale,
    out,
    partial_sums,
    partial_stats,
    sinks,
    slopes,
    query_start,
    context_lengths,
    tables,
    num_sequences,
    table_width,
    query_token,
    query_head,
    out_token,
    out_head,
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
    scale,
    softcap,
    window,
    chunk,
    GROUP: tl.constexpr,
    HAS_SPAN: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    K_FIRST: tl.constexpr,
    K_REST: tl.constexpr,
    V_COLUMNS: tl.constexpr,
    V_IS_K: tl.constexpr,
    K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KIND: tl.constexpr,
):
    """Attention of tiles of query rows.

    KIND "rows": tiles of any sequences; grid [tokens // TILE_TOKENS + sequences, head tiles].
    KIND "chunks": the same, without sequences of one row.
    KIND "single": each sequence has one row; grid [sequences, head tiles].
    KIND "partial": a split of each sequence of one row, written to partial_sums [sequences, heads, splits, V_WIDTH] and
    partial_stats [sequences, heads, splits, 2] for `merge_partials`; grid [splits, head tiles, sequences].

    Head tiles are kv_heads * ceil(GROUP / ROWS). A program without work ends at once.
    """
    HEADS_IN_TILE: tl.constexpr = min(GROUP, ROWS)
    TILE_TOKENS: tl.constexpr = 1 if KIND == "single" or KIND == "partial" else max(ROWS // GROUP, 1)
    HEAD_TILES: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    DTYPE: tl.constexpr = query.dtype.element_ty
    if KIND == "partial":
        sequence, tile = tl.program_id(2), 0
    elif KIND == "single":
        sequence, tile = tl.program_id(0), 0
    else:
        sequence = _sequence_of(tl.program_id(0), query_start, num_sequences, TILE_TOKENS)
        tile = tl.program_id(0) - tl.load(query_start + sequence) // TILE_TOKENS - sequence
    kv_head = tl.program_id(1) // HEAD_TILES
    first_row = tl.load(query_start + sequence)
    num_rows = tl.load(query_start + sequence + 1) - first_row
    context = tl.load(context_lengths + sequence)
    has_work = tile * TILE_TOKENS < num_rows
    if KIND == "chunks":
        has_work = has_work & (num_rows > 1)
    if KIND == "partial":
        has_work = has_work & (num_rows == 1)

    first_token = tile * TILE_TOKENS
    position = context - num_rows + first_token
    begin = 0
    if HAS_SPAN:
        begin = _first_visible(position, window, chunk)
    end = tl.minimum(position + TILE_TOKENS, context)
    first_split, last_split = begin // SPLIT, (end + SPLIT - 1) // SPLIT
    if KIND == "partial":
        first = tl.program_id(0)
        has_work = has_work & (first >= first_split) & (first < last_split)
        first_split, last_split = first, first + 1

    if has_work:
        at = tl.arange(0, ROWS)
        row_tokens = first_token + at // HEADS_IN_TILE
        group_heads = tl.program_id(1) % HEAD_TILES * ROWS + at % HEADS_IN_TILE
        mask = (row_tokens < num_rows) & (at // HEADS_IN_TILE < TILE_TOKENS) & (group_heads < GROUP)
        heads = kv_head * GROUP + group_heads
        positions = context - num_rows + row_tokens
        rows = (first_row + row_tokens).to(tl.int64)
        query_rows = query + (rows * query_token + heads.to(tl.int64) * query_head)[:, None]
        columns = tl.arange(0, K_FIRST)[None, :]
        q_first = tl.load(query_rows + columns, mask=mask[:, None] & (columns < K_WIDTH), other=0.0)
        q_rest = q_first
        if K_REST > 0:
            columns = K_FIRST + tl.arange(0, K_REST)[None, :]
            q_rest = tl.load(query_rows + columns, mask=mask[:, None] & (columns < K_WIDTH), other=0.0)
        slopes_of_rows = scale
        if slopes is not None:
            slopes_of_rows = tl.load(slopes + heads, mask=mask, other=0.0) * _LOG2_E
        k += kv_head.to(tl.int64) * k_head
        v += kv_head.to(tl.int64) * v_head
        if K_BITS > 0:
            k_scale += kv_head.to(tl.int64) * k_scale_head
        if V_BITS > 0:
            v_scale += kv_head.to(tl.int64) * v_scale_head
        table = tables + sequence.to(tl.int64) * table_width

        maximum = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        sums = tl.zeros((ROWS, V_COLUMNS), tl.float32)
        for split in range(first_split, last_split):
            split_maximum, split_total, split_sums = _attend_split(
                q_first,
                q_rest,
                positions,
                slopes_of_rows,
                k,
                v,
                k_scale,
                v_scale,
                table,
                begin,
                end,
                split,
                k_block,
                k_token,
                v_block,
                v_token,
                k_scale_block,
                k_scale_token,
                v_scale_block,
                v_scale_token,
                scale,
                softcap,
                window,
                chunk,
                HAS_SPAN,
                HAS_SOFTCAP,
                slopes is not None,
                K_WIDTH,
                V_WIDTH,
                K_FIRST,
                K_REST,
                V_COLUMNS,
                V_IS_K,
                K_BITS,
                V_BITS,
                ROWS,
                TOKENS,
                SPLIT,
                BLOCK_SIZE,
                DTYPE,
            )
            maximum, total, sums = _merged(maximum, total, sums, split_maximum, split_total, split_sums)
        if KIND == "partial":
            num_heads = tl.num_programs(1) // HEAD_TILES * GROUP
            parts = (sequence.to(tl.int64) * num_heads + heads) * tl.num_programs(0) + first_split
            tl.store(partial_stats + parts * 2, maximum, mask=mask)
            tl.store(partial_stats + parts * 2 + 1, total, mask=mask)
            columns = tl.arange(0, V_COLUMNS)[None, :]
            address = partial_sums + parts[:, None] * V_WIDTH + columns
            tl.store(address, sums, mask=mask[:, None] & (columns < V_WIDTH))
        else:
            values = _finished(maximum, total, sums, sinks, heads, mask)
            columns = tl.arange(0, V_COLUMNS)[None, :]
            address = out + (rows * out_token + heads.to(tl.int64) * out_head)[:, None] + columns
            tl.store(address, values.to(DTYPE), mask=mask[:, None] & (columns < V_WIDTH))


_COUNTS = ["num_sequences", "table_width", "window", "chunk"]
_SCALES = [f"{field}_scale_{unit}" for field in ("k", "v") for unit in ("block", "head", "token")]
_ROWS_OF_CODES = [f"{field}_{unit}" for field in ("k", "v") for unit in ("block", "head", "token")]
attend = triton.jit(_attend, do_not_specialize=[*_COUNTS, *_SCALES])
attend_codes = triton.jit(
    _attend, do_not_specialize=[*_COUNTS, *_SCALES, *_ROWS_OF_CODES, "k", "v", "k_scale", "v_scale"]
)
"""`attend` for keys or values in a format of codes: their rows begin at any even byte."""


@triton.jit(do_not_specialize=["num_splits", "window", "chunk"])
def merge_partials(
    partial_sums,
    partial_stats,
    out,
    sinks,
    query_start,
    context_lengths,
    num_splits,
    out_token,
    out_head,
    window,
    chunk,
    V_WIDTH: tl.constexpr,
    V_COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_SPAN: tl.constexpr,
):
    """The partials of a sequence of one row and a head, merged in order of position; grid [sequences, q_heads]."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(query_start + sequence)
    if tl.load(query_start + sequence + 1) - row == 1:
        context = tl.load(context_lengths + sequence)
        begin = 0
        if HAS_SPAN:
            begin = _first_visible(context - 1, window, chunk)
        maximum = tl.full((1,), float("-inf"), tl.float32)
        total = tl.zeros((1,), tl.float32)
        sums = tl.zeros((1, V_COLUMNS), tl.float32)
        columns = tl.arange(0, V_COLUMNS)[None, :]
        only = tl.arange(0, 1)
        parts = (sequence.to(tl.int64) * tl.num_programs(1) + head) * num_splits + only
        for split in range(begin // SPLIT, (context + SPLIT - 1) // SPLIT):
            stats = partial_stats + (parts + split) * 2
            address = partial_sums + (parts + split)[:, None] * V_WIDTH + columns
            maximum, total, sums = _merged(
                maximum,
                total,
                sums,
                tl.load(stats),
                tl.load(stats + 1),
                tl.load(address, mask=columns < V_WIDTH, other=0.0),
            )
        values = _finished(maximum, total, sums, sinks, head + only, only == 0)
        address = out + row.to(tl.int64) * out_token + head.to(tl.int64) * out_head + columns
        tl.store(address, values.to(out.dtype.element_ty), mask=columns < V_WIDTH)


def variants() -> Iterator[KernelVariant]:
    """The launches to compile ahead of time."""
    return chain(attend_variants(attend, attend_codes), merge_variants(merge_partials))
