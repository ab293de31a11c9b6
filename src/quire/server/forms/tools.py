"""Tools: told to the model by its own chat template, whose form of a call is learnt from it.

The form is learnt, not listed: a message with a call of known name and arguments is rendered, and what surrounds them
is the form. A template that knows no tools gets a system message that describes them, and this form:

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Oslo"}}
    </tool_call>

Only forms whose calls are JSON objects with a name and arguments are read (Qwen, Hermes, Llama 3, Mistral and their
like); of a template that writes calls otherwise, an answer's text stays text.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.server.schemas.chat import Tool

__all__ = [
    "ToolForm",
    "form_of",
    "system_message",
    "template_tells_tools",
    "template_text",
    "written_call",
]

_NAME, _KEY, _VALUE, _TEXT = "qfn_name", "qfn_key", "qfn_value", "qfn_text"


@dataclass(frozen=True)
class ToolForm:
    """What surrounds a call, special tokens included, and the names of its two fields.

    begin: "" where a message of one object is a call.
    """

    begin: str = "<tool_call>\n"
    end: str = "\n</tool_call>"
    name_field: str = "name"
    arguments_field: str = "arguments"


def form_of(tokenizer: Any) -> ToolForm | None:
    """The form of a model's calls; None where it cannot be read."""
    return _learn(tokenizer, template_text(tokenizer))[0]


def template_text(tokenizer: Any) -> str:
    """The tokenizer's chat template, or all of them where it has several by name; "" where it has none."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(template.values()) if isinstance(template, dict) else template


def template_tells_tools(tokenizer: Any) -> bool:
    """Whether the chat template itself tells the model of tools."""
    return _learn(tokenizer, template_text(tokenizer))[1]


@functools.lru_cache(maxsize=16)
def _learn(tokenizer: Any, template: str) -> tuple[ToolForm | None, bool]:
    if not template:
        return ToolForm(), False
    tool = {
        "type": "function",
        "function": {"name": _NAME, "description": "", "parameters": {"type": "object", "properties": {}}},
    }
    user = {"role": "user", "content": "q"}
    call = {"type": "function", "id": "abcdefghi", "function": {"name": _NAME, "arguments": {_KEY: _VALUE}}}

    def render(answer: dict[str, Any], tools: list[Any] | None) -> str:
        return tokenizer.apply_chat_template(
            [user, {"role": "assistant", **answer}], tools=tools, tokenize=False
        )

    try:
        if _NAME not in tokenizer.apply_chat_template([user], tools=[tool], tokenize=False):
            return ToolForm(), False
        called = render({"content": "", "tool_calls": [call]}, [tool])
        said = render({"content": _TEXT}, [tool])
    except Exception:  # a template that cannot take this answer
        return None, True
    start = said.rfind(_TEXT)
    differ = (at for at, (one, other) in enumerate(zip(called, said, strict=False)) if one != other)
    begin = min(start, next(differ, start))  # before a text there may be a blank that a call does not have
    rest = said[start + len(_TEXT) :]
    at = called.rfind(_NAME, 0, len(called) - len(rest))
    found = _object_around(called, at, begin)
    if start < 0 or at < begin or found is None or not called.endswith(rest):
        return None, True
    value, first, last = found
    names = [key for key, inner in value.items() if inner == _NAME]
    arguments = [key for key, inner in value.items() if inner == {_KEY: _VALUE}]
    if len(names) != 1 or len(arguments) != 1:
        return None, True
    return (
        ToolForm(
            called[begin:first],
            called[last : len(called) - len(rest)].replace(tokenizer.eos_token or "\0", ""),
            names[0],
            arguments[0],
        ),
        True,
    )


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


def system_message(tools: Sequence[Tool]) -> dict[str, Any]:
    """What a model is told of tools by us, where its template does not."""
    described = "\n".join(json.dumps(tool.function.model_dump(exclude_none=True)) for tool in tools)
    call = written_call("NAME", "ARGUMENTS").replace('"NAME"', "NAME")
    return {
        "role": "system",
        "content": f"You may call these functions:\n{described}\nTo call one, answer with\n{call}",
    }


def written_call(name: str, arguments: str) -> str:
    """A call in our form. arguments: JSON text."""
    form = ToolForm()
    fields = f'"{form.name_field}": {json.dumps(name)}, "{form.arguments_field}": {arguments}'
    return f"{form.begin}{{{fields}}}{form.end}"
