"""Bodies of `/quire/conversations`, Quire's own."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

from quire.server.schemas.chat_bodies import ChatCompletion, ChatFields, ChatMessage
from quire.server.schemas.common import TokenId
from quire.server.schemas.strict_body import StrictBody
from quire.server.schemas.unserved import OneOf

__all__ = [
    "ConversationAnswer",
    "ConversationCard",
    "ConversationDetails",
    "ConversationList",
    "Deleted",
    "NewConversation",
    "Rewind",
    "Rewound",
    "SnapshotCard",
    "SnapshotList",
    "SnapshotRequest",
    "Turn",
]

Messages = Annotated[list[ChatMessage], Field(min_length=1)]
Tokens = Annotated[list[TokenId], Field(min_length=1)]
Salt = Annotated[str | None, Field(max_length=1024)]

_NO_SCORES = "send the messages to POST /v1/chat/completions"


class NewConversation(StrictBody):
    """At most one of messages, text, tokens and snapshot."""

    messages: Messages | None = Field(None, description="The beginning of the first turn.")
    text: str | None = None
    tokens: Tokens | None = None
    snapshot: str | None = Field(None, description="The name of a snapshot.")
    recompute: bool = Field(False, description="Accepts a snapshot of another model: its tokens.")
    cache_salt: Salt = Field(None, description="For all turns, see `/v1/completions`.")


class Turn(ChatFields):
    """At most one of messages, text and tokens; without any, the model continues the conversation."""

    messages: Messages | None = Field(None, description="Rendered by the chat template as a continuation.")
    text: str | None = None
    tokens: Tokens | None = None
    add_special_tokens: Annotated[Any, OneOf("a turn has what its conversation needs")] = None
    truncate_prompt_tokens: Annotated[Any, OneOf("a conversation keeps its tokens")] = None
    truncation_side: Annotated[Any, OneOf("a conversation keeps its tokens")] = None
    prompt_logprobs: Annotated[Any, OneOf(_NO_SCORES)] = None
    prompt_logprobs_start: Annotated[Any, OneOf(_NO_SCORES)] = None
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    generate: bool = Field(True, description="Whether the model answers; false appends text or tokens.")


class Rewind(StrictBody):
    """Either position or turns."""

    position: int | None = Field(None, ge=0, lt=2**31, description="Number of tokens to keep.")
    turns: int | None = Field(None, ge=1, lt=2**31, description="Number of turns to remove.")


class SnapshotRequest(StrictBody):
    name: str = Field(max_length=200)
    overwrite: bool = False


class ConversationCard(BaseModel):
    id: str
    object: str = "conversation"
    created: int
    num_tokens: int
    turns: list[int] = Field(description="The number of tokens before each turn, to rewind to.")


class ConversationDetails(ConversationCard):
    tokens: list[int]
    text: str | None


class ConversationList(BaseModel):
    object: str = "list"
    data: list[ConversationCard]


class ConversationAnswer(ChatCompletion):
    conversation: ConversationCard


class Rewound(ConversationCard):
    num_cached_tokens: int = Field(description="Tokens of the rest that are in memory.")


class Deleted(BaseModel):
    id: str
    object: str = "conversation.deleted"
    deleted: bool = True


class SnapshotCard(BaseModel):
    name: str
    num_tokens: int
    num_stored_tokens: int = Field(description="Tokens whose keys and values are on disk.")
    model: str
    is_usable: bool
    made_at: float

    @classmethod
    def of(cls, snapshot: Any) -> SnapshotCard:
        return cls.model_validate(snapshot, from_attributes=True)


class SnapshotList(BaseModel):
    object: str = "list"
    data: list[SnapshotCard]
