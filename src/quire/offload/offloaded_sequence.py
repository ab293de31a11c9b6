"""`OffloadedSequence`: the fields of a request's sequence that the offload needs, for its searches, loads and swaps.

Not the sequence itself: that is the scheduler's (`quire.scheduler.request.RequestSequence`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from quire.cache.prefix_key import ResolvedKey
from quire.cache.protocol import CacheSequence

__all__ = ["InEngine", "OffloadedSequence"]

# Calls a function in the engine's thread, and returns its result.
InEngine = Callable[[Callable[[], Any]], Any]


class _OffloadedRequest(Protocol):
    @property
    def key(self) -> ResolvedKey: ...
    @property
    def cache_priority(self) -> int: ...
    @property
    def scores(self) -> Any:
        """`quire.sampling.prompt_scores.PromptScores`; None unless its prompt is scored."""
        ...


class OffloadedSequence(Protocol):
    """cache_sequence: open while it runs or loads. num_computed: tokens whose KV is computed.

    search, load, swapped: for the offload only (`Search`, `TierLoad`, `Swapped`); None if there is none.
    """

    cache_sequence: CacheSequence
    num_computed: int
    search: Any
    load: Any
    swapped: Any

    @property
    def request(self) -> _OffloadedRequest: ...
    @property
    def max_cached_tokens(self) -> int | None:
        """The most tokens that it may take from the cache or a tier; None: no limit."""
        ...

    def token_ids(self) -> np.ndarray:
        """All known tokens, prompt and output; int32."""
        ...
