"""Bodies of `/admin`, Quire's own."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from quire.server.schemas.chat_bodies import ChatMessage
from quire.server.schemas.common import TokenId
from quire.server.schemas.strict_body import StrictBody

__all__ = [
    "AdminPrompt",
    "ApiDropped",
    "Explained",
    "Flush",
    "Flushed",
    "Memory",
    "PinCard",
    "PinList",
    "PinRequest",
    "Resize",
]


class AdminPrompt(StrictBody):
    """A prompt, or messages, of a tenant; without a tenant, of requests without keys."""

    prompt: str | Annotated[list[TokenId], Field(min_length=1)] | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    tenant: str | None = Field(None, max_length=256)
    cache_salt: str | None = Field(None, max_length=1024)


class PinRequest(AdminPrompt):
    ttl: float | None = Field(
        None, gt=0, le=30 * 86400, description="Seconds after the last use; null: until it is unpinned."
    )
    publish: bool = Field(False, description="Every tenant may read the prompt's blocks.")


class PinCard(BaseModel):
    id: str
    owner: str
    is_published: bool
    num_tokens: int
    bytes: int
    num_hits: int
    expires_in: float | None


class PinList(BaseModel):
    object: str = "list"
    data: list[PinCard]


class ApiDropped(BaseModel):
    num_freed: int = Field(description="Blocks made free at once.")
    num_held: int = Field(
        description="Blocks that running requests hold: not found any more, freed when these end."
    )


class Resize(StrictBody):
    kv_memory: Annotated[int, Field(ge=1, lt=2**62)] | Annotated[str, Field(max_length=32)] = Field(
        description='A size ("1GiB", bytes) or a share of the free memory ("40%").'
    )


class Memory(BaseModel):
    kv_memory_bytes: int
    num_blocks: int
    capacity: str


class Explained(BaseModel):
    text: str
    num_tokens: int
    num_hit_tokens: int
    num_tier_tokens: dict[str, int]
    num_published_tokens: int
    stop: int | None
    reason: str
    differs_at: int | None
    differs_on_disk: bool
    lost_s_ago: float | None
    idle_s: float | None
    lost_for: str | None
    elsewhere: str | None
    is_log_full: bool
    silent_tiers: list[str] = Field(description="Tiers that failed to answer.")
    is_end: bool = Field(description="The first missing token is among the last ones, which fill no block.")


class Flush(StrictBody):
    tiers: bool = Field(True, description="Write memory's content to the tiers.")
    memory: bool = Field(False, description="Evict all blocks that no request and no pin holds.")


class Flushed(BaseModel):
    num_freed: int = Field(description="Freed blocks.")
