"""Bodies of `/v1/responses` and `/v1/conversations`, as OpenAI's.

Every field of OpenAI's takes effect, changes no answer (`Accepted`), or is refused by name (`OneOf`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from quire.server.schemas.accepted import Accepted
from quire.server.schemas.caching import SECONDS, PromptCacheFields
from quire.server.schemas.chat_bodies import TOOL_NAME
from quire.server.schemas.common import TokenId
from quire.server.schemas.response_items import Id, InputItem
from quire.server.schemas.session_bodies import SessionCache
from quire.server.schemas.strict_body import GeneratingBody, StrictBody
from quire.server.schemas.typed_union import OfTypes
from quire.server.schemas.unserved import OneOf

__all__ = [
    "AllowedTools",
    "ConversationItemList",
    "ConversationUpdate",
    "DeletedConversation",
    "DeletedResponse",
    "FunctionTool",
    "Include",
    "InputTokens",
    "ItemList",
    "ModelResponse",
    "NamedFunctionTool",
    "NewItems",
    "OpenAIConversation",
    "OpenAIConversationRequest",
    "PromptOfResponse",
    "ResponseRequest",
]

_NO_HOSTED = "this server runs no tools; describe a function, and run it where the client is"
_NO_BACKGROUND = "an answer ends with its connection; stream it, or wait for it"
_NAMES = "say tools with a function of that name, and its name here"

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16, description="Up to 16 texts, kept and returned."),
]
HOSTED_TOOLS = (
    "file_search", "web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11",
    "computer", "computer_use", "computer_use_preview", "mcp", "code_interpreter", "programmatic_tool_calling",
    "image_generation", "local_shell", "shell", "tool_search", "apply_patch",
)  # fmt: skip
REFUSED_TOOLS = {
    **dict.fromkeys(HOSTED_TOOLS, _NO_HOSTED),
    "custom": "tools take JSON; describe a function with one text argument",
    "namespace": "functions have no namespaces; write it into their names",
}


class FunctionTool(StrictBody):
    type: Literal["function"] = "function"
    name: str = Field(pattern=f"^{TOOL_NAME}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: Annotated[Any, OneOf("calls are made by the model itself", ["direct"], [])] = None
    defer_loading: Annotated[Any, OneOf("all tools of a request are described to the model", False)] = None
    output_schema: Annotated[Any, OneOf("the model is not told; write it into the description")] = None
    async_: Annotated[Any, OneOf("a call is answered before the model goes on", False)] = Field(
        None, alias="async"
    )


class NamedFunctionTool(StrictBody):
    type: Literal["function"] = "function"
    name: str = Field(pattern=f"^{TOOL_NAME}$")


class AllowedTools(StrictBody):
    """The model is told of these tools alone."""

    type: Literal["allowed_tools"] = "allowed_tools"
    mode: Literal["auto", "required"]
    tools: list[Annotated[NamedFunctionTool, OfTypes(REFUSED_TOOLS)]] = Field(min_length=1)


ResponseTool = Annotated[FunctionTool, OfTypes(REFUSED_TOOLS)]
ResponseToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[NamedFunctionTool | AllowedTools, OfTypes({**REFUSED_TOOLS, "custom": _NAMES})]
)


class TextFormat(StrictBody):
    type: Literal["text"] = "text"


class JsonObjectFormat(StrictBody):
    type: Literal["json_object"] = "json_object"


class NamedSchemaFormat(StrictBody):
    type: Literal["json_schema"] = "json_schema"
    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextConfig(StrictBody):
    format: (
        Annotated[TextFormat | JsonObjectFormat | NamedSchemaFormat, OfTypes({"grammar": "say json_schema"})]
        | None
    ) = None
    verbosity: Annotated[str | None, Accepted("the model is not told; ask for it in the instructions")] = None


class ReasoningConfig(StrictBody):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="For a chat template that knows reasoning_effort or enable_thinking."
    )
    summary: Annotated[str | None, Accepted("reasoning is returned whole, in the item's content")] = None
    generate_summary: Annotated[str | None, Accepted("likewise")] = None
    context: Annotated[Any, OneOf("the chat template says which reasoning it repeats", "auto")] = None
    mode: Annotated[Any, OneOf("there is one", "standard")] = None


class ResponseStreamOptions(StrictBody):
    include_obfuscation: Annotated[Any, OneOf("events are not padded", False)] = None


class ConversationId(StrictBody):
    id: Id


Include = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]


class PromptOfResponse(StrictBody):
    """The fields that a prompt is made of."""

    model: str | None = Field(None, description="The served model's name; any of `/v1/models`.")
    input: str | list[InputItem] | None = None
    instructions: str | None = Field(
        None, description="A system message before the history; not carried over."
    )
    previous_response_id: Id | None = Field(None, description="The response whose history this continues.")
    conversation: Id | ConversationId | None = Field(
        None, description="Its items come before the input; input and output are added to it."
    )
    tools: list[ResponseTool] | None = None
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="False: only the first call is returned.")
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: a history that is too long loses its first items; default: 400."
    )
    personality: Annotated[Any, OneOf("ask for it in the instructions")] = None


class ResponseRequest(PromptOfResponse, PromptCacheFields, GeneratingBody):
    """OpenAI's fields, and Quire's of sampling and caching as in chat completions."""

    stream: bool | None = False
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = Field(None, description="Default true: the response can be continued and retrieved.")
    metadata: Metadata | None = None
    include: list[Include] | None = None
    max_output_tokens: int | None = Field(
        None, ge=0, lt=2**31, description="0: the prompt is computed and cached, nothing is generated."
    )
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1, description="0: the most likely token.")
    top_logprobs: int | None = Field(None, ge=0, description="With include: [message.output_text.logprobs].")
    max_tool_calls: Annotated[int | None, Accepted("it limits OpenAI's own tools; there are none")] = None
    user: Annotated[str | None, Accepted("returned; keys tell tenants apart")] = None
    safety_identifier: Annotated[str | None, Accepted("returned")] = None
    service_tier: Annotated[str | None, Accepted("there is one")] = None
    prompt_cache_key: Annotated[
        str | None,
        Accepted("returned; names the session, without session_id; prefixes are found by their tokens"),
    ] = None
    session_id: Annotated[str | None, Accepted("names the session, whose next turn is prepared")] = None
    background: Annotated[Any, OneOf(_NO_BACKGROUND, False)] = None
    background_options: Annotated[Any, OneOf(_NO_BACKGROUND)] = None
    prompt: Annotated[Any, OneOf("this server keeps no prompt templates; say instructions and input")] = None
    context_management: Annotated[Any, OneOf("histories are not compacted; say truncation: auto", [])] = None
    moderation: Annotated[Any, OneOf("this server has no moderation")] = None
    access_programs: Annotated[Any, OneOf("this server has none")] = None
    image: Annotated[Any, OneOf("images are not supported: this server reads text")] = None
    # Ours, as in chat completions.
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="Ours: 0 or -1 for all tokens.")
    min_p: float | None = Field(None, ge=0, le=1, description="Ours.")
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, description="Ours.")
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = Field(None, description="Ours.")
    ignore_eos: bool | None = Field(False, description="Ours: end tokens do not end the answer.")
    cache_salt: str | None = Field(None, max_length=1024, description="Ours: separates cached content.")
    priority: int | None = Field(None, ge=0, le=2**20, description="Ours: smaller is served first.")
    cache_priority: Literal["keep", "normal", "discard"] | None = Field(
        None, description="Ours: how early its cached content is evicted."
    )
    keep_for: float | None = Field(
        None, gt=0, le=30 * 86400, description="Ours: seconds for which its prompt's blocks are pinned."
    )
    session_cache: SessionCache = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="vLLM's: arguments of the chat template, such as enable_thinking."
    )
    enable_thinking: bool | None = Field(None, description="Qwen's: for a chat template that knows it.")


class OpenAIConversationRequest(StrictBody):
    items: list[InputItem] | None = None
    metadata: Metadata | None = None


class ConversationUpdate(StrictBody):
    metadata: Metadata | None


class NewItems(StrictBody):
    items: list[InputItem] = Field(min_length=1)


class KeptTokensDetails(BaseModel):
    """Tokens that were computed and pinned, by their time."""

    ttl_30m_tokens: int = 0
    ttl_12h_tokens: int = 0


class InputTokensDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int
    cache_write_tokens_details: KeptTokensDetails = KeptTokensDetails()
    kept_tokens: int = Field(default=0, description="Ours: pinned by caching fields of the request.")


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(
        cls,
        num_input: int,
        num_cached: int,
        num_output: int,
        num_reasoning: int,
        num_pinned: int = 0,
        pinned: Mapping[float, int] | None = None,
    ) -> ResponseUsage:
        """num_pinned: tokens of the prompt. pinned: those of them that were computed, by the seconds of their pin."""
        pinned = pinned or {}
        return cls(
            input_tokens=num_input,
            input_tokens_details=InputTokensDetails(
                cached_tokens=num_cached,
                cache_write_tokens=num_input - num_cached,
                cache_write_tokens_details=KeptTokensDetails(
                    ttl_30m_tokens=pinned.get(SECONDS["30m"], 0),
                    ttl_12h_tokens=pinned.get(SECONDS["12h"], 0),
                ),
                kept_tokens=num_pinned,
            ),
            output_tokens=num_output,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=num_reasoning),
            total_tokens=num_input + num_output,
        )


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class ModelResponse(BaseModel):
    """An answer. Its output has items of the types message, function_call and reasoning."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: dict[str, Any] | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    model: str
    output: list[dict[str, Any]] = []
    usage: ResponseUsage | None = None
    previous_response_id: str | None = None
    conversation: dict[str, str] | None = None
    metadata: dict[str, str] = {}
    store: bool = True
    background: bool = False
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] = {}
    truncation: Literal["auto", "disabled"] = "disabled"
    service_tier: str = "default"
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = Field(None, description="As they were applied.")
    prompt_cache_retention: str | None = None


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ItemList(BaseModel):
    """A page of items. after: the last id of the page before."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ConversationItemList(ItemList):
    """The items that a request has added, or a page of a conversation's items."""


class OpenAIConversation(BaseModel):
    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]


class DeletedConversation(BaseModel):
    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: bool = True
