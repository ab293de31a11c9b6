"""From chat messages to the prompt's text: by the tokenizer's own template, or a plain one where it has none.

The plain form, for models that were never taught one:

    user: How are you?
    assistant:
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

from quire.server.errors import ApiError
from quire.server.schemas.chat import ChatMessage, Tool
from quire.server.settings import Limits
from quire.server.tools import system_message, template_tells_tools, template_text

__all__ = ["render", "render_next"]

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def render(
    tokenizer: Any, messages: Sequence[ChatMessage], limits: Limits, tools: Sequence[Tool] = ()
) -> str:
    """The prompt that asks for the next message. *raises:* ApiError: the template refuses these messages.

    tools: those the model may call, told by the template or, where it knows none, by a system message.
    """
    if len(messages) > limits.max_messages:
        raise ApiError(
            400, f"expected at most {limits.max_messages} messages, got {len(messages)}", param="messages"
        )
    template = template_text(tokenizer)
    for index, message in enumerate(messages):
        if message.role not in _ROLES and not _tells(template, message.role):
            raise ApiError(
                400,
                f"expected one of the roles {', '.join(_ROLES)}, got {message.role!r}, which the model's chat "
                "template does not know either",
                param=f"messages.{index}.role",
            )
    plain = [_plain(message, index) for index, message in enumerate(messages)]
    if not _tells(template, "developer"):  # OpenAI's newer name for the system
        for one in plain:
            one["role"] = "system" if one["role"] == "developer" else one["role"]
    told: list[Any] | None = None
    if tools and template_tells_tools(tokenizer):
        told = [tool.model_dump(exclude_none=True) for tool in tools]
    elif tools:
        plain.insert(0, system_message(tools))
    if not template:
        return "".join(f"{one['role']}: {one['content'] or ''}\n" for one in plain) + "assistant:"
    try:
        return tokenizer.apply_chat_template(plain, tools=told, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise what they like
        raise ApiError(
            400, f"the model's chat template refuses the messages: {error}", param="messages"
        ) from error


def render_next(tokenizer: Any, messages: Sequence[ChatMessage], limits: Limits) -> str:
    """What the template puts behind an answer to go on with these messages: the answer's end, them, the next one's
    beginning. *raises:* ApiError: as `render`, or the template does not repeat answers as they are.
    """
    answer = f"answer-{secrets.token_hex(8)}"
    before = [ChatMessage(role="user", content="-"), ChatMessage(role="assistant", content=answer)]
    _, found, text = render(tokenizer, [*before, *messages], limits).partition(answer)
    if not found or answer in text:
        raise ApiError(
            400,
            "expected text or tokens to append: the model's chat template cannot go on behind an answer",
            param="messages",
        )
    return text


def _tells(template: str, role: str) -> bool:
    """Whether a template names this role: of one that it does not, it might drop the message."""
    return f"'{role}'" in template or f'"{role}"' in template


def _plain(message: ChatMessage, index: int) -> dict[str, Any]:
    """A message as templates read it: content one text, arguments of calls as objects."""
    content = message.content
    if isinstance(content, list):
        kinds = sorted({part.type for part in content if part.type != "text"})
        if kinds:
            raise ApiError(
                400, f"expected text parts, got {', '.join(kinds)}", param=f"messages.{index}.content"
            )
        content = "".join(part.text or "" for part in content)
    plain: dict[str, Any] = {"role": message.role, "content": content or ""}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [
            {"type": "function", "id": call.id, "function": _function(call.function, index)}
            for call in message.tool_calls
        ]
    return plain


def _function(call: Any, index: int) -> dict[str, Any]:
    try:
        return {"name": call.name, "arguments": json.loads(call.arguments or "{}")}
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deep to be read
        raise ApiError(
            400, f"expected arguments as JSON text: {error}", param=f"messages.{index}.tool_calls"
        ) from error
