"""How deep and how large a JSON value is: looked at no further than its limits, so that what is beyond them costs no
more than what is within."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["is_deeper", "is_longer"]


def is_deeper(value: Any, most: int) -> bool:
    """Whether objects and arrays stand in each other more than `most` levels deep; empty ones are no level."""
    level = [value]
    for _ in range(most + 1):
        level = [
            inner
            for one in level
            if isinstance(one, (dict, list))
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return False
    return True


def is_longer(value: Any, most: int) -> bool:
    """Whether it takes more than `most` bytes of JSON. Of a value that is not too deep for `json` (`is_deeper`)."""
    left, rest = most, [value]
    while rest and left >= 0:  # first by what it takes at least, which bounds what writing it costs
        one = rest.pop()
        left -= 1
        if isinstance(one, str):
            left -= len(one)
        elif isinstance(one, dict):
            left -= sum(len(name) + 3 for name in one)
            rest.extend(one.values())
        elif isinstance(one, list):
            rest.extend(one)
    return left < 0 or len(json.dumps(value)) > most
