"""Quire: the memory system of LLM inference."""

from quire.cache.cache import Cache
from quire.spec import KVSpec

__all__ = ["Cache", "KVSpec"]
