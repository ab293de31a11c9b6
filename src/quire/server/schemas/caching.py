"""Fields of OpenAI's and Anthropic's APIs about the prompt cache. `quire.server.prompt_caching` says what they do."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from quire.server.schemas.strict_body import StrictBody
from quire.server.schemas.unserved import OneOf

__all__ = [
    "CacheControl",
    "CacheableFields",
    "PromptCacheBreakpoint",
    "PromptCacheFields",
    "PromptCacheOptions",
]

SECONDS = {"5m": 300.0, "30m": 1800.0, "1h": 3600.0, "12h": 43200.0}


class CacheControl(StrictBody):
    """Anthropic's. A breakpoint: the prompt's beginning up to here is pinned for the time after its last use."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = Field(default=None, description="Default: 5m.")

    @property
    def seconds(self) -> float:
        return SECONDS[self.ttl or "5m"]


class PromptCacheBreakpoint(StrictBody):
    """OpenAI's, likewise."""

    mode: Literal["explicit"]
    ttl: Literal["30m", "12h"] | None = Field(
        default=None, description="Default: that of prompt_cache_options."
    )


class CacheableFields(StrictBody):
    """Of a part of a chat: a breakpoint behind it."""

    cache_control: CacheControl | None = Field(
        default=None, description="Anthropic's: pins the prompt up to here."
    )


class PromptCacheOptions(StrictBody):
    """OpenAI's. With it the prompt's end is a breakpoint as well, unless mode is explicit."""

    mode: Literal["implicit", "explicit"] | None = Field(
        default=None,
        description="explicit: breakpoints alone are pinned; without any, the prompt is evicted first.",
    )
    ttl: Literal["30m", "12h"] | None = Field(
        default=None, description="Time after the last use. Default: 30m."
    )
    prewarm: bool | None = Field(default=None, description="True: as max_tokens: 0.")
    comparison_response_id: Annotated[
        Any, OneOf("send the header X-Cache-Report: true, which tells why a prompt was not cached")
    ] = None

    @property
    def seconds(self) -> float:
        return SECONDS[self.ttl or "30m"]

    @property
    def has_implicit(self) -> bool:
        """Whether the prompt's end is a breakpoint."""
        return self.mode != "explicit"


class PromptCacheFields(StrictBody):
    """OpenAI's fields of a body."""

    prompt_cache_options: PromptCacheOptions | None = Field(
        default=None,
        description="Pins the prompt, or its beginnings up to the breakpoints, as far as there is room.",
    )
    prompt_cache_retention: Literal["in_memory", "24h"] | None = Field(
        default=None,
        description="24h: as cache_priority keep. in_memory: the prompt is written to no disk and no server.",
    )
