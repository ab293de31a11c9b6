"""What the offload needs of a request's sequence: it puts there how far a search, a load or a swap has come.

Not the sequence itself: that is the scheduler's (`quire.scheduler.request.RequestSequence`), which stands below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from quire.cache.prefix_key import ResolvedKey
from quire.cache.protocol import CacheSequence

__all__ = ["InEngine", "OffloadedSequence"]

# Calls a function in the thread that owns the engine, and returns what it returns.
InEngine = Callable[[Callable[[], Any]], Any]


class _OffloadedRequest(Protocol):
    @property
    def key(self) -> ResolvedKey: ...
    @property
    def cache_priority(self) -> int: ...


class OffloadedSequence(Protocol):
    """cache_sequence: open while it runs or loads. num_computed: tokens whose KV is computed.

    search, load, swapped: set and read by the offload alone (`Search`, `TierLoad`, `Swapped`); None without one.
    """

    cache_sequence: CacheSequence
    num_computed: int
    search: Any
    load: Any
    swapped: Any

    @property
    def request(self) -> _OffloadedRequest: ...
    def token_ids(self) -> np.ndarray:
        """All known ones, prompt and output; int32."""
        ...
