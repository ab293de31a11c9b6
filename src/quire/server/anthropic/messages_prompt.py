"""A body of `/v1/messages` as a chat request, so that both endpoints make one prompt of one conversation.

- `system` is a first message of the role system. Tool results become messages of the role tool, in their place.
  Consecutive messages of the user, or of the assistant, become one, as Anthropic's API combines them.
- A last message of the assistant is continued.
- Thinking blocks become a message's reasoning. Their signatures are not verified: the text is the client's.

Cost: O(size of the body).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from quire.errors import QuireError
from quire.server.anthropic.messages_bodies import (
    ContentBlock,
    MessagesPrompt,
    MessagesRequest,
    MessagesTool,
    PastMessage,
    ResultBlock,
)
from quire.server.api_errors import ApiError, answer_of
from quire.server.outputs.reasoning import reasoning_format_of
from quire.server.outputs.tool_call_format import template_text
from quire.server.prompt_caching import num_breakpoints
from quire.server.schemas.chat_bodies import ChatMessage, ChatRequest, ContentPart, ToolCall

__all__ = ["ChatOfMessages", "chat_of_messages", "field_names", "signature_of"]

_OMITTED = "quire.text."
_DIGEST = "quire.sha256."
_MAX_BREAKPOINTS = 4  # Anthropic's
_BILLING = "x-anthropic-billing-header:"

# (required, optional) fields of a block, by its type.
_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "text": (("text",), ()),
    "thinking": (("thinking",), ("signature",)),
    "redacted_thinking": (("data",), ()),
    "tool_use": (("id", "name", "input"), ()),
    "tool_result": (("tool_use_id",), ("content", "is_error")),
}
_ALL_FIELDS = (
    "text",
    "thinking",
    "signature",
    "data",
    "id",
    "name",
    "input",
    "tool_use_id",
    "content",
    "is_error",
)
_TYPES_OF_ROLE = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
# The chat request's fields as this API names them.
_NAMES = {
    "stop": "stop_sequences",
    "enable_thinking": "thinking",
    "reasoning_effort": "output_config.effort",
    "response_format.json_schema.schema": "output_config.format.schema",
    "continue_final_message": "messages",
}


@dataclass
class ChatOfMessages:
    """chat: the same request for `/v1/chat/completions`. places: of each of its messages, the place in the body."""

    chat: ChatRequest
    places: list[str] = field(default_factory=list)


def signature_of(thinking: str, *, is_omitted: bool) -> str:
    """A thinking block's signature: a digest of its text, or the text itself where the block comes without it. No key
    is involved: it proves nothing, and a client may change both."""
    if is_omitted:
        return _OMITTED + base64.urlsafe_b64encode(thinking.encode()).decode()
    return _DIGEST + hashlib.sha256(thinking.encode()).hexdigest()


def _thinking_of(block: ContentBlock) -> str:
    """The block's text, from its signature if it was omitted."""
    signature = block.signature or ""
    if not block.thinking and signature.startswith(_OMITTED):
        try:
            return base64.urlsafe_b64decode(signature[len(_OMITTED) :].encode()).decode()
        except (binascii.Error, ValueError):
            return ""
    return block.thinking or ""


def chat_of_messages(body: MessagesPrompt, tokenizer: Any) -> ChatOfMessages:
    """*raises:* ApiError: a block, tool or choice that cannot be served, with its place in the body."""
    reader = _Reader()
    for place, tool in enumerate(body.tools or ()):
        _check_tool(tool, f"tools.{place}", body)
    reader.read_system(body.system)
    for place, message in enumerate(body.messages):
        reader.read(message, f"messages.{place}")
    choice = _choice(body)
    fields: dict[str, Any] = {
        "messages": reader.messages,
        "tools": [_tool(tool) for tool in body.tools] if body.tools else None,
        "tool_choice": choice,
        "parallel_tool_calls": not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        "enable_thinking": _enable_thinking(body, tokenizer),
        "chat_template_kwargs": body.chat_template_kwargs,
        "continue_final_message": _is_continued(reader),
        "cache_control": body.cache_control,
    }
    config, output_format = body.output_config, body.output_format
    if config is not None:
        fields["reasoning_effort"] = config.effort
        if config.format is not None and output_format is not None:
            raise ApiError(
                400, "expected one output format, got output_config.format too", param="output_format"
            )
        output_format = config.format or output_format
    if output_format is not None:
        schema = {"name": "output", "schema": output_format.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(body, MessagesRequest):
        fields |= {
            name: getattr(body, name)
            for name in (
                "stream", "temperature", "top_p", "top_k", "seed", "session_id", "cache_salt", "priority",
                "cache_priority", "keep_for", "session_cache",
            )
        }  # fmt: skip
        fields["stop"] = body.stop_sequences
    chat = ChatRequest(**fields)
    if (num_marked := num_breakpoints(chat)) > _MAX_BREAKPOINTS:
        raise ApiError(
            400,
            f"expected at most {_MAX_BREAKPOINTS} blocks with cache_control, got {num_marked}",
            param="cache_control",
        )
    if isinstance(body, MessagesRequest):
        chat.max_tokens = body.max_tokens
    return ChatOfMessages(chat, reader.places)


class _Reader:
    """Makes chat messages of the body's."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self.places: list[str] = []

    def read_system(self, system: str | list[ContentBlock] | None) -> None:
        """Leaves out the line in which an agent tells its own accounting, new with each request: no prefix would be
        found behind it."""
        parts: list[ContentPart] = []
        if isinstance(system, str):
            head, _, behind = system.partition("\n")
            text = behind if head.startswith(_BILLING) else system
            parts.append(ContentPart(type="text", text=text))
        else:
            for place, block in enumerate(system or ()):
                _check_block(block, f"system.{place}", "system")
                parts.append(_text_part(block))
                if (block.text or "").startswith(_BILLING):
                    parts[-1].text = ""
        if any(part.text for part in parts):
            self._add(ChatMessage(role="system", content=parts), "system")

    def read(self, message: PastMessage, place: str) -> None:
        blocks = message.content
        if isinstance(blocks, str):
            blocks = [ContentBlock(type="text", text=blocks)]
        parts: list[ContentPart] = []
        calls: list[ToolCall] = []
        for number, block in enumerate(blocks):
            at = f"{place}.content.{number}"
            _check_block(block, at, message.role)
            if block.type == "tool_result":
                self._add(
                    ChatMessage(
                        role="tool",
                        tool_call_id=block.tool_use_id,
                        content=_result(block, at),
                        cache_control=block.cache_control,
                    ),
                    place,
                )
                continue
            if block.type == "text":
                parts.append(_text_part(block))
            elif block.type == "thinking":
                parts.append(ContentPart(type="thinking", thinking=_thinking_of(block)))
            elif block.type == "tool_use":
                function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                calls.append(
                    ToolCall(id=block.id, function=function, cache_control=block.cache_control)  # type: ignore[arg-type]
                )
            if message.role == "user":  # results keep their place among texts
                self._add(ChatMessage(role="user", content=parts), place)
                parts = []
        if message.role != "user" or not blocks:
            self._add(ChatMessage(role=message.role, content=parts, tool_calls=calls or None), place)

    def _add(self, message: ChatMessage, place: str) -> None:
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != message.role or message.role not in ("user", "assistant"):
            self.messages.append(message)
            self.places.append(place)
            return
        assert isinstance(last.content, list)
        assert isinstance(message.content, list)
        last.content.extend(message.content)
        if message.tool_calls:
            last.tool_calls = [*(last.tool_calls or ()), *message.tool_calls]


def _check_block(block: ResultBlock, place: str, role: str) -> None:
    """*raises:* ApiError: the role has no such blocks, or the block has other fields than its type."""
    kind = block.type
    if kind not in _TYPES_OF_ROLE[role]:
        expected = " or ".join(_TYPES_OF_ROLE[role])
        raise ApiError(400, f"expected {expected} here, got {kind!r}", param=f"{place}.type")
    needed, others = _FIELDS[kind]
    for name in needed:
        if getattr(block, name) is None:
            raise ApiError(400, f"expected {name} in a block of the type {kind}", param=f"{place}.{name}")
    for name in _ALL_FIELDS:
        if name not in (*needed, *others) and getattr(block, name, None) is not None:
            raise ApiError(
                400, f"expected no {name} in a block of the type {kind}, got one", param=f"{place}.{name}"
            )
    if block.cache_control is not None and kind in ("thinking", "redacted_thinking"):
        raise ApiError(
            400,
            f"expected no cache_control in a block of the type {kind}; put it into another block",
            param=f"{place}.cache_control",
        )


def _text_part(block: ResultBlock) -> ContentPart:
    return ContentPart(type="text", text=block.text, cache_control=block.cache_control)


def _result(block: ContentBlock, place: str) -> list[ContentPart]:
    """The texts of a tool's result. A failure begins with the word, which the inner form has no field for."""
    parts: list[ContentPart] = []
    if isinstance(block.content, str):
        parts.append(ContentPart(type="text", text=block.content))
    else:
        for number, part in enumerate(block.content or ()):
            _check_block(part, f"{place}.content.{number}", "system")
            parts.append(_text_part(part))
    if block.is_error and not "".join(part.text or "" for part in parts).lstrip().lower().startswith("error"):
        parts = parts or [ContentPart(type="text", text="")]
        parts[0].text = f"Error: {parts[0].text}".rstrip()
    return parts


def _check_tool(tool: MessagesTool, place: str, body: MessagesPrompt) -> None:
    if tool.input_schema is None:
        raise ApiError(400, "expected a schema of the tool's input", param=f"{place}.input_schema")
    if tool.strict and (body.tool_choice is None or body.tool_choice.type not in ("any", "tool")):
        raise ApiError(
            400,
            "expected false: only a call that the tool_choice any or tool requires is sure to keep to its schema",
            param=f"{place}.strict",
        )


def _tool(tool: MessagesTool) -> dict[str, Any]:
    description = tool.description
    if tool.input_examples:
        examples = "\n".join(json.dumps(example, ensure_ascii=False) for example in tool.input_examples)
        description = f"{description or ''}\nExamples of its input:\n{examples}".lstrip()
    function = {"name": tool.name, "description": description, "parameters": tool.input_schema}
    return {"type": "function", "function": function, "cache_control": tool.cache_control}


def _choice(body: MessagesPrompt) -> Any:
    choice = body.tool_choice
    if choice is None:
        return None
    if (choice.name is None) == (choice.type == "tool"):
        got = "none" if choice.name is None else "one"
        raise ApiError(400, f"expected a name with the type tool alone, got {got}", param="tool_choice.name")
    if choice.type == "none" and choice.disable_parallel_tool_use is not None:
        raise ApiError(400, "expected none with the type none", param="tool_choice.disable_parallel_tool_use")
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _enable_thinking(body: MessagesPrompt, tokenizer: Any) -> bool | None:
    """For the chat template. None: the template does what it does."""
    thinking = body.thinking
    if thinking is None:
        return None
    if thinking.type == "disabled":
        for name in ("budget_tokens", "display"):
            if getattr(thinking, name) is not None:
                raise ApiError(400, "expected none with the type disabled", param=f"thinking.{name}")
        return False
    if thinking.type == "enabled":
        if thinking.budget_tokens is None:
            raise ApiError(
                400, "expected a number of tokens with the type enabled", param="thinking.budget_tokens"
            )
    elif thinking.budget_tokens is not None:
        raise ApiError(400, "expected none with the type adaptive", param="thinking.budget_tokens")
    if "enable_thinking" in template_text(tokenizer):
        return True
    if thinking.type == "enabled" and reasoning_format_of(tokenizer) is None:
        raise ApiError(
            400,
            "expected adaptive or disabled: this model has no reasoning that its tokenizer or chat template marks",
            param="thinking.type",
        )
    return None


def _is_continued(reader: _Reader) -> bool:
    if not reader.messages or reader.messages[-1].role != "assistant":
        return False
    if reader.messages[-1].tool_calls:
        raise ApiError(
            400,
            "expected a tool_result for each tool_use in the next message, got none",
            param=reader.places[-1],
        )
    return True


@contextmanager
def field_names(places: Sequence[str] = ()) -> Iterator[None]:
    """Errors within the block name fields as this API does. places: of each chat message, the place in the body."""
    try:
        yield
    except (ApiError, QuireError) as error:
        answer = answer_of(error)
        param, message = answer.param, str(answer)
        if param is not None:
            first, *behind = param.split(".")
            if first == "messages" and behind and int(behind[0]) < len(places):
                renamed = places[int(behind[0])]
            else:
                renamed = _NAMES.get(param, param)
            message = message.replace(f"`{param}`", f"`{renamed}`")
            param = renamed
        raise ApiError(
            answer.status, message, param=param, code=answer.code, retry_after_s=answer.retry_after_s
        ) from error
