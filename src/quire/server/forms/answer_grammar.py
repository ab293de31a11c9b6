"""The grammar of an answer that is forced to be a call, or a text of a schema, or either.

Each tool's parameters are a JSON schema of their own within the grammar, so that a `$ref` in them means what it meant
to their author. The markers around a call are named as the tokenizer's own tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from quire.sampling.grammar import ONE_LINE
from quire.server.forms.answer_form import AnswerForm
from quire.server.forms.markers import added_tokens, in_grammar
from quire.server.schemas.chat import Tool

__all__ = ["answer_grammar"]

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
_MAPS = ("properties", "$defs", "definitions")  # of schemas by name
_LISTS = ("anyOf", "oneOf", "prefixItems")
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties")
_OTHERS = ("$ref", "anyOf", "oneOf", "if", "dependentSchemas")  # that add to an object's own properties


def answer_grammar(
    tokenizer: Any, form: AnswerForm, tools: Sequence[Tool], schema: dict[str, Any] | None = None
) -> str:
    """A Lark grammar of answers that are one call of any of the tools, or JSON of the schema.

    An answer that begins within thoughts ends them first.
    """
    rules: list[str] = []
    ways: list[str] = []
    if tools:
        assert form.calls is not None
        calls = []
        for number, tool in enumerate(tools):
            head = f'{{"{form.calls.name_field}": {json.dumps(tool.function.name)}, "{form.calls.arguments_field}": '
            calls.append(f"call_{number}")
            rules.append(f'call_{number}: {json.dumps(head)} arguments_{number} "}}"')
            rules.append(f"arguments_{number}: {_json(_closed(tool.function.parameters or _NO_PARAMETERS))}")
        begin, end = in_grammar(tokenizer, form.calls.begin), in_grammar(tokenizer, form.calls.end)
        rules.append(f"call: {' '.join([*begin, '(' + ' | '.join(calls) + ')', *end])}")
        ways.append("call")
    if schema is not None:
        rules.append(f"answer: {_json(schema)}")
        ways.append("answer")
    start = " | ".join(ways)
    if form.in_thoughts:
        assert form.thoughts is not None
        end_marker = form.thoughts.end
        if end_marker in added_tokens(tokenizer):
            rules.append("thoughts: /(?s:.*)/")
            start = f"thoughts {in_grammar(tokenizer, end_marker)[0]} blank ({start})"
        else:
            rules.append(f"thoughts[suffix={json.dumps(end_marker)}]: /(?s:.*)/")
            start = f"thoughts blank ({start})"
        rules.append("blank: /\\n{0,2}/")
    return "\n".join([f"start: {start}", *rules]) + "\n"


def _json(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': ONE_LINE})}"


def _closed(parameters: dict[str, Any]) -> dict[str, Any]:
    """Parameters as objects that hold what they name and nothing else, unless they say otherwise.

    Without that, a call would end only when the model is done with inventing more of them.
    """
    if "type" not in parameters:
        parameters = {"type": "object", **parameters}
    return parameters if _is_composed(parameters) else _closed_schema(parameters)


def _is_composed(value: Any) -> bool:
    """Whether an object's properties are named in several places, none of which knows them all."""
    if isinstance(value, list):
        return any(map(_is_composed, value))
    if not isinstance(value, dict):
        return False
    if "allOf" in value or ("properties" in value and any(key in value for key in _OTHERS)):
        return True
    return any(map(_is_composed, value.values()))


def _closed_schema(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    for key in _MAPS:
        if isinstance(inner := schema.get(key), dict):
            closed[key] = {name: _closed_schema(one) for name, one in inner.items()}
    for key in _LISTS:
        if isinstance(inner := schema.get(key), list):
            closed[key] = [_closed_schema(one) for one in inner]
    for key in ("items", "additionalProperties"):
        closed |= {key: _closed_schema(schema[key])} if key in schema else {}
    named, required = schema.get("properties"), schema.get("required", [])
    if isinstance(named, dict) and isinstance(required, list) and not any(key in schema for key in _OPEN):
        closed |= {"additionalProperties": False} if all(name in named for name in required) else {}
    return closed
