"""`RequestOptions`: all that a request brings beside its prompt. Data only.

`RequestValidator` checks it, once, in the engine's thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Unpack

from quire.cache.prefix_key import PrefixKey, PrefixKeywords
from quire.cache.protocol import DISCARD, KEEP, NORMAL
from quire.errors import ArgumentError
from quire.sampling.params import SamplingParams

__all__ = ["CACHE_PRIORITIES", "CachePriority", "RequestKeywords", "RequestOptions", "cache_priority_number"]

CachePriority = Literal["keep", "normal", "discard"]
CACHE_PRIORITIES: Mapping[str, int] = {"keep": KEEP, "normal": NORMAL, "discard": DISCARD}


class RequestKeywords(PrefixKeywords, total=False):
    """What the calls that generate take beside prompt and parameters: see `RequestOptions` and `PrefixKey`."""

    priority: int
    cache_priority: CachePriority


@dataclass(frozen=True)
class RequestOptions:
    """key: whose cached content it finds. priority: smaller is served first; the tenant's is added.

    cache_priority: how its content is kept once it has ended: "keep" goes last, "discard" first. stream: an output
    for each step instead of one at the end; deltas: each with what is new only. request_id: made up if not given.
    client: whose it is among those that share the engine: places are shared between clients, see `ClientFairness`.
    """

    params: SamplingParams = field(default_factory=SamplingParams)
    key: PrefixKey = field(default_factory=PrefixKey)
    priority: int = 0
    cache_priority: CachePriority = "normal"
    stream: bool = False
    deltas: bool = False
    request_id: str | None = None
    client: str | None = None

    @classmethod
    def of(
        cls,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_priority: CachePriority = "normal",
        stream: bool = False,
        deltas: bool = False,
        request_id: str | None = None,
        **key: Unpack[PrefixKeywords],
    ) -> RequestOptions:
        """From the keywords of a call. params: None for the defaults. *raises:* TypeError for unknown keywords."""
        params = SamplingParams() if params is None else params
        return cls(params, PrefixKey.of(**key), priority, cache_priority, stream, deltas, request_id)


def cache_priority_number(cache_priority: Any) -> int:
    """As the cache has it. *raises:* ArgumentError."""
    if cache_priority not in CACHE_PRIORITIES:
        raise ArgumentError(f"expected keep, normal or discard, got {cache_priority!r} - in `cache_priority`")
    return CACHE_PRIORITIES[cache_priority]
