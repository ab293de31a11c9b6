"""Renders chat messages as a prompt's text: with the tokenizer's chat template, or plainly where it has none.

The plain format, for models that were trained on no chat format:

    user: How are you?
    assistant:
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quire.server.api_errors import ApiError
from quire.server.message_content import ContentFormat, content_format_of, content_of
from quire.server.outputs.tagged_call_format import TaggedCallFormat
from quire.server.outputs.tool_call_format import (
    call_format_of,
    system_message,
    template_describes_tools,
    template_text,
    template_writes_calls,
    written_call,
)
from quire.server.schemas.chat_bodies import ChatMessage, PromptFields, Tool, WholePromptFields
from quire.server.settings import ServerLimits

__all__ = ["render", "render_next", "template_options"]

_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # templates' names of a message's reasoning
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def template_options(tokenizer: Any, body: PromptFields) -> dict[str, Any]:
    """The body's options of the chat template, by name. *raises:* ApiError: the template cannot take one."""
    options, template = dict(body.chat_template_kwargs or {}), template_text(tokenizer)
    if options and not template:
        raise ApiError(
            400,
            "expected no chat_template_kwargs: this model has no chat template",
            param="chat_template_kwargs",
        )
    if options:
        reserved = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
        if taken := reserved & options.keys():
            raise ApiError(
                400,
                f"expected names of the template's own options, got {min(taken)!r}, which the server sets",
                param="chat_template_kwargs",
            )
    effort = body.reasoning_effort
    if effort is not None:
        known = {
            name: value
            for name, value in (("reasoning_effort", effort), ("enable_thinking", effort != "none"))
            if name in template
        }
        if not known and effort != "none":
            raise ApiError(
                400,
                "expected none: the model's chat template knows neither reasoning_effort nor enable_thinking",
                param="reasoning_effort",
            )
        options = known | options
    if body.enable_thinking is not None:
        if "enable_thinking" in template:
            options = options | {"enable_thinking": body.enable_thinking} | (body.chat_template_kwargs or {})
        elif body.enable_thinking:
            raise ApiError(
                400,
                "expected false or none: the model's chat template knows no enable_thinking",
                param="enable_thinking",
            )
    return options | (_options_of_chats(template, body) if isinstance(body, WholePromptFields) else {})


def _options_of_chats(template: str, body: WholePromptFields) -> dict[str, Any]:
    """The options that transformers takes in addition to the messages. *raises:* ApiError: they contradict each
    other, or the template does not know one."""
    options: dict[str, Any] = {}
    if body.continue_final_message:
        if body.add_generation_prompt:
            raise ApiError(
                400,
                "expected no add_generation_prompt with continue_final_message",
                param="add_generation_prompt",
            )
        options = {"continue_final_message": True, "add_generation_prompt": False}
    elif body.add_generation_prompt is False:
        options = {"add_generation_prompt": False}
    if body.documents:
        if "documents" not in template:
            raise ApiError(
                400,
                "expected none: the model's chat template knows no documents; put them in a message",
                param="documents",
            )
        options["documents"] = body.documents
    if options and not template:
        name = next(iter(options))
        raise ApiError(400, f"expected no {name}: this model has no chat template", param=name)
    return options


def render(
    tokenizer: Any,
    messages: Sequence[ChatMessage],
    limits: ServerLimits,
    tools: Sequence[Tool] = (),
    options: Mapping[str, Any] | None = None,
) -> str:
    """The prompt that asks for the next message. *raises:* ApiError: the template refuses these messages.

    tools: the tools that the model may call, described by the template or, where it knows none, by a system message.
    options: further arguments of the template, of `template_options`.
    """
    if len(messages) > limits.max_messages:
        raise ApiError(
            400, f"expected at most {limits.max_messages} messages, got {len(messages)}", param="messages"
        )
    template = template_text(tokenizer)
    for index, message in enumerate(messages):
        if message.role not in _ROLES and not _names_role(template, message.role):
            raise ApiError(
                400,
                f"expected one of the roles {', '.join(_ROLES)}, got {message.role!r}, which the model's chat "
                "template does not know either",
                param=f"messages.{index}.role",
            )
    descriptions = [tool.description() for tool in tools] if template_describes_tools(tokenizer) else []
    content_format = content_format_of(tokenizer, template, with_tools=bool(descriptions))
    plain = [_plain(message, index, content_format) for index, message in enumerate(messages)]
    if not _names_role(template, "developer"):  # OpenAI's newer name for the system
        for message in plain:
            message["role"] = "system" if message["role"] == "developer" else message["role"]
    call_format = call_format_of(tokenizer)
    if isinstance(call_format, TaggedCallFormat) and call_format.whole_id:
        _write_ids(plain, call_format.whole_id)
    if not template_writes_calls(tokenizer):
        for message in plain:
            _write_calls(message)
    if tools and not descriptions:
        plain.insert(0, system_message(tools, call_format))
    for message in plain:
        message["content"] = content_format.convert(message["role"], message["content"])
    if not template:
        return "".join(map(_line, plain)) + "assistant:"
    arguments: dict[str, Any] = {
        "tools": descriptions or None,
        "tokenize": False,
        "add_generation_prompt": True,
        **(options or {}),
    }
    try:
        return tokenizer.apply_chat_template(plain, **arguments)
    except Exception as error:  # templates raise any exception
        for plainer in _plainer_variants(plain):
            try:
                return tokenizer.apply_chat_template(plainer, **arguments)
            except Exception:
                continue  # the first error is the one that the client can act on
        raise ApiError(
            400, f"the model's chat template refuses the messages: {error}", param="messages"
        ) from error


def _line(plain: dict[str, Any]) -> str:
    """A message in the plain format. An answer that begins with a blank, as a model writes it, gets no second one."""
    role, content = plain["role"], plain["content"] or ""
    return f"{role}:{content}\n" if role == "assistant" and content[:1].isspace() else f"{role}: {content}\n"


def render_next(
    tokenizer: Any,
    messages: Sequence[ChatMessage],
    limits: ServerLimits,
    options: Mapping[str, Any] | None = None,
) -> str:
    """The text that the template puts behind an answer to continue with these messages: the answer's end, the
    messages, the beginning of the next answer. *raises:* ApiError: as `render`, or the template does not repeat
    answers unchanged.
    """
    answer = f"answer-{secrets.token_hex(8)}"
    before = [ChatMessage(role="user", content="-"), ChatMessage(role="assistant", content=answer)]
    _, found, text = render(tokenizer, [*before, *messages], limits, options=options).partition(answer)
    if not found or answer in text:
        raise ApiError(
            400,
            "expected text or tokens to append: the model's chat template cannot go on behind an answer",
            param="messages",
        )
    return text


def _names_role(template: str, role: str) -> bool:
    """Whether a template names this role; it may drop a message of a role that it does not name."""
    return f"'{role}'" in template or f'"{role}"' in template


def _plain(message: ChatMessage, index: int, content_format: ContentFormat) -> dict[str, Any]:
    """A message as templates read it: content in their format, arguments of calls as objects if they are JSON."""
    content, thoughts = content_of(message, index, content_format)
    plain: dict[str, Any] = {"role": message.role, "content": content}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if thoughts is not None:
        plain |= dict.fromkeys(_THOUGHTS, thoughts)
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "type": "function",
                "id": call.id,
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return plain


def _arguments(text: str) -> Any:
    """The value of a call's arguments; the text itself if it is not JSON, as in an answer that was cut short."""
    try:
        value = json.loads(text or "{}")
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # not JSON, or half a surrogate pair in it
        return text
    return text if isinstance(value, str) else value


def _write_calls(plain: dict[str, Any]) -> None:
    """Writes a message's calls into its text, in our format, for a template without calls."""
    for call in plain.pop("tool_calls", ()):
        text = written_call(call["function"]["name"], _text_of(call["function"]["arguments"]))
        content = plain["content"]
        if isinstance(content, list):
            plain["content"] = [*content, {"type": "text", "text": f"\n{text}" if content else text}]
        else:
            plain["content"] = f"{content}\n{text}" if content else text


def _plainer_variants(plain: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The messages in the variants that some templates insist on, with and without reasoning."""
    for strip, rewrite in itertools.product(
        (_unchanged, _without_thoughts), (_unchanged, _plainer, _with_text)
    ):
        if strip is not rewrite:
            yield [strip(rewrite(message)) for message in plain]


def _unchanged(plain: dict[str, Any]) -> dict[str, Any]:
    return plain


def _without_thoughts(plain: dict[str, Any]) -> dict[str, Any]:
    """A message as gpt-oss's template wants it with calls: no reasoning where there is content."""
    return {name: value for name, value in plain.items() if name not in _THOUGHTS or not plain["content"]}


def _write_ids(messages: Sequence[dict[str, Any]], id_template: str) -> None:
    """Writes ids of calls as the model does, numbered through the conversation, also in the tools' answers."""
    new_ids: dict[str | None, str] = {}
    number = 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            new_id = id_template.format(name=call["function"]["name"], number=number)
            new_ids[call["id"]] = call["id"] = new_id
            number += 1
        if "tool_call_id" in message:
            message["tool_call_id"] = new_ids.get(message["tool_call_id"], message["tool_call_id"])


def _plainer(plain: dict[str, Any]) -> dict[str, Any]:
    """A message as some templates insist on: arguments that are objects, ids of nine letters and digits."""
    plain = dict(plain)
    if "tool_call_id" in plain:
        plain["tool_call_id"] = _short_id(plain["tool_call_id"])
    if "tool_calls" in plain:
        plain["tool_calls"] = [
            {**call, "id": _short_id(call["id"]), "function": _with_object(call["function"])}
            for call in plain["tool_calls"]
        ]
    return plain


def _with_object(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    return function if isinstance(arguments, dict) else {**function, "arguments": {"arguments": arguments}}


def _with_text(plain: dict[str, Any]) -> dict[str, Any]:
    """A message as DeepSeek's templates insist on: arguments that are text."""
    plain = dict(plain)
    if "tool_calls" in plain:
        plain["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _text_of(call["function"]["arguments"])}}
            for call in plain["tool_calls"]
        ]
    return plain


def _text_of(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _short_id(name: str | None) -> str:
    name = name or ""
    return name if len(name) == 9 and name.isalnum() else hashlib.sha256(name.encode()).hexdigest()[:9]
