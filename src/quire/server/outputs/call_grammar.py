"""The rules of a call, in a Lark grammar of llguidance: in the model's own format, with its markers as tokens.

Each tool's parameters are a JSON schema of their own within the grammar, so that a `$ref` in them keeps its meaning.
In a format with one argument at a time, each argument has a rule: the bare text of a string, with its length, pattern
and choices; JSON for other types.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from quire.sampling.grammar import ONE_LINE
from quire.server.outputs.markers import added_tokens, in_grammar
from quire.server.outputs.parameter_values import resolved, types_of
from quire.server.outputs.tagged_call_format import TaggedCallFormat
from quire.server.outputs.tool_call_format import ToolCallFormat
from quire.server.schemas.chat_bodies import Tool

__all__ = ["call_rules", "can_list_arguments", "json_rule", "text_until"]

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
_MAPS = ("properties", "$defs", "definitions")  # of schemas by name
_LISTS = ("anyOf", "oneOf", "prefixItems")
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties")
_OTHERS = ("$ref", "anyOf", "oneOf", "if", "dependentSchemas")  # may add to an object's own properties
_WORD = re.compile(r"[^\s<>\[\]{}\"]{1,128}")  # a name that a format can write without quotes


def call_rules(
    tokenizer: Any, call_format: ToolCallFormat | TaggedCallFormat, tools: Sequence[Tool]
) -> Iterator[str]:
    """The rule `call`, a call of any of the tools, and the rules that it refers to."""
    for number, tool in enumerate(tools):
        parameters = _closed(tool.function.parameters or _NO_PARAMETERS)
        if isinstance(call_format, TaggedCallFormat):
            yield from _tagged_call_rules(tokenizer, call_format, number, tool.function.name, parameters)
            continue
        name_field, arguments_field = call_format.name_field, call_format.arguments_field
        head = f'{{"{name_field}": {json.dumps(tool.function.name)}, "{arguments_field}": '
        tail = ['"}"']
        if call_format.id_field:
            tail = [json.dumps(f', {json.dumps(call_format.id_field)}: "'), "call_id", json.dumps('"}')]
            if not number:
                yield "call_id: /[a-zA-Z0-9]{9}/"
        yield f"call_{number}: {json.dumps(head)} arguments_{number} {' '.join(tail)}"
        yield f"arguments_{number}: {json_rule(parameters)}"
    calls = "(" + " | ".join(f"call_{number}" for number in range(len(tools))) + ")"
    if isinstance(call_format, TaggedCallFormat):
        begin, end = in_grammar(tokenizer, call_format.list_begin + call_format.begin), []
    else:
        begin, end = in_grammar(tokenizer, call_format.begin), in_grammar(tokenizer, call_format.end)
    yield f"call: {' '.join([*begin, calls, *end])}"


def can_list_arguments(parameters: dict[str, Any] | None) -> bool:
    """Whether a format with one argument at a time can write everything that such parameters require."""
    schema = resolved(_closed(parameters or _NO_PARAMETERS), parameters)
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return False
    return (
        not any(key in schema for key in ("allOf", "patternProperties", *_OTHERS))
        and all(isinstance(name, str) and _WORD.fullmatch(name) for name in [*properties, *required])
        and (
            bool(properties or required)
            or not (schema.get("minProperties") or schema.get("additionalProperties"))
        )
    )


def json_rule(schema: dict[str, Any]) -> str:
    """A rule of the JSON values of a schema."""
    return f"%json {json.dumps({**schema, 'x-guidance': ONE_LINE})}"


def text_until(tokenizer: Any, rule: str, terminal: str, marker: str) -> tuple[list[str], str]:
    """(rules of that name: a text up to a marker, and the marker; the symbols that refer to both)."""
    if marker in added_tokens(tokenizer):
        return [f"{rule}: {terminal}"], f"{rule} {in_grammar(tokenizer, marker)[0]}"
    return [f"{rule}[suffix={json.dumps(marker)}]: {terminal}"], rule


def _tagged_call_rules(
    tokenizer: Any, call_format: TaggedCallFormat, number: int, name: str, parameters: dict[str, Any]
) -> Iterator[str]:
    """The rules of a call of one tool, from its name on."""
    head, *after_id = call_format.arguments
    symbols = in_grammar(tokenizer, name + head)
    for text in after_id:
        symbols += ["call_id", *in_grammar(tokenizer, text)]
        if not number:
            yield f"call_id: /{call_format.call_id}/"
    end = call_format.end + call_format.list_end
    parameter = call_format.parameter
    if parameter is None:
        yield f"arguments_{number}: {json_rule(parameters)}"
        symbols.append(f"arguments_{number}")
    else:
        schema = resolved(parameters, parameters)
        if not can_list_arguments(parameters):
            begin = in_grammar(tokenizer, parameter.begin)
            value = in_grammar(tokenizer, parameter.value)
            rules, alternatives = _value(tokenizer, parameter.end, f"value_{number}", {}, {})
            yield from rules
            key = "/[a-zA-Z0-9_.-]{1,64}/"
            yield f"argument_{number}: {' '.join([*begin, key, *value, *alternatives])}"
            symbols.append(f"argument_{number}*")
            schema = {}
        required = [name for name in schema.get("required", ()) if isinstance(name, str)]
        properties = schema.get("properties", {})
        all_properties = {**properties, **{name: {} for name in required if name not in properties}}
        for place, (key, inner) in enumerate(all_properties.items()):
            rule = f"argument_{number}_{place}"
            value = parameter.value
            if parameter.json_value and types_of(inner, parameters) != {"string"}:
                value = parameter.json_value
            begin = in_grammar(tokenizer, parameter.begin + key + value)
            rules, alternatives = _value(
                tokenizer, parameter.end, f"value_{number}_{place}", inner, parameters
            )
            yield from rules
            yield f"{rule}: {' '.join(begin)} ({' | '.join(alternatives)})"
            symbols.append(rule if key in required else f"{rule}?")
    yield f"call_{number}: {' '.join([*symbols, *in_grammar(tokenizer, end)])}"


def _value(
    tokenizer: Any, end: str, name: str, schema: Any, root: dict[str, Any]
) -> tuple[list[str], list[str]]:
    """(rules of that name, the alternatives of a value and the text behind it)."""
    resolved_schema, types = resolved(schema, root), types_of(schema, root)
    behind = " ".join(in_grammar(tokenizer, end))
    marker = end.strip()
    blank, _, rest = end.partition(marker)
    values = [resolved_schema["const"]] if "const" in resolved_schema else resolved_schema.get("enum")
    if isinstance(values, list):
        texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
        return [], [f"{json.dumps(text)} {behind}" for text in texts if marker not in text]
    if types is not None and "string" not in types:
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return [f"{name}: {json_rule({**shared, **resolved_schema})}"], [f"{name} {behind}"]
    min_length, max_length = (
        resolved_schema.get(key, "") if types == {"string"} else "" for key in ("minLength", "maxLength")
    )
    has_bounds = min_length or max_length != ""
    content = f"(?s:.{{{min_length or 0},{max_length}}})" if has_bounds else "(?s:.*)"
    parts = [f"/{content}{_in_regex(blank)}/", rf"~/(?s:.*){_in_regex(re.escape(marker))}(?s:.*)/"]
    if types == {"string"} and isinstance(pattern := resolved_schema.get("pattern"), str):
        parts.insert(1, f"/{_anywhere(pattern)}{_in_regex(blank)}/")
    rules, symbols = text_until(tokenizer, name, name.upper(), marker)
    rules.append(f"{name.upper()}: {' & '.join(parts)}")
    return rules, [" ".join([symbols, *in_grammar(tokenizer, rest)])]


def _anywhere(pattern: str) -> str:
    """A schema's pattern, which may match within a text, as a regular expression of the whole text."""
    begin, end = pattern.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
    inner = pattern[1 if begin else 0 : len(pattern) - 1 if end else None]
    return f"{'' if begin else '(?s:.*)'}(?:{_in_regex(inner)}){'' if end else '(?s:.*)'}"


def _in_regex(text: str) -> str:
    """A regular expression as it is written between slashes."""
    return re.sub(r"(?s:\\.)|/", lambda match: r"\/" if match[0] == "/" else match[0], text).replace(
        "\n", "\\n"
    )


def _closed(parameters: dict[str, Any]) -> dict[str, Any]:
    """Parameters as objects with only the properties that they name, unless they allow others explicitly.

    Without that, a call would end only once the model stops inventing properties.
    """
    if "type" not in parameters:
        parameters = {"type": "object", **parameters}
    return parameters if _is_composed(parameters) else _closed_schema(parameters)


def _is_composed(value: Any) -> bool:
    """Whether an object's properties are spread over several places."""
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
            closed[key] = {name: _closed_schema(value) for name, value in inner.items()}
    for key in _LISTS:
        if isinstance(inner := schema.get(key), list):
            closed[key] = [_closed_schema(value) for value in inner]
    for key in ("items", "additionalProperties"):
        closed |= {key: _closed_schema(schema[key])} if key in schema else {}
    named, required = schema.get("properties"), schema.get("required", [])
    if isinstance(named, dict) and isinstance(required, list) and not any(key in schema for key in _OPEN):
        closed |= {"additionalProperties": False} if all(name in [*named] for name in required) else {}
    return closed
