"""The call format of a model, learnt from its chat template, which also describes the tools to the model.

The format is learnt, not listed: a message with a call of known name and arguments is rendered; the text around them
is the format. A template without tools gets a system message that describes them, and this format:

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Oslo"}}
    </tool_call>

A learnt format is of calls that are JSON objects with a name and arguments (Qwen, Hermes, Llama 3, Mistral and
others), or of `tagged_call_format` (later Mistral, DeepSeek, Qwen3-Coder). The formats of `known_formats` and
`bare_calls` are read in addition.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.server.outputs.known_formats import known_format
from quire.server.outputs.markers import added_tokens
from quire.server.outputs.tagged_call_format import CALL_ID, Call, TaggedCallFormat, learn_tagged_format
from quire.server.schemas.chat_bodies import Tool

__all__ = [
    "ToolCallFormat",
    "call_format_of",
    "system_message",
    "template_describes_tools",
    "template_text",
    "template_writes_calls",
    "written_call",
]

_NAME, _KEY, _VALUE, _TEXT = "qfn_name", "qfn_key", "qfn_value", "qfn_text"


@dataclass(frozen=True)
class ToolCallFormat:
    """The text around a call, special tokens included, and the names of its fields.

    begin: "" if a message with one JSON object is a call. id_field: of an id behind the arguments, "" for none.
    """

    begin: str = "<tool_call>\n"
    end: str = "\n</tool_call>"
    name_field: str = "name"
    arguments_field: str = "arguments"
    id_field: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """All texts with markers in them."""
        return (self.begin, self.end)


@dataclass(frozen=True)
class _TemplateProbe:
    """call_format: the format of the template's calls, None if it cannot be read. describes, writes: whether the
    template describes tools to the model, and writes the calls of earlier answers."""

    call_format: ToolCallFormat | TaggedCallFormat | None = field(default_factory=ToolCallFormat)
    describes: bool = False
    writes: bool = False


def call_format_of(tokenizer: Any) -> ToolCallFormat | TaggedCallFormat | None:
    """The format of a model's calls; None if it cannot be read."""
    return _learn(tokenizer, template_text(tokenizer)).call_format


def template_text(tokenizer: Any) -> str:
    """The tokenizer's chat template, or all of its named ones joined; "" without one."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(template.values()) if isinstance(template, dict) else template


def template_describes_tools(tokenizer: Any) -> bool:
    """Whether the chat template itself describes tools to the model."""
    return _learn(tokenizer, template_text(tokenizer)).describes


def template_writes_calls(tokenizer: Any) -> bool:
    """Whether the chat template itself writes the calls of earlier answers."""
    return _learn(tokenizer, template_text(tokenizer)).writes


@functools.lru_cache(maxsize=16)
def _learn(tokenizer: Any, template: str) -> _TemplateProbe:
    if not template:
        return _TemplateProbe()
    tool = {
        "type": "function",
        "function": {"name": _NAME, "description": "", "parameters": {"type": "object", "properties": {}}},
    }
    user = {"role": "user", "content": "q"}

    def render(answer: dict[str, Any], tools: list[Any] | None) -> str:
        return tokenizer.apply_chat_template(
            [user, {"role": "assistant", **answer}], tools=tools, tokenize=False
        )

    try:
        describes = _NAME in tokenizer.apply_chat_template([user], tools=[tool], tokenize=False)
    except Exception:  # the template refuses these arguments
        return _TemplateProbe(None, describes=True, writes=True)
    tools = [tool] if describes else None

    def around(calls: Sequence[Call]) -> tuple[str, int, int] | None:
        """An answer with these calls, and where they begin and end in it; None if the template refuses it."""
        with_calls = _rendered(render, calls, tools)
        try:
            with_text = render({"content": _TEXT}, tools)
        except Exception:
            return None
        start = with_text.rfind(_TEXT)
        if with_calls is None or start < 0:
            return None
        pairs = enumerate(zip(with_calls, with_text, strict=False))
        first_difference = next((at for at, (char, other) in pairs if char != other), start)
        begin = min(start, first_difference)  # a text may have a blank before it that a call does not have
        rest = with_text[start + len(_TEXT) :]
        return (with_calls, begin, len(with_calls) - len(rest)) if with_calls.endswith(rest) else None

    def written(calls: Sequence[Call]) -> str | None:
        place = around(calls)
        if place is None:
            return None
        text, begin, end = place
        return text[begin:end].replace(tokenizer.eos_token or "\0", "")

    place = around([(_NAME, {_KEY: _VALUE}, CALL_ID)]) if describes else None
    learnt = None if place is None else _object_format(*place, tokenizer.eos_token)
    learnt = learnt or learn_tagged_format(written, added_tokens(tokenizer))
    learnt = learnt or known_format(added_tokens(tokenizer))
    if learnt is not None or describes:
        return _TemplateProbe(learnt, describes, writes=True)
    return _TemplateProbe()


def _rendered(
    render: Callable[[dict[str, Any], list[Any] | None], str], calls: Sequence[Call], tools: list[Any] | None
) -> str | None:
    """An answer with these calls, the arguments as objects or, if the template wants that, as JSON text."""
    for write in (dict, json.dumps):
        tool_calls = [
            {"type": "function", "id": key, "function": {"name": name, "arguments": write(arguments)}}
            for name, arguments, key in calls
        ]
        try:
            return render({"content": "", "tool_calls": tool_calls}, tools)
        except Exception:  # the template refuses this answer
            continue
    return None


def _object_format(text: str, begin: int, end: int, eos: str | None) -> ToolCallFormat | None:
    """The format of a call that is a JSON object between these places."""
    at = text.rfind(_NAME, 0, end)
    place = _object_around(text, at, begin)
    if at < begin or place is None:
        return None
    value, first, last = place
    names = [key for key, inner in value.items() if inner == _NAME]
    arguments = [key for key, inner in value.items() if inner == {_KEY: _VALUE}]
    if len(names) != 1 or len(arguments) != 1:
        return None
    last_field = [*value][-1]
    id_field = last_field if value[last_field] == CALL_ID else ""
    end_marker = text[last:end].replace(eos or "\0", "")
    return ToolCallFormat(text[begin:first], end_marker, names[0], arguments[0], id_field)


def _object_around(text: str, at: int, low: int) -> tuple[dict[str, Any], int, int] | None:
    """The JSON object that contains position `at`: its value, first and last position."""
    decoder = json.JSONDecoder()
    first = text.rfind("{", low, at)
    while first >= 0:
        try:
            value, last = decoder.raw_decode(text, first)
        except ValueError:
            value, last = None, 0
        if isinstance(value, dict) and last > at:
            return value, first, last
        first = text.rfind("{", low, first)
    return None


def system_message(
    tools: Sequence[Tool], call_format: ToolCallFormat | TaggedCallFormat | None = None
) -> dict[str, Any]:
    """Our description of tools, for a template without one. call_format: the format of the model's calls; ours if
    None."""
    described = "\n".join(json.dumps(tool.function.model_dump(exclude_none=True)) for tool in tools)
    ours = written_call("NAME", "ARGUMENTS").replace('"NAME"', "NAME")
    call = call_format.example if isinstance(call_format, TaggedCallFormat) else ours
    return {
        "role": "system",
        "content": f"You may call these functions:\n{described}\nTo call one, answer with\n{call}",
    }


def written_call(name: str, arguments: str) -> str:
    """A call in our format. arguments: JSON text."""
    ours = ToolCallFormat()
    fields = f'"{ours.name_field}": {json.dumps(name)}, "{ours.arguments_field}": {arguments}'
    return f"{ours.begin}{{{fields}}}{ours.end}"
