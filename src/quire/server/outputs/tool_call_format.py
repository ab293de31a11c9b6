"""Tools: told to the model by its own chat template, whose form of a call is learnt from it.

The form is learnt, not listed: a message with a call of known name and arguments is rendered, and what surrounds them
is the form. A template that knows no tools gets a system message that describes them, and this form:

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Oslo"}}
    </tool_call>

A learnt form is of calls that are JSON objects with a name and arguments (Qwen, Hermes, Llama 3, Mistral and their
like), or one of `tagged_call_format` (later Mistral, DeepSeek, Qwen3-Coder). Beside it the forms of `known_formats` and
`bare_calls` are read.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.server.outputs.known_formats import known_form
from quire.server.outputs.markers import added_tokens
from quire.server.outputs.tagged_call_format import CALL_ID, Call, TaggedCallFormat, learn_named_form
from quire.server.schemas.chat_bodies import Tool

__all__ = [
    "ToolCallFormat",
    "form_of",
    "system_message",
    "template_tells_tools",
    "template_text",
    "template_writes_calls",
    "written_call",
]

_NAME, _KEY, _VALUE, _TEXT = "qfn_name", "qfn_key", "qfn_value", "qfn_text"


@dataclass(frozen=True)
class ToolCallFormat:
    """What surrounds a call, special tokens included, and the names of its two fields.

    begin: "" where a message of one object is a call. id_field: of an id behind the arguments, "" for none.
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
    """How a template writes calls, None where that cannot be read; whether it tells of tools, and writes calls."""

    form: ToolCallFormat | TaggedCallFormat | None = field(default_factory=ToolCallFormat)
    tells: bool = False
    writes: bool = False


def form_of(tokenizer: Any) -> ToolCallFormat | TaggedCallFormat | None:
    """The form of a model's calls; None where it cannot be read."""
    return _learn(tokenizer, template_text(tokenizer)).form


def template_text(tokenizer: Any) -> str:
    """The tokenizer's chat template, or all of them where it has several by name; "" where it has none."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(template.values()) if isinstance(template, dict) else template


def template_tells_tools(tokenizer: Any) -> bool:
    """Whether the chat template itself tells the model of tools."""
    return _learn(tokenizer, template_text(tokenizer)).tells


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
        tells = _NAME in tokenizer.apply_chat_template([user], tools=[tool], tokenize=False)
    except Exception:  # a template that cannot take these
        return _TemplateProbe(None, tells=True, writes=True)
    tools = [tool] if tells else None

    def around(calls: Sequence[Call]) -> tuple[str, int, int] | None:
        """An answer with these calls, and where they begin and end in it; None for a template that cannot take it."""
        called = _rendered(render, calls, tools)
        try:
            said = render({"content": _TEXT}, tools)
        except Exception:
            return None
        start = said.rfind(_TEXT)
        if called is None or start < 0:
            return None
        differ = (at for at, (one, other) in enumerate(zip(called, said, strict=False)) if one != other)
        begin = min(
            start, next(differ, start)
        )  # before a text there may be a blank that a call does not have
        rest = said[start + len(_TEXT) :]
        return (called, begin, len(called) - len(rest)) if called.endswith(rest) else None

    def written(calls: Sequence[Call]) -> str | None:
        found = around(calls)
        if found is None:
            return None
        called, begin, end = found
        return called[begin:end].replace(tokenizer.eos_token or "\0", "")

    found = around([(_NAME, {_KEY: _VALUE}, CALL_ID)]) if tells else None
    form = None if found is None else _object_form(*found, tokenizer.eos_token)
    form = form or learn_named_form(written, added_tokens(tokenizer))
    form = form or known_form(added_tokens(tokenizer))
    if form is not None or tells:
        return _TemplateProbe(form, tells, writes=True)
    return _TemplateProbe()


def _rendered(
    render: Callable[[dict[str, Any], list[Any] | None], str], calls: Sequence[Call], tools: list[Any] | None
) -> str | None:
    """An answer with these calls, with arguments as objects or, where the template wants it so, as JSON text."""
    for write in (dict, json.dumps):
        told = [
            {"type": "function", "id": key, "function": {"name": name, "arguments": write(arguments)}}
            for name, arguments, key in calls
        ]
        try:
            return render({"content": "", "tool_calls": told}, tools)
        except Exception:  # a template that cannot take this answer
            continue
    return None


def _object_form(called: str, begin: int, end: int, eos: str | None) -> ToolCallFormat | None:
    """The form of a call that is a JSON object between these places."""
    at = called.rfind(_NAME, 0, end)
    found = _object_around(called, at, begin)
    if at < begin or found is None:
        return None
    value, first, last = found
    names = [key for key, inner in value.items() if inner == _NAME]
    arguments = [key for key, inner in value.items() if inner == {_KEY: _VALUE}]
    if len(names) != 1 or len(arguments) != 1:
        return None
    last_field = [*value][-1]
    id_field = last_field if value[last_field] == CALL_ID else ""
    end_marker = called[last:end].replace(eos or "\0", "")
    return ToolCallFormat(called[begin:first], end_marker, names[0], arguments[0], id_field)


def _object_around(text: str, at: int, low: int) -> tuple[dict[str, Any], int, int] | None:
    """The JSON object that holds position `at`: its value, first and last position."""
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
    tools: Sequence[Tool], form: ToolCallFormat | TaggedCallFormat | None = None
) -> dict[str, Any]:
    """What a model is told of tools by us, where its template does not. form: of its calls, ours by default."""
    described = "\n".join(json.dumps(tool.function.model_dump(exclude_none=True)) for tool in tools)
    ours = written_call("NAME", "ARGUMENTS").replace('"NAME"', "NAME")
    call = form.example if isinstance(form, TaggedCallFormat) else ours
    return {
        "role": "system",
        "content": f"You may call these functions:\n{described}\nTo call one, answer with\n{call}",
    }


def written_call(name: str, arguments: str) -> str:
    """A call in our form. arguments: JSON text."""
    form = ToolCallFormat()
    fields = f'"{form.name_field}": {json.dumps(name)}, "{form.arguments_field}": {arguments}'
    return f"{form.begin}{{{fields}}}{form.end}"
