"""Quire: the memory system of LLM inference.

`import quire` imports neither torch nor transformers. The names below that need them import them on first use.
`quire.__version__` is the version of the installed package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from quire.cache.cache import Cache
from quire.spec import KVSpec

if TYPE_CHECKING:
    from quire.engine.async_engine import AsyncEngine
    from quire.engine.llm import LLM
    from quire.engine.serving_plan import plan
    from quire.sampling.params import SamplingParams

    __version__: str

__all__ = ["AsyncEngine", "Cache", "KVSpec", "LLM", "SamplingParams", "plan"]  # noqa: RUF022 - plainly sorted

_MODULES = {
    "AsyncEngine": "quire.engine.async_engine",
    "LLM": "quire.engine.llm",
    "SamplingParams": "quire.sampling.params",
    "plan": "quire.engine.serving_plan",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return globals().setdefault(name, _version())
    if name not in _MODULES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("quire-kv")
    except PackageNotFoundError:  # a copy of the source that was never installed
        return "0+unknown"
