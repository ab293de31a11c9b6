"""Parses sizes of memory in text: "1GiB", "512 MB", "65536", or a share such as "25%".

Independent of the machine: the caller gives the total of a share and the meaning of "auto".
"""

from __future__ import annotations

import re
from fractions import Fraction

from quire.errors import ArgumentError

__all__ = ["format_size", "parse_budget", "parse_share", "parse_size"]

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
_SHARE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")


def parse_size(size: str | int, *, where: str = "memory") -> int:
    """Bytes of a size: an integer, or a number with B, KB, MB, GB, TB (powers of 1000) or KiB .. TiB (of 1024).

    `where` names the argument in the error.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        num_bytes = size
    else:
        match = _SIZE.fullmatch(size) if isinstance(size, str) else None
        unit = "" if match is None else match[2].lower()
        if match is None or unit not in _UNITS or ("." in match[1] and _UNITS[unit] == 1):
            raise ArgumentError(
                f'expected a size such as "256MiB", "1.5GiB" or a number of bytes, got {size!r} for {where}'
            )
        num_bytes = int(Fraction(match[1]) * _UNITS[unit])
    if num_bytes <= 0:
        raise ArgumentError(f"expected a size of at least 1 byte, got {size!r} for {where}")
    return num_bytes


def parse_budget(size: str | int, *, where: str) -> int | float | None:
    """A part of a machine's memory: bytes, a share above 0 and up to 1 ("40%"), or None for "auto"."""
    if isinstance(size, str) and size.strip().lower() == "auto":
        return None
    share = _SHARE.fullmatch(size) if isinstance(size, str) else None
    if share is None:
        return parse_size(size, where=where)
    if not 0 < float(share[1]) <= 100:
        raise ArgumentError(f"expected a share above 0% and up to 100%, got {size!r} for {where}")
    return float(share[1]) / 100


def parse_share(where: str, value: str | int, total_bytes: int) -> int:
    """Bytes of a size or of a share of `total_bytes`, at most those; 0 or "0%" is 0."""
    if value in (0, "0"):
        return 0
    if isinstance(value, str) and value.strip().endswith("%"):
        try:
            percent = float(value.strip()[:-1])
        except ValueError:
            percent = -1.0
        if not 0 <= percent <= 100:
            raise ArgumentError(f"expected a share of 0% to 100%, got {value!r} - in `{where}`")
        return int(total_bytes * percent / 100)
    return min(parse_size(value, where=where), total_bytes)


def format_size(num_bytes: int) -> str:
    """The size in the largest binary unit that it fills, for messages: 1536 -> "1.5KiB"."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.4g}{unit}"
        value /= 1024
    return f"{value:.4g}TiB"
