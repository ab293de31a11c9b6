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

__all__ = [
    "CACHE_PRIORITIES",
    "MAX_SESSION_CHARS",
    "BegunAnswer",
    "CachePriority",
    "RequestKeywords",
    "RequestOptions",
    "cache_priority_number",
    "check_session",
]

MAX_SESSION_CHARS = 256

CachePriority = Literal["keep", "normal", "discard"]
CACHE_PRIORITIES: Mapping[str, int] = {"keep": KEEP, "normal": NORMAL, "discard": DISCARD}


class RequestKeywords(PrefixKeywords, total=False):
    """Keywords of `generate` and similar calls after prompt and parameters; see `RequestOptions` and `PrefixKey`."""

    priority: int
    cache_priority: CachePriority
    session: str | None


@dataclass(frozen=True)
class BegunAnswer:
    """The first tokens of an answer, drawn by another engine from the same prompt and parameters, and the seed of its
    draws, in place of that of the parameters."""

    seed: int
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class RequestOptions:
    """key: selects the cached content that it finds. priority: the smallest is served first; the tenant's is added.

    cache_priority: eviction order of its content after its end: "discard" first, "keep" last. stream: an output for
    each step instead of one at the end; deltas: each output contains only new tokens and text. request_id: generated
    if None. client: name of the client, or None for its tenant; clients share the engine, see `ClientFairness`.
    default_max_tokens: max_tokens, if neither the parameters nor the model set it; None: the engine's default.
    session: the name of its session, of at most 256 characters, which counts within its tenant; None for none.
    is_preparation: computes a prompt before a client asks for it: no request in counts and records. only_loads: takes
    what the tiers have of its prompt into memory, computes nothing and ends. begun: the beginning of its answer; it
    goes on behind that, as after a preemption.
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
    session: str | None = None
    only_loads: bool = False
    begun: BegunAnswer | None = None

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
        session: str | None = None,
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
            session=session,
        )


def cache_priority_number(cache_priority: Any) -> int:
    """The cache's number of a cache priority. *raises:* ArgumentError: unknown."""
    if cache_priority not in CACHE_PRIORITIES:
        raise ArgumentError(f"expected keep, normal or discard, got {cache_priority!r} - in `cache_priority`")
    return CACHE_PRIORITIES[cache_priority]


def check_session(session: Any) -> None:
    """*raises:* ArgumentError: no name of a session."""
    if not isinstance(session, str) or not 0 < len(session) <= MAX_SESSION_CHARS:
        got = f"{len(session)}" if isinstance(session, str) else repr(session)
        raise ArgumentError(
            f"expected a session's name of 1 to {MAX_SESSION_CHARS} characters, got {got} - in `session`"
        )
