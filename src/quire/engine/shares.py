"""A part of the KV memory as people write it: a size, or a share such as "25%"."""

from __future__ import annotations

from quire.errors import ArgumentError
from quire.sizes import parse_size

__all__ = ["parse_share"]


def parse_share(where: str, value: str | int, total_bytes: int) -> int:
    """Bytes, at most `total_bytes`; 0 or "0%" is nothing."""
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
