"""`/v1/chat/completions`: bodies."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from quire.server.schemas.common import Body, SamplingBody, Usage
from quire.server.schemas.unserved import UnservedInChats

__all__ = [
    "ChatChoice",
    "ChatCompletion",
    "ChatFields",
    "ChatMessage",
    "ChatRequest",
    "ToolCall",
]


class ContentPart(Body):
    type: str
    text: str | None = None


class FunctionCall(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Body):
    role: str = Field(min_length=1, max_length=64)
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None  # ours: an answer's thoughts, for templates that repeat them


class Function(Body):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class ChatFields(SamplingBody, UnservedInChats):
    """How a message is to be answered."""

    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: the first call alone is told.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="vLLM's: what the chat template gets by these names, like enable_thinking."
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None,
        description="For a chat template that knows reasoning_effort or enable_thinking; others refuse it.",
    )


class ChatRequest(ChatFields):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    add_generation_prompt: bool | None = Field(
        None,
        description="vLLM's: false: the prompt ends with the last message, and asks for no answer by itself.",
    )
    continue_final_message: bool | None = Field(
        False, description="vLLM's: the answer goes on with the last message instead of beginning another."
    )
    documents: list[dict[str, Any]] | None = Field(
        None, description="vLLM's: for a chat template that knows documents; others refuse them."
    )


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
    usage: Usage | None = None
