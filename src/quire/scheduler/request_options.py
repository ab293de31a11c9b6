"""`RequestOptions`: the options of a request in addition to its prompt. Data only.

`RequestValidator` checks them once, in the engine's thread.
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
    """Keywords of `generate` and similar calls after prompt and parameters; see `RequestOptions` and `PrefixKey`."""

    priority: int
    cache_priority: CachePriority


@dataclass(frozen=True)
class RequestOptions:
    """key: selects the cached content that it finds. priority: the smallest is served first; the tenant's is added.

    cache_priority: eviction order of its content after its end: "discard" first, "keep" last. stream: an output for
    each step instead of one at the end; deltas: each output contains only new tokens and text. request_id: generated
    if None. client: name of the client; clients share the places of the batch, see `ClientFairness`.
    default_max_tokens: max_tokens, if neither the parameters nor the model set it; None: the engine's default.
    is_preparation: computes a prompt before a client asks for it: no request in counts and records.
    """

    params: SamplingParams = field(default_factory=SamplingParams)
    key: PrefixKey = field(default_factory=PrefixKey)
    priority: int = 0
    cache_priority: CachePriority = "normal"
    stream: bool = False
    deltas: bool = False
    request_id: str | None = None
    client: str | None = None
    default_max_tokens: int | None = None
    is_preparation: bool = False

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
        is_preparation: bool = False,
        **key: Unpack[PrefixKeywords],
    ) -> RequestOptions:
        """Options from a call's keywords. params: None for the defaults. *raises:* TypeError: unknown keywords."""
        params = SamplingParams() if params is None else params
        return cls(
            params,
            PrefixKey.of(**key),
            priority,
            cache_priority,
            stream,
            deltas,
            request_id,
            is_preparation=is_preparation,
        )


def cache_priority_number(cache_priority: Any) -> int:
    """The cache's number of a cache priority. *raises:* ArgumentError: unknown."""
    if cache_priority not in CACHE_PRIORITIES:
        raise ArgumentError(f"expected keep, normal or discard, got {cache_priority!r} - in `cache_priority`")
    return CACHE_PRIORITIES[cache_priority]
