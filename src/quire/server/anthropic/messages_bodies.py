"""Bodies of `/v1/messages` and `/v1/messages/count_tokens`, and of their answers.

A block of content has one class for all types, so that an error names the field of the body; `messages_prompt` checks
which fields a type has. Fields of functions that this server lacks are refused by name, as in `schemas.unserved`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from quire.server.schemas.accepted import Accepted
from quire.server.schemas.caching import CacheableFields
from quire.server.schemas.chat_bodies import TOOL_NAME
from quire.server.schemas.session_bodies import SessionCache
from quire.server.schemas.strict_body import GeneratingBody, StrictBody
from quire.server.schemas.unserved import OneOf

__all__ = [
    "ContentBlock",
    "CountTokensRequest",
    "CountedTokens",
    "MessageAnswer",
    "MessagesErrorBody",
    "MessagesPrompt",
    "MessagesRequest",
    "MessagesTool",
    "MessagesUsage",
    "OutputConfig",
    "PastMessage",
    "ThinkingConfig",
    "ToolSelection",
]

_OF_ANSWER = Accepted("left out: it describes another server's answer")
_NO_TOOLSETS = "this server has no toolsets; use tools"
_NO_CONTAINERS = "this server runs no code"
_ONE_TENANT = "an API key tells its tenant"
_NO_BILLING = "this server bills nothing"


_TEXT = "send their text in a block of the type text"
_NOT_SERVED = {
    "image": "images are not supported: this server reads text",
    "document": f"documents are not supported: {_TEXT}",
    "search_result": f"search results are not supported: {_TEXT}",
    "browser_state": f"browser states are not supported: {_TEXT}",
    "container_upload": "files are not supported: this server runs no code",
    "tool_reference": "tool references are not supported: every tool is described in the prompt",
}
# Endings of the types that tools of a server, and other services of Anthropic's, have.
_OF_SERVICES = (
    "server_tool_use", "mcp_tool_use", "_tool_result", "_tool_listing", "tool_addition", "tool_removal", "compaction",
    "fallback",
)  # fmt: skip


class ResultBlock(CacheableFields):
    """A part of a tool's result. Only type `text` is served."""

    type: str = Field(max_length=64)
    text: str | None = None
    citations: Annotated[Any, _OF_ANSWER] = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_types(cls, data: Any) -> Any:
        """Names the type of a block that is not served, rather than a field of it."""
        kind = data.get("type") if isinstance(data, dict) else None
        if not isinstance(kind, str):
            return data
        message = _NOT_SERVED.get(kind)
        if message is None and kind.endswith(_OF_SERVICES):
            message = f"blocks of the type {kind[:64]} are not supported: this server runs no tools"
        if message is not None:
            raise PydanticCustomError("unserved", "{message}", {"message": message})
        return data


class ContentBlock(ResultBlock):
    """A block of a message: text, thinking, redacted_thinking, tool_use or tool_result."""

    thinking: str | None = None
    signature: str | None = Field(default=None, description="Not verified. Ours may hold omitted thoughts.")
    data: str | None = Field(default=None, description="Of the type redacted_thinking: encrypted, left out.")
    id: str | None = Field(default=None, max_length=256)
    name: str | None = Field(default=None, max_length=256)
    input: dict[str, Any] | None = None
    tool_use_id: str | None = Field(default=None, max_length=256)
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None
    caller: Annotated[Any, OneOf("tools are called by the model", {"type": "direct"})] = None
    toolset_name: Annotated[Any, OneOf(_NO_TOOLSETS)] = None


class PastMessage(StrictBody):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]
    clear_at: Annotated[Any, OneOf("histories are not edited here; leave the message out")] = None
    output_config: Annotated[Any, OneOf("say it next to the messages")] = None


class MessagesTool(CacheableFields):
    """A tool that the client runs. Tools of Anthropic's servers and its predefined client tools are refused."""

    type: str | None = Field(None, max_length=64, description="custom")
    name: str = Field(pattern=f"^{TOOL_NAME}$")
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    input_examples: list[dict[str, Any]] | None = Field(None, description="Written behind the description.")
    strict: bool | None = Field(
        None, description="true: only with a tool_choice of any or tool, which always keep to the schema."
    )
    eager_input_streaming: Annotated[bool | None, Accepted("input is streamed as the model writes it")] = None
    defer_loading: Annotated[Any, OneOf("every tool is described in the prompt", False)] = None
    allowed_callers: Annotated[Any, OneOf("tools are called by the model", ["direct"])] = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_types(cls, data: Any) -> Any:
        """Names the type of a tool that is not served, rather than a field of it."""
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind != "custom":
            message = (
                f"tools of the type {kind[:64]} are not supported: this server runs no tools and knows none of "
                "Anthropic's; describe it with an input_schema and run it in the client"
            )
            raise PydanticCustomError("unserved", "{message}", {"message": message})
        return data


class ToolSelection(StrictBody):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(default=None, max_length=256)
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(StrictBody):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int | None, Accepted("thinking ends by itself, or at max_tokens")] = Field(
        None, ge=1024, lt=2**31
    )
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="omitted: blocks come without text, and their signature holds it."
    )


class JsonOutputFormat(StrictBody):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictBody):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="For a chat template that knows reasoning_effort or enable_thinking."
    )
    format: JsonOutputFormat | None = None


class RequestMetadata(StrictBody):
    user_id: Annotated[
        str | None, Accepted("names the session if the server says --session-from-user-id; else not used")
    ] = None


class MessagesPrompt(CacheableFields):
    """The fields that decide the prompt."""

    model: str | None = Field(None, description="The served model's name; any of `/v1/models`.")
    messages: Annotated[list[PastMessage], Field(min_length=1)]
    system: str | list[ContentBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: ToolSelection | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Ours: arguments of the chat template."
    )
    speed: Annotated[Any, OneOf("there is one speed", "standard")] = None
    user_profile_id: Annotated[Any, OneOf(_ONE_TENANT)] = None
    workspace_id: Annotated[Any, OneOf(_ONE_TENANT)] = None
    # Of betas
    context_management: Annotated[
        Any,
        OneOf(
            "histories are not edited here; send the messages that the model shall see",
            {},
            {"edits": []},
            {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        ),
    ] = None
    mcp_servers: Annotated[Any, OneOf("this server calls no MCP servers; give their tools as tools", [])] = (
        None
    )
    compaction: Annotated[Any, OneOf("histories are not compacted here")] = None
    billing_policy: Annotated[Any, OneOf(_NO_BILLING)] = None
    output_format: JsonOutputFormat | None = Field(
        None, description="The beta's name of output_config.format."
    )


class CountTokensRequest(MessagesPrompt):
    """A prompt whose tokens are counted."""


class MessagesRequest(MessagesPrompt, GeneratingBody):
    max_tokens: int = Field(ge=0, lt=2**31, description="0: the prompt is computed and nothing generated.")
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    metadata: RequestMetadata | None = None
    service_tier: Annotated[Literal["auto", "standard_only"] | None, Accepted("there is one")] = None
    container: Annotated[Any, OneOf(_NO_CONTAINERS)] = None
    inference_geo: Annotated[Any, OneOf("the model runs where this server runs")] = None
    diagnostics: Annotated[
        Any,
        OneOf(
            "answers are not compared with earlier ones; usage says what was read from the cache",
            {},
            {"previous_message_id": None},
        ),
    ] = None
    fallbacks: Annotated[Any, OneOf("this server serves one model", [])] = None
    fallback_credit_token: Annotated[Any, OneOf(_NO_BILLING)] = None
    thread: dict[str, Any] | None = Field(
        None, description="Not served: send the whole history. The client's helpers then do so."
    )
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="Ours.")
    session_id: str | None = Field(
        None, description="Ours: names the session, whose next turn is prepared; or the header X-Session-Id."
    )
    cache_salt: str | None = Field(
        None, max_length=1024, description="Ours: separates this request's cached content from others'."
    )
    priority: int | None = Field(None, ge=0, le=2**20, description="Ours: smaller is served first.")
    cache_priority: Literal["keep", "normal", "discard"] | None = Field(
        None, description="Ours: how early its cached content is evicted."
    )
    keep_for: float | None = Field(
        None,
        gt=0,
        le=30 * 86400,
        description="Ours: seconds for which the whole prompt is pinned; 400 if there is no room.",
    )
    session_cache: SessionCache = None


class CacheCreation(BaseModel):
    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class MessagesUsage(BaseModel):
    """input_tokens: computed and not pinned. The three input counts add up to the prompt's length."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = Field(description="Computed and pinned by cache_control.")
    cache_creation: CacheCreation
    output_tokens: int


class AnswerBlock(BaseModel):
    """thinking: with thinking and signature. text: with text. tool_use: with id, name and input."""

    type: Literal["thinking", "text", "tool_use"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None


class MessageAnswer(BaseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: (
        Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"] | None
    )
    stop_sequence: str | None
    usage: MessagesUsage


class CountedTokens(BaseModel):
    input_tokens: int


class MessagesErrorDetails(BaseModel):
    error_code: str = Field(description="The code, where Anthropic's clients look for it.")


class MessagesError(BaseModel):
    type: str
    message: str
    details: MessagesErrorDetails
    param: str | None = None
    code: str


class MessagesErrorBody(BaseModel):
    """The body of every answer with a status from 400 on."""

    type: Literal["error"] = "error"
    error: MessagesError
    request_id: str
