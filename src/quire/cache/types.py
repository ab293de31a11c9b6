"""Types and numbers that all files of the cache share: arrays of tokens and ids, cache priorities, owners.

It imports no other file of the cache. `protocol.py` has them too, next to the calls that take them.
"""

from __future__ import annotations

from quire.step import Int32Array, Int64Array

__all__ = ["DISCARD", "KEEP", "MAX_OWNER", "NORMAL", "NO_LIMIT", "Int32Array", "Int64Array"]


# Eviction order of content that no sequence holds (`cache_priority` of `KVCache.open`).
DISCARD, NORMAL, KEEP = 0, 1, 2
MAX_OWNER = 2**16 - 1
NO_LIMIT = 2**31 - 1  # tokens of a hit without limit
