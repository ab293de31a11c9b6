"""Depth and size of a JSON value, measured no further than a limit: a value beyond it costs no more than one within."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["is_deeper", "is_longer"]


def is_deeper(value: Any, max_depth: int) -> bool:
    """Whether objects and arrays are nested more than `max_depth` levels deep; an empty one is no level."""
    level = [value]
    for _ in range(max_depth + 1):
        level = [
            inner
            for entry in level
            if isinstance(entry, (dict, list))
            for inner in (entry.values() if isinstance(entry, dict) else entry)
        ]
        if not level:
            return False
    return True


def is_longer(value: Any, max_bytes: int) -> bool:
    """Whether the value takes more than `max_bytes` bytes of JSON. It must not be too deep for `json`
    (`is_deeper`)."""
    left, rest = max_bytes, [value]
    while rest and left >= 0:  # a lower bound of the size first, which bounds the cost of writing it
        entry = rest.pop()
        left -= 1
        if isinstance(entry, str):
            left -= len(entry)
        elif isinstance(entry, dict):
            left -= sum(len(name) + 3 for name in entry)
            rest.extend(entry.values())
        elif isinstance(entry, list):
            rest.extend(entry)
    return left < 0 or len(json.dumps(value)) > max_bytes
