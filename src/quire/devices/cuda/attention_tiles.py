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

import torch

__all__ = ["SPLIT", "AttentionTiles", "architecture_class", "tiles_of"]

SPLIT = 512


@dataclass(frozen=True)
class AttentionTiles:
    """decode_rows, prefill_rows: query rows of a tile where sequences have one row and where they have more. tokens:
    positions of a tile. The rest: launch options of each."""

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


# By class: (largest width of K, or of V if larger) -> tiles. float32 has products without matrix instructions.
_HALF = {
    "sm_80": {
        64: AttentionTiles(16, 64, 64),
        128: AttentionTiles(16, 64, 64, prefill_warps=4),
        256: AttentionTiles(16, 64, 32, prefill_warps=8),
        1024: AttentionTiles(16, 16, 16, 8, 8),
    },
    "sm_90": {
        64: AttentionTiles(64, 64, 64),
        128: AttentionTiles(64, 64, 64),
        256: AttentionTiles(64, 64, 32, 8, 8),
        1024: AttentionTiles(16, 16, 32, 8, 8),
    },
    "sm_100": {
        64: AttentionTiles(64, 64, 64),
        128: AttentionTiles(64, 64, 64),
        256: AttentionTiles(64, 64, 32, 8, 8),
        1024: AttentionTiles(16, 16, 32, 8, 8),
    },
    "gfx942": {
        64: AttentionTiles(64, 64, 64),
        128: AttentionTiles(64, 64, 32),
        256: AttentionTiles(32, 32, 32, 8, 8),
        1024: AttentionTiles(16, 16, 16, 8, 8),
    },
    "interpreter": {1024: AttentionTiles(16, 32, 64)},
}
_FLOAT32 = {
    64: AttentionTiles(16, 16, 32),
    128: AttentionTiles(16, 16, 32),
    256: AttentionTiles(16, 16, 16),
    1024: AttentionTiles(16, 16, 16, 8, 8),
}


def tiles_of(architecture: str, dtype: torch.dtype, k_width: int, v_width: int) -> AttentionTiles:
    """The tiles for heads of `k_width` and `v_width` numbers of `dtype`; KeyError: the architecture has no row."""
    rows = _HALF[architecture_class(architecture)]
    if dtype == torch.float32 and architecture != "interpreter":
        rows = _FLOAT32
    width = max(k_width, v_width)
    return next(tiles for largest, tiles in rows.items() if width <= largest)
