"""The sizes of tiles of the attention kernels, by architecture, head, dtype: a table, so nothing is tuned at run time.

`triton_attention` hashes this file into the device's `version`.

Invariants
    A1  `SPLIT` and `tokens` decide bits: they are the same for every launch of a model on an architecture. The other
        sizes do not, as long as tiles of `decode_rows` and `prefill_rows` rows use the same matrix instruction: on
        sm_80 any tile uses mma.sync, whose rows are independent; where 64 rows use another instruction than 16
        (sm_90, sm_100, gfx942), both numbers are equal.
    A2  `tokens` divides `SPLIT`.

Cost: a look-up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = [
    "AMD_OPTIONS",
    "NVIDIA_OPTIONS",
    "SPLIT",
    "AttentionTiles",
    "architecture_class",
    "attend_constants",
    "column_tiles",
    "launch_options",
    "power_of_two",
    "rows_of",
    "tiles_of",
]

SPLIT = 512
NVIDIA_OPTIONS = {"enable_fp_fusion": False, "maxnreg": 255}
AMD_OPTIONS = {"enable_fp_fusion": False}
"""Of every launch: no product and sum are fused unless the kernel says so, and the assembler does not spill in order to
run more programs at a time."""


@dataclass(frozen=True)
class AttentionTiles:
    """decode_rows, prefill_rows: query rows of a tile where sequences have one row and where they have more. tokens:
    positions of a tile. decode_warps, decode_stages: launch options of partials. prefill_warps, prefill_stages: of
    programs that compute all splits of their rows, and so keep the merged sums too."""

    decode_rows: int
    prefill_rows: int
    tokens: int
    decode_warps: int = 4
    prefill_warps: int = 4
    decode_stages: int = 2
    prefill_stages: int = 2


def architecture_class(architecture: str) -> str:
    """The row of the table for "sm_90", "gfx942", ... or "interpreter"."""
    if architecture.startswith("gfx"):
        return "gfx942"
    if architecture.startswith("sm_"):
        number = int(architecture[3:])
        if 90 <= number < 100:
            return "sm_90"
        if 100 <= number < 120:
            return "sm_100"
        return "sm_80"
    return architecture


# By class: (largest widths of K and V) -> tiles, in order. float32 has products without matrix instructions.
_HALF = {
    "sm_80": {
        (64, 64): AttentionTiles(16, 64, 64, prefill_warps=8),
        (192, 128): AttentionTiles(16, 64, 32, prefill_warps=8),
        (256, 256): AttentionTiles(16, 32, 32, prefill_warps=8),
        (1024, 1024): AttentionTiles(16, 16, 32, 8, 8),
    },
    "sm_90": {
        (64, 64): AttentionTiles(64, 64, 64),
        (192, 128): AttentionTiles(64, 64, 64, 4, 8),
        (256, 256): AttentionTiles(16, 32, 32, 4, 8),
        (1024, 1024): AttentionTiles(16, 16, 32, 8, 8),
    },
    "sm_100": {
        (64, 64): AttentionTiles(64, 64, 64),
        (192, 128): AttentionTiles(64, 64, 64, 8, 8),
        (256, 256): AttentionTiles(16, 32, 32, 4, 8),
        (1024, 1024): AttentionTiles(16, 16, 32, 8, 8),
    },
    "gfx942": {
        (64, 64): AttentionTiles(64, 64, 64),
        (192, 128): AttentionTiles(64, 64, 32, 8, 8),
        (256, 256): AttentionTiles(32, 32, 32, 8, 8),
        (1024, 1024): AttentionTiles(16, 16, 16, 8, 8),
    },
    "interpreter": {(1024, 1024): AttentionTiles(16, 32, 64)},
}
_FLOAT32 = {
    (192, 128): AttentionTiles(16, 16, 16, 4, 4),
    (256, 256): AttentionTiles(16, 16, 16, 8, 8),
    (1024, 1024): AttentionTiles(16, 16, 16, 8, 8, 1, 1),
}
_FLOAT32_OF_GFX942 = {**_FLOAT32, (1024, 1024): AttentionTiles(16, 16, 16)}
_CODES = {(1024, 1024): AttentionTiles(16, 16, 16, 8, 8, 1, 1)}
"""Rows of codes begin at any even byte: their loads are narrow, and need registers for many addresses."""


def tiles_of(
    architecture: str, dtype: torch.dtype, k_width: int, v_width: int, has_codes: bool = False
) -> AttentionTiles:
    """The tiles for heads of `k_width` and `v_width` numbers of `dtype`; KeyError: the architecture has no row."""
    rows = _HALF[architecture_class(architecture)]
    if architecture != "interpreter":
        if has_codes:
            rows = _CODES
        elif dtype == torch.float32:
            rows = _FLOAT32_OF_GFX942 if architecture_class(architecture) == "gfx942" else _FLOAT32
    return next(tiles for (k, v), tiles in rows.items() if k_width <= k and v_width <= v)


def power_of_two(number: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (number - 1).bit_length()


def column_tiles(k_width: int, v_width: int) -> tuple[int, int, int]:
    """Columns of K in a first product, columns in a second (0: none), and columns of V: powers of two, at least 16."""
    first = max(16, 1 << (k_width.bit_length() - 1))
    rest = max(0, k_width - first)
    return first, max(16, power_of_two(rest)) if rest else 0, max(16, power_of_two(v_width))


def attend_constants(
    kind: str,
    tiles: AttentionTiles,
    *,
    group: int,
    k_width: int,
    v_width: int,
    block_size: int,
    k_bits: int = 0,
    v_bits: int = 0,
    is_latent: bool = False,
    has_span: bool = False,
    has_softcap: bool = False,
) -> dict[str, Any]:
    """The constants of a launch of `attention_kernels.attend`. is_latent: V is the first columns of K."""
    k_first, k_rest, v_columns = column_tiles(k_width, v_width)
    return {
        "GROUP": group,
        "HAS_SPAN": has_span,
        "HAS_SOFTCAP": has_softcap,
        "K_WIDTH": k_width,
        "V_WIDTH": v_width,
        "K_FIRST": k_first,
        "K_REST": k_rest,
        "V_COLUMNS": v_columns,
        "V_IS_K": is_latent and k_first == v_columns == v_width,
        "K_BITS": k_bits,
        "V_BITS": v_bits,
        "ROWS": rows_of(kind, tiles),
        "TOKENS": tiles.tokens,
        "SPLIT": SPLIT,
        "BLOCK_SIZE": block_size,
        "KIND": kind,
    }


def launch_options(kind: str, tiles: AttentionTiles) -> dict[str, int]:
    """Warps and stages of a launch of `attention_kernels.attend`."""
    if kind == "partial":
        return {"num_warps": tiles.decode_warps, "num_stages": tiles.decode_stages}
    return {"num_warps": tiles.prefill_warps, "num_stages": tiles.prefill_stages}


def rows_of(kind: str, tiles: AttentionTiles) -> int:
    """Query rows of a tile in this kind of launch."""
    return tiles.prefill_rows if kind in ("rows", "chunks") else tiles.decode_rows
