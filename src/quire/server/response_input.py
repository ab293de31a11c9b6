"""Items of `/v1/responses` as a chat: the messages, calls and thoughts that every endpoint shares.

One answer's items (reasoning, message, calls) are one assistant's message, as a chat has them, so that a history has
the same prompt whichever endpoint it came by.
"""

from __future__ import annotations

import base64
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import TypeAdapter

from quire.errors import QuireError
from quire.server.api_errors import ApiError, answer_of
from quire.server.schemas.chat_bodies import (
    AnswerMessage,
    ChatMessage,
    ChatRequest,
    ContentPart,
    Tool,
    ToolCall,
)
from quire.server.schemas.common import ResponseFormat
from quire.server.schemas.response_bodies import (
    AllowedTools,
    ConversationId,
    FunctionTool,
    JsonObjectFormat,
    NamedFunctionTool,
    NamedSchemaFormat,
    PromptOfResponse,
    ResponseRequest,
)
from quire.server.schemas.response_items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputItem,
    InputMessage,
    ReasoningItem,
)

__all__ = [
    "answer_of_items",
    "chat_of_response",
    "conversation_id_of",
    "encrypted_thought",
    "first_role",
    "messages_of_items",
    "parsed_items",
    "response_field_names",
    "stored_item",
    "without_first_messages",
]

_SEALED = "quire1:"  # begins this server's encrypted content
# The fields of `ResponseRequest` that a chat has under the same name.
_SAME_NAMES = (
    "model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "seed", "stop", "stop_token_ids", "ignore_eos", "cache_salt", "priority", "cache_priority", "keep_for",
    "chat_template_kwargs", "enable_thinking", "parallel_tool_calls", "stream", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "session_cache",
)  # fmt: skip
_FIELDS = {
    "messages": "input",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
}
_NAMES = re.compile(r"(?<![\w.])(?:" + "|".join(map(re.escape, sorted(_FIELDS, reverse=True))) + r")(?!\w)")
_items: TypeAdapter[list[Any]] = TypeAdapter(list[InputItem])


@contextmanager
def response_field_names() -> Iterator[None]:
    """Errors of a chat within the block name the fields of a response."""
    try:
        yield
    except (ApiError, QuireError) as error:
        found = answer_of(error)
        param = found.param
        if param is not None and param.startswith("messages."):
            param = "messages"
        # "the messages" of an error stay: the word is the user's, too.
        message = _NAMES.sub(lambda name: name[0] if name[0] == "messages" else _FIELDS[name[0]], str(found))
        raise ApiError(
            found.status,
            message,
            param=None if param is None else _FIELDS.get(param, param),
            code=found.code,
            retry_after_s=found.retry_after_s,
        ) from error


def parsed_items(items: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Stored items as the body has them."""
    return _items.validate_python([dict(item) for item in items])


def stored_item(item: Any, new_id: str) -> dict[str, Any]:
    """An item as lists and stores have it, without fields that change nothing. new_id: if it has none."""
    own: dict[str, Any] = {"id": item.id or new_id, "type": item.type}
    if isinstance(item, InputMessage):
        content = item.content
        if isinstance(content, str):
            kind = "output_text" if item.role == "assistant" else "input_text"
            parts: list[dict[str, Any]] = [{"type": kind, "text": content}]
        else:
            parts = [_stored_part(part) for part in content]
        for part in parts:
            if part["type"] == "output_text":
                part["annotations"] = []
        own |= {"role": item.role, "status": "completed", "content": parts}
        return own if item.phase is None else own | {"phase": item.phase}
    if isinstance(item, FunctionCallItem):
        fields = {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
        return own | fields | {"status": "completed"}
    if isinstance(item, FunctionCallOutputItem):
        output = item.output
        stored = output if isinstance(output, str) else [_stored_part(part) for part in output]
        return own | {"call_id": item.call_id, "output": stored, "status": "completed"}
    assert isinstance(item, ReasoningItem)
    own["summary"] = [part.model_dump() for part in item.summary]
    if item.content is not None:
        own["content"] = [part.model_dump() for part in item.content]
    if item.encrypted_content is not None:
        own["encrypted_content"] = item.encrypted_content
    return own


def _stored_part(part: Any) -> dict[str, Any]:
    if part.type == "refusal":
        return {"type": "refusal", "refusal": part.refusal}
    return {"type": part.type, "text": part.text}


def encrypted_thought(thought: str) -> str:
    """A thought for clients that return no other form of it. It is encoded, not secret."""
    return _SEALED + base64.b64encode(thought.encode("utf-8", "replace")).decode()


def messages_of_items(items: Sequence[Any], place: str = "input") -> list[ChatMessage]:
    """The items as messages. place: of the items in the body, for errors. *raises:* ApiError: encrypted reasoning of
    another server."""
    messages: list[ChatMessage] = []
    answer: ChatMessage | None = None  # the assistant's message that further items may belong to

    def begin_answer() -> ChatMessage:
        message = ChatMessage(role="assistant")
        messages.append(message)
        return message

    for number, item in enumerate(items):
        if isinstance(item, ReasoningItem):
            thought = _thought_of(item, f"{place}.{number}")
            if answer is None or answer.content is not None or answer.tool_calls:
                answer = begin_answer()
            if thought is not None:
                before = answer.reasoning_content
                answer.reasoning_content = thought if before is None else f"{before}\n{thought}"
        elif isinstance(item, FunctionCallItem):
            answer = begin_answer() if answer is None else answer
            call = ToolCall(
                id=item.call_id,
                function={"name": item.name, "arguments": item.arguments},  # type: ignore[arg-type]
            )
            answer.tool_calls = [*(answer.tool_calls or ()), call]
        elif isinstance(item, FunctionCallOutputItem):
            answer = None
            messages.append(
                ChatMessage(role="tool", tool_call_id=item.call_id, content=_content_of(item.output))
            )
        elif item.role == "assistant":
            content = _content_of(item.content)
            if answer is not None and answer.tool_calls:  # text behind a call
                answer.content = _joined(answer.content, content)
                continue
            if answer is None or answer.content is not None:
                answer = begin_answer()
            answer.content = content
        else:
            answer = None
            messages.append(ChatMessage(role=item.role, content=_content_of(item.content)))
    return messages


def _content_of(content: str | Sequence[Any]) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    parts = [
        ContentPart(type=part.type, refusal=part.refusal)
        if part.type == "refusal"
        else ContentPart(
            type=part.type,
            text=part.text,
            prompt_cache_breakpoint=getattr(part, "prompt_cache_breakpoint", None),
        )
        for part in content
    ]
    is_plain = len(parts) == 1 and parts[0].refusal is None and parts[0].prompt_cache_breakpoint is None
    return parts[0].text or "" if is_plain else parts


def _joined(
    first: str | list[ContentPart] | None, second: str | list[ContentPart]
) -> str | list[ContentPart]:
    if isinstance(first, str) and isinstance(second, str):
        return first + second
    parts = [
        [ContentPart(type="text", text=content)] if isinstance(content, str) else content or []
        for content in (first, second)
    ]
    return [*parts[0], *parts[1]]


def _thought_of(item: ReasoningItem, place: str) -> str | None:
    if item.content:
        return "".join(part.text for part in item.content)
    sealed = item.encrypted_content
    if sealed is not None and sealed.startswith(_SEALED):
        try:
            return base64.b64decode(sealed.removeprefix(_SEALED), validate=True).decode()
        except ValueError:
            raise ApiError(
                400,
                "expected encrypted content as an answer had it, got it changed or cut",
                param=f"{place}.encrypted_content",
            ) from None
    if item.summary:
        return "\n".join(part.text for part in item.summary)
    if sealed:
        raise ApiError(
            400,
            "expected this server's encrypted content, got another server's; leave the reasoning item out, or send its "
            "content",
            param=f"{place}.encrypted_content",
        )
    return None


def answer_of_items(output: Sequence[Mapping[str, Any]]) -> AnswerMessage | None:
    """The answer that a response's output is; None if it has no item."""
    messages = messages_of_items(parsed_items(output))
    fields = {"content", "reasoning_content", "tool_calls"}
    return (
        AnswerMessage.model_validate(messages[0].model_dump(include=fields, exclude_none=True))
        if messages
        else None
    )


def conversation_id_of(body: PromptOfResponse) -> str | None:
    """The OpenAI conversation that a response belongs to."""
    return body.conversation.id if isinstance(body.conversation, ConversationId) else body.conversation


def chat_of_response(
    body: PromptOfResponse, messages: Sequence[ChatMessage], session: str | None = None
) -> ChatRequest:
    """The chat that has the same prompt and the same answer. messages: those of the history and the input. session:
    its name, if the body has none. *raises:* ApiError."""
    if body.instructions:
        messages = [ChatMessage(role="system", content=body.instructions), *messages]
    if not messages:
        raise ApiError(400, "expected input, instructions or a history, got none", param="input")
    fields: dict[str, Any] = {"messages": list(messages), **_tool_fields(body)}
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if isinstance(body, ResponseRequest):
        fields |= {name: getattr(body, name) for name in _SAME_NAMES}
        fields["session_id"] = body.session_id or (None if body.prompt_cache_key else session)
        fields["max_completion_tokens"] = body.max_output_tokens
        fields |= _logprob_fields(body)
        wanted = None if body.text is None else body.text.format
        if isinstance(wanted, JsonObjectFormat):
            fields["response_format"] = ResponseFormat(type="json_object", schema=None)
        elif isinstance(wanted, NamedSchemaFormat):
            schema = wanted.model_dump(by_alias=True, exclude={"type"})
            fields["response_format"] = ResponseFormat(type="json_schema", json_schema=schema, schema=None)  # type: ignore[arg-type]
    return ChatRequest(**fields)


def _logprob_fields(body: ResponseRequest) -> dict[str, Any]:
    is_included = "message.output_text.logprobs" in (body.include or ())
    if body.top_logprobs and not is_included:
        raise ApiError(
            400,
            "expected include: [message.output_text.logprobs] with top_logprobs",
            param="top_logprobs",
        )
    return {"logprobs": is_included, "top_logprobs": body.top_logprobs if is_included else None}


def _tool_fields(body: PromptOfResponse) -> dict[str, Any]:
    tools: list[FunctionTool] = body.tools or []
    choice: Any = body.tool_choice
    if isinstance(choice, AllowedTools):
        names = {tool.name for tool in choice.tools}
        if missing := names - {tool.name for tool in tools}:
            raise ApiError(400, f"expected names of tools, got {min(missing)!r}", param="tool_choice.tools")
        tools = [tool for tool in tools if tool.name in names]
        choice = choice.mode
    elif isinstance(choice, NamedFunctionTool):
        choice = {"type": "function", "function": {"name": choice.name}}
    described = [
        Tool(
            type="function",
            function={  # type: ignore[arg-type]
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "strict": tool.strict,
            },
        )
        for tool in tools
    ]
    return {"tools": described or None, "tool_choice": choice}


def without_first_messages(messages: Sequence[ChatMessage]) -> list[Sequence[ChatMessage]]:
    """The messages without ever more of the first, the longest history first. Those of the system at the beginning
    stay, and no tool's output is without its call."""
    num_kept = _num_leading(messages)
    starts = [index for index in range(num_kept + 1, len(messages)) if messages[index].role != "tool"]
    return [[*messages[:num_kept], *messages[index:]] for index in starts]


def first_role(messages: Sequence[ChatMessage]) -> str:
    """The role of the first message behind those of the system."""
    return messages[min(_num_leading(messages), len(messages) - 1)].role


def _num_leading(messages: Sequence[ChatMessage]) -> int:
    return sum(
        1 for _ in itertools.takewhile(lambda message: message.role in ("system", "developer"), messages)
    )
