"""Bodies of `/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from quire.server.schemas.accepted import (
    AcceptedInCalls,
    AcceptedInChats,
    AcceptedInFunctions,
    AcceptedInMessages,
    AcceptedInParts,
)
from quire.server.schemas.caching import CacheableFields, CacheControl, PromptCacheBreakpoint
from quire.server.schemas.common import PromptLogprobs, SamplingBody, Usage
from quire.server.schemas.strict_body import StrictBody
from quire.server.schemas.unserved import UnservedInChats, UnservedInMessages, UnservedInParts

__all__ = [
    "TOOL_NAME",
    "AllowedChoice",
    "ChatChoice",
    "ChatCompletion",
    "ChatFields",
    "ChatMessage",
    "ChatRequest",
    "ContentPart",
    "PromptFields",
    "ToolCall",
    "WholePromptFields",
]

# Of a function's name. OpenAI's names have 64 letters, digits, _ and -; bridges to MCP servers write longer ones with
# . : and /. Some call formats write a name without quotes, so it has no blank, quote or bracket.
TOOL_NAME = r"[a-zA-Z0-9_.:/-]{1,128}"


class ThoughtChunk(StrictBody):
    """Mistral's: reasoning as a list of texts."""

    type: Literal["text"]
    text: str


class ContentPart(CacheableFields, AcceptedInParts, UnservedInParts):
    """A text or, in an assistant's message, a refusal or reasoning, in the field that its type names."""

    type: str = Field(max_length=64)
    text: str | None = None
    refusal: str | None = None
    thinking: str | list[ThoughtChunk] | None = None
    data: str | None = Field(default=None, description="Of the type redacted_thinking: encrypted, ignored.")
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


class FunctionCall(CacheableFields, AcceptedInFunctions):
    name: str
    arguments: str


class ToolCall(CacheableFields, AcceptedInCalls):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(CacheableFields, AcceptedInMessages, UnservedInMessages):
    role: str = Field(min_length=1, max_length=64)
    content: str | list[ContentPart] | None = None
    refusal: str | None = Field(default=None, description="An assistant's refusal; becomes content.")
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(
        default=None,
        description="An answer's reasoning, for chat templates that repeat it; others leave it out.",
    )
    reasoning: str | None = Field(default=None, description="Likewise, vLLM's name.")
    thinking: str | None = Field(default=None, description="Likewise, gpt-oss's and Ollama's name.")
    copilot_cache_control: CacheControl | None = Field(
        default=None, description="Copilot's name of cache_control."
    )


class Function(StrictBody):
    name: str = Field(pattern=f"^{TOOL_NAME}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(CacheableFields):
    type: Literal["function"]
    function: Function

    def description(self) -> dict[str, Any]:
        """The tool as a chat template gets it."""
        return {"type": self.type, "function": self.function.model_dump(exclude_none=True)}


class NamedFunction(StrictBody):
    name: str


class NamedTool(StrictBody):
    type: Literal["function"]
    function: NamedFunction


class AllowedFunctions(StrictBody):
    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1)


class AllowedChoice(StrictBody):
    """The model is told of these tools alone."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


def _kind_of_choice(choice: Any) -> str:
    if isinstance(choice, str):
        return "word"
    kind = choice.get("type") if isinstance(choice, dict) else getattr(choice, "type", None)
    return "allowed" if kind == "allowed_tools" else "named"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedTool, Tag("named")]
    | Annotated[AllowedChoice, Tag("allowed")],
    Discriminator(_kind_of_choice),
]


class PromptFields(StrictBody):
    """The fields that a prompt is made of, in addition to messages."""

    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="vLLM's: arguments of the chat template, such as enable_thinking."
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None,
        description="For a chat template that knows reasoning_effort or enable_thinking; others refuse it.",
    )
    enable_thinking: bool | None = Field(
        None, description="Qwen's: for a chat template that knows it; others refuse true."
    )

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a call."""
        choice = self.tool_choice
        if isinstance(choice, AllowedChoice):
            return choice.allowed_tools.mode == "required"
        return choice == "required" or isinstance(choice, NamedTool)

    @property
    def described_tools(self) -> list[Tool]:
        """The tools that the model is told of."""
        tools, choice = self.tools or [], self.tool_choice
        if isinstance(choice, AllowedChoice):
            names = {allowed.function.name for allowed in choice.allowed_tools.tools}
            return [tool for tool in tools if tool.function.name in names]
        return [] if choice == "none" else tools


class WholePromptFields(PromptFields):
    """Further such fields where the messages are the whole prompt, not a conversation's next ones."""

    add_generation_prompt: bool | None = Field(
        None,
        description="vLLM's: false: the prompt ends with the last message and asks for no answer.",
    )
    continue_final_message: bool | None = Field(
        False, description="vLLM's: the answer continues the last message instead of beginning another."
    )
    documents: list[dict[str, Any]] | None = Field(
        None, description="vLLM's: for a chat template that knows documents; others refuse them."
    )


class ChatFields(PromptFields, SamplingBody, UnservedInChats, AcceptedInChats):
    """The fields that decide how a message is answered."""

    max_tokens: int | None = Field(
        None, ge=0, lt=2**31, description="0: the prompt is computed and cached, nothing is generated."
    )
    max_completion_tokens: int | None = Field(None, ge=0, lt=2**31, description="Likewise; it goes first.")
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0)
    cache_control: CacheControl | None = Field(
        None, description="Anthropic's: pins the whole prompt for a time after its last use."
    )


class ChatRequest(WholePromptFields, ChatFields):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob] | None


class AnsweredCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: dict[str, str]


class AnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: None = None
    tool_calls: list[AnsweredCall] | None = None
    reasoning_content: str | None = None


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    usage: Usage | None = None
