"""From chat messages to the prompt's text: by the tokenizer's own template, or a plain one where it has none.

The plain form, for models that were never taught one:

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
from quire.server.message_content import ContentFormat, content_form_of, content_of
from quire.server.outputs.tagged_call_format import TaggedCallFormat
from quire.server.outputs.tool_call_format import (
    form_of,
    system_message,
    template_tells_tools,
    template_text,
    template_writes_calls,
    written_call,
)
from quire.server.schemas.chat_bodies import ChatMessage, PromptFields, Tool, WholePromptFields
from quire.server.settings import ServerLimits

__all__ = ["render", "render_next", "template_options"]

_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # what templates call a message's thoughts
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def template_options(tokenizer: Any, body: PromptFields) -> dict[str, Any]:
    """What the body has the chat template know beside the messages, by name. *raises:* ApiError: it cannot."""
    options, template = dict(body.chat_template_kwargs or {}), template_text(tokenizer)
    if options and not template:
        raise ApiError(
            400,
            "expected none, as this model has no chat template to pass them to",
            param="chat_template_kwargs",
        )
    if options:
        own = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters} & options.keys()
        if own:
            raise ApiError(
                400,
                f"expected names of the template's, got {min(own)!r}, which the server sets",
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
                "expected none, as the model's chat template knows no reasoning_effort and no enable_thinking",
                param="reasoning_effort",
            )
        options = known | options
    if body.enable_thinking is not None:
        if "enable_thinking" in template:
            options = options | {"enable_thinking": body.enable_thinking} | (body.chat_template_kwargs or {})
        elif body.enable_thinking:
            raise ApiError(
                400,
                "expected false or none, as the model's chat template knows no enable_thinking",
                param="enable_thinking",
            )
    return options | (_options_of_chats(template, body) if isinstance(body, WholePromptFields) else {})


def _options_of_chats(template: str, body: WholePromptFields) -> dict[str, Any]:
    """Those that transformers takes beside the messages. *raises:* ApiError: they say two things, or nothing to it."""
    asked: dict[str, Any] = {}
    if body.continue_final_message:
        if body.add_generation_prompt:
            raise ApiError(
                400,
                "expected no add_generation_prompt beside continue_final_message",
                param="add_generation_prompt",
            )
        asked = {"continue_final_message": True, "add_generation_prompt": False}
    elif body.add_generation_prompt is False:
        asked = {"add_generation_prompt": False}
    if body.documents:
        if "documents" not in template:
            raise ApiError(
                400,
                "expected none, as the model's chat template knows no documents; put them in a message",
                param="documents",
            )
        asked["documents"] = body.documents
    if asked and not template:
        name = next(iter(asked))
        raise ApiError(400, f"expected no {name}, as this model has no chat template", param=name)
    return asked


def render(
    tokenizer: Any,
    messages: Sequence[ChatMessage],
    limits: ServerLimits,
    tools: Sequence[Tool] = (),
    options: Mapping[str, Any] | None = None,
) -> str:
    """The prompt that asks for the next message. *raises:* ApiError: the template refuses these messages.

    tools: those the model may call, told by the template or, where it knows none, by a system message. options: what
    else the template gets, as `template_options` has it.
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
    told = [tool.told() for tool in tools] if template_tells_tools(tokenizer) else []
    form = content_form_of(tokenizer, template, with_tools=bool(told))
    plain = [_plain(message, index, form) for index, message in enumerate(messages)]
    if not _tells(template, "developer"):  # OpenAI's newer name for the system
        for one in plain:
            one["role"] = "system" if one["role"] == "developer" else one["role"]
    calls = form_of(tokenizer)
    if isinstance(calls, TaggedCallFormat) and calls.whole_id:
        _write_ids(plain, calls.whole_id)
    if not template_writes_calls(tokenizer):
        for one in plain:
            _write_calls(one)
    if tools and not told:
        plain.insert(0, system_message(tools, calls))
    for one in plain:
        one["content"] = form.of(one["role"], one["content"])
    if not template:
        return "".join(map(_line, plain)) + "assistant:"
    asked: dict[str, Any] = {
        "tools": told or None,
        "tokenize": False,
        "add_generation_prompt": True,
        **(options or {}),
    }
    try:
        return tokenizer.apply_chat_template(plain, **asked)
    except Exception as error:  # templates raise what they like
        for plainer in _plainer_ones(plain):
            try:
                return tokenizer.apply_chat_template(plainer, **asked)
            except Exception:
                continue  # nor these: the first reason is what the client can do something about
        raise ApiError(
            400, f"the model's chat template refuses the messages: {error}", param="messages"
        ) from error


def _line(plain: dict[str, Any]) -> str:
    """A message in the plain form. An answer that begins with a blank, as a model writes it, gets no second one."""
    role, content = plain["role"], plain["content"] or ""
    return f"{role}:{content}\n" if role == "assistant" and content[:1].isspace() else f"{role}: {content}\n"


def render_next(
    tokenizer: Any,
    messages: Sequence[ChatMessage],
    limits: ServerLimits,
    options: Mapping[str, Any] | None = None,
) -> str:
    """What the template puts behind an answer to go on with these messages: the answer's end, them, the next one's
    beginning. *raises:* ApiError: as `render`, or the template does not repeat answers as they are.
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


def _tells(template: str, role: str) -> bool:
    """Whether a template names this role: of one that it does not, it might drop the message."""
    return f"'{role}'" in template or f'"{role}"' in template


def _plain(message: ChatMessage, index: int, form: ContentFormat) -> dict[str, Any]:
    """A message as templates read it: content in their form, arguments of calls as objects where they are JSON."""
    content, thoughts = content_of(message, index, form)
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
    """The value of a call's arguments; the text itself where it is no JSON, as of an answer that was cut short."""
    try:
        value = json.loads(text or "{}")
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # not JSON, or half a surrogate pair in it
        return text
    return text if isinstance(value, str) else value


def _write_calls(plain: dict[str, Any]) -> None:
    """A message's calls as part of its text, in our form, for a template that knows none."""
    for call in plain.pop("tool_calls", ()):
        text = written_call(call["function"]["name"], _text_of(call["function"]["arguments"]))
        content = plain["content"]
        if isinstance(content, list):
            plain["content"] = [*content, {"type": "text", "text": f"\n{text}" if content else text}]
        else:
            plain["content"] = f"{content}\n{text}" if content else text


def _plainer_ones(plain: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The messages with less in them each time: what some template insists on, and without thoughts beside content."""
    for without, written in itertools.product(
        (_as_it_is, _without_thoughts), (_as_it_is, _plainer, _with_text)
    ):
        if without is not written:
            yield [without(written(one)) for one in plain]


def _as_it_is(plain: dict[str, Any]) -> dict[str, Any]:
    return plain


def _without_thoughts(plain: dict[str, Any]) -> dict[str, Any]:
    """A message as gpt-oss's template wants it beside calls: with no thoughts where there is content."""
    return {name: value for name, value in plain.items() if name not in _THOUGHTS or not plain["content"]}


def _write_ids(messages: Sequence[dict[str, Any]], whole_id: str) -> None:
    """Ids of calls as the model writes them, numbered through the conversation, in the tools' answers too."""
    written: dict[str | None, str] = {}
    number = 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            own = whole_id.format(name=call["function"]["name"], number=number)
            written[call["id"]] = call["id"] = own
            number += 1
        if "tool_call_id" in message:
            message["tool_call_id"] = written.get(message["tool_call_id"], message["tool_call_id"])


def _plainer(plain: dict[str, Any]) -> dict[str, Any]:
    """A message with what some templates insist on: arguments that are objects, ids of nine letters and digits."""
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
    """A message with what DeepSeek's templates insist on: arguments that are text."""
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
