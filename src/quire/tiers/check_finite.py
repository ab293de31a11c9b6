"""Whether the numbers of a payload are numbers: no infinity, no NaN.

A checksum says that bytes are those that were stored, not that whoever stored them computed well. One NaN among the
keys that a sequence reads makes all of its answer NaN.

Cost: one pass, in pieces that stay in the core's cache: 10 GB/s and more.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.spec import format_of
from quire.spec.payload import PayloadLayout

__all__ = ["is_finite", "is_payload_finite"]

# By dtype: an integer of the element's size, and its exponent, all ones of which mean infinity or NaN.
_EXPONENTS = {
    "float32": (np.uint32, 0x7F800000),
    "bfloat16": (np.uint16, 0x7F80),
    "float16": (np.uint16, 0x7C00),
}
_PIECE = 1 << 15  # elements


def is_payload_finite(payload: np.ndarray, layout: Any) -> bool:
    """As `is_finite`, of all that a payload holds; of rows of codes their scales. layout: a `PayloadLayout`, or another
    that has a dtype."""
    if not isinstance(layout, PayloadLayout) or not any(any(one.formats) for one in layout.layers):
        return is_finite(payload, layout.dtype)
    num_tokens = payload.nbytes // layout.bytes_per_token
    start = 0
    for one in layout.layers:
        widths = one.k_head_dim, one.stored_v_dim
        for size, width, name in (
            list(zip(one.row_elements, widths, one.formats, strict=False)) * one.num_kv_heads
        ):
            stop = start + num_tokens * size * layout.dtype_bytes
            rows = payload[start:stop].reshape(num_tokens, -1)
            found = format_of(name) if name else None
            numbers = np.ascontiguousarray(rows[:, -2 * found.num_scales(width) :]) if found else rows
            if not is_finite(numbers.reshape(-1), found.scale if found else layout.element):
                return False
            start = stop
    return True


def is_finite(payload: np.ndarray, dtype: str) -> bool:
    """payload: uint8, of whole elements. True for a dtype of which nothing is known here."""
    if dtype not in _EXPONENTS:
        return True
    kind, exponent = _EXPONENTS[dtype]
    words = payload.view(kind)
    masked = np.empty(min(_PIECE, len(words)), kind)
    for start in range(0, len(words), _PIECE):
        piece = words[start : start + _PIECE]
        part = masked[: len(piece)]
        np.bitwise_and(piece, kind(exponent), out=part)
        if part.max() == exponent:
            return False
    return True
