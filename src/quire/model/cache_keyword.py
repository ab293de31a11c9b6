"""What a forward calls the cache it is given: `past_key_values`, or `cache` since transformers 5.24.

Read from the signature, never from a version: a model's own code may be older or newer than the installed library.
Not for outputs' attributes, but their classes are asked the same way: they are made from keywords as well.

Cost: `cache_keyword` some 20 us, once a module; `given_cache` two look-ups.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["CACHE_KEYWORDS", "cache_keyword", "given_cache"]

CACHE_KEYWORDS = ("cache", "past_key_values")  # the newer one first


def cache_keyword(function: Callable[..., Any]) -> str | None:
    """The keyword that `function`, a forward or an output's class, takes a cache by; None where it takes none."""
    parameters = inspect.signature(function).parameters
    return next((name for name in CACHE_KEYWORDS if name in parameters), None)


def given_cache(keyword: str | None, arguments: Mapping[str, Any]) -> Any:
    """The cache among a call's keywords; None if there is none.

    keyword: `cache_keyword` of what is called. One that says `cache` takes the older name too, as transformers does.
    """
    if keyword is None:
        return None
    found = arguments.get(keyword)
    return arguments.get("past_key_values") if found is None else found
