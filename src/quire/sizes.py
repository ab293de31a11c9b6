"""Sizes of memory as people write them: "1GiB", "512 MB", "65536".

Absolute sizes only; a share such as "40%" or "auto" needs to know a machine and is read elsewhere.
"""

from __future__ import annotations

import re

from quire.errors import ArgumentError

__all__ = ["format_size", "parse_size"]

_UNITS: dict[str, int] = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_size(size: str | int, *, where: str = "memory") -> int:
    """Bytes of a size: an integer, or a number with B, KB, MB, GB, TB (powers of 1000) or KiB .. TiB (of 1024).

    `where` names the argument in the error.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        num_bytes = size
    else:
        match = _SIZE.fullmatch(size) if isinstance(size, str) else None
        if match is None or match[2].lower() not in _UNITS:
            raise ArgumentError(
                f'expected a size such as "256MiB", "1.5GiB" or a number of bytes, got {size!r} for {where}'
            )
        num_bytes = int(float(match[1]) * _UNITS[match[2].lower()])
    if num_bytes <= 0:
        raise ArgumentError(f"expected a size of at least 1 byte, got {size!r} for {where}")
    return num_bytes


def format_size(num_bytes: int) -> str:
    """The size in the largest binary unit that it fills, for messages: 1536 -> "1.5KiB"."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.4g}{unit}"
        value /= 1024
    return f"{value:.4g}TiB"
