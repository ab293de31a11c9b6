"""The keyword by which a forward takes its cache: `past_key_values`, or `cache` since transformers 5.24.

Read from the signature, never from a version: a model's own code may be older or newer than the installed library.
Attributes of outputs are not covered, but output classes are checked the same way: they are made from keywords as well.

Cost: `cache_keyword` some 20 us, once per module; `given_cache` two look-ups.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["CACHE_KEYWORDS", "cache_keyword", "given_cache"]

CACHE_KEYWORDS = ("cache", "past_key_values")  # the newer one first


def cache_keyword(function: Callable[..., Any]) -> str | None:
    """The cache keyword of `function`, a forward or an output's class; None if it takes no cache."""
    parameters = inspect.signature(function).parameters
    return next((name for name in CACHE_KEYWORDS if name in parameters), None)


def given_cache(keyword: str | None, arguments: Mapping[str, Any]) -> Any:
    """The cache among a call's keywords; None if there is none.

    keyword: `cache_keyword` of the called function. A function with `cache` accepts the older name too, as in
    transformers.
    """
    if keyword is None:
        return None
    cache = arguments.get(keyword)
    return arguments.get("past_key_values") if cache is None else cache
