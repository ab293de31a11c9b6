"""Quire: the memory system of LLM inference.

What needs torch is imported when it is first asked for, so that the cache as a library stays light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quire.cache.cache import Cache
from quire.spec import KVSpec

if TYPE_CHECKING:
    from quire.engine.async_engine import AsyncEngine
    from quire.engine.llm import LLM
    from quire.engine.sampling_params import SamplingParams

__all__ = ["AsyncEngine", "Cache", "KVSpec", "LLM", "SamplingParams"]  # noqa: RUF022 - in plain order, as a test checks

_LAZY = {
    "LLM": "quire.engine.llm",
    "AsyncEngine": "quire.engine.async_engine",
    "SamplingParams": "quire.engine.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
