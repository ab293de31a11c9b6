"""The rules of a call, in a Lark grammar of llguidance: in the model's own form, with the markers as its own tokens.

Each tool's parameters are a JSON schema of their own within the grammar, so that a `$ref` in them means what it meant
to their author. Where a form writes arguments one by one, each has a rule: of strings the bare text, with their length,
pattern and choices, of others JSON.
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

__all__ = ["call_rules", "json_rule", "listed", "text_until"]

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
_MAPS = ("properties", "$defs", "definitions")  # of schemas by name
_LISTS = ("anyOf", "oneOf", "prefixItems")
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties")
_OTHERS = ("$ref", "anyOf", "oneOf", "if", "dependentSchemas")  # that add to an object's own properties
_WORD = re.compile(r"[^\s<>\[\]{}\"]{1,128}")  # a name that a form can write without quotes


def call_rules(
    tokenizer: Any, form: ToolCallFormat | TaggedCallFormat, tools: Sequence[Tool]
) -> Iterator[str]:
    """The rule `call`, and those that it needs: a call of any of the tools."""
    for number, tool in enumerate(tools):
        parameters = _closed(tool.function.parameters or _NO_PARAMETERS)
        if isinstance(form, TaggedCallFormat):
            yield from _named(tokenizer, form, number, tool.function.name, parameters)
            continue
        head = f'{{"{form.name_field}": {json.dumps(tool.function.name)}, "{form.arguments_field}": '
        tail = ['"}"']
        if form.id_field:
            tail = [json.dumps(f', {json.dumps(form.id_field)}: "'), "call_id", json.dumps('"}')]
            if not number:
                yield "call_id: /[a-zA-Z0-9]{9}/"
        yield f"call_{number}: {json.dumps(head)} arguments_{number} {' '.join(tail)}"
        yield f"arguments_{number}: {json_rule(parameters)}"
    calls = "(" + " | ".join(f"call_{number}" for number in range(len(tools))) + ")"
    if isinstance(form, TaggedCallFormat):
        begin, end = in_grammar(tokenizer, form.list_begin + form.begin), []
    else:
        begin, end = in_grammar(tokenizer, form.begin), in_grammar(tokenizer, form.end)
    yield f"call: {' '.join([*begin, calls, *end])}"


def listed(parameters: dict[str, Any] | None) -> bool:
    """Whether a form that writes arguments one by one can write all that such parameters ask for."""
    schema = resolved(_closed(parameters or _NO_PARAMETERS), parameters)
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return False
    return (
        not any(key in schema for key in ("allOf", "patternProperties", *_OTHERS))
        and all(isinstance(one, str) and _WORD.fullmatch(one) for one in [*properties, *required])
        and (
            bool(properties or required)
            or not (schema.get("minProperties") or schema.get("additionalProperties"))
        )
    )


def json_rule(schema: dict[str, Any]) -> str:
    """JSON of a schema."""
    return f"%json {json.dumps({**schema, 'x-guidance': ONE_LINE})}"


def text_until(tokenizer: Any, rule: str, terminal: str, marker: str) -> tuple[list[str], str]:
    """(rules of that name: a text up to a marker and the marker, the symbols that stand for both)."""
    if marker in added_tokens(tokenizer):
        return [f"{rule}: {terminal}"], f"{rule} {in_grammar(tokenizer, marker)[0]}"
    return [f"{rule}[suffix={json.dumps(marker)}]: {terminal}"], rule


def _named(
    tokenizer: Any, form: TaggedCallFormat, number: int, name: str, parameters: dict[str, Any]
) -> Iterator[str]:
    """The rules of a call of one tool, from its name on."""
    head, *with_id = form.arguments
    symbols = in_grammar(tokenizer, name + head)
    for one in with_id:
        symbols += ["call_id", *in_grammar(tokenizer, one)]
        if not number:
            yield f"call_id: /{form.call_id}/"
    end = form.end + form.list_end
    if form.parameter is None:
        yield f"arguments_{number}: {json_rule(parameters)}"
        symbols.append(f"arguments_{number}")
    else:
        schema = resolved(parameters, parameters)
        if not listed(parameters):
            begin = in_grammar(tokenizer, form.parameter.begin)
            value = in_grammar(tokenizer, form.parameter.value)
            rules, ways = _value(tokenizer, form.parameter.end, f"value_{number}", {}, {})
            yield from rules
            yield f"argument_{number}: {' '.join([*begin, '/[a-zA-Z0-9_.-]{1,64}/', *value, *ways])}"
            symbols.append(f"argument_{number}*")
            schema = {}
        required = [one for one in schema.get("required", ()) if isinstance(one, str)]
        properties = schema.get("properties", {})
        wanted = {**properties, **{one: {} for one in required if one not in properties}}
        for place, (key, inner) in enumerate(wanted.items()):
            rule = f"argument_{number}_{place}"
            value = form.parameter.value
            if form.parameter.json_value and types_of(inner, parameters) != {"string"}:
                value = form.parameter.json_value
            begin = in_grammar(tokenizer, form.parameter.begin + key + value)
            rules, ways = _value(tokenizer, form.parameter.end, f"value_{number}_{place}", inner, parameters)
            yield from rules
            yield f"{rule}: {' '.join(begin)} ({' | '.join(ways)})"
            symbols.append(rule if key in required else f"{rule}?")
    yield f"call_{number}: {' '.join([*symbols, *in_grammar(tokenizer, end)])}"


def _value(
    tokenizer: Any, end: str, name: str, schema: Any, root: dict[str, Any]
) -> tuple[list[str], list[str]]:
    """(rules of that name, the ways to write a value and what stands behind it)."""
    own, types = resolved(schema, root), types_of(schema, root)
    behind = " ".join(in_grammar(tokenizer, end))
    marker = end.strip()
    blank, _, rest = end.partition(marker)
    values = [own["const"]] if "const" in own else own.get("enum")
    if isinstance(values, list):
        texts = [one if isinstance(one, str) else json.dumps(one) for one in values]
        return [], [f"{json.dumps(one)} {behind}" for one in texts if marker not in one]
    if types is not None and "string" not in types:
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return [f"{name}: {json_rule({**shared, **own})}"], [f"{name} {behind}"]
    least, most = (own.get(key, "") if types == {"string"} else "" for key in ("minLength", "maxLength"))
    content = f"(?s:.{{{least or 0},{most}}})" if least or most != "" else "(?s:.*)"
    parts = [f"/{content}{_in_regex(blank)}/", rf"~/(?s:.*){_in_regex(re.escape(marker))}(?s:.*)/"]
    if types == {"string"} and isinstance(pattern := own.get("pattern"), str):
        parts.insert(1, f"/{_anywhere(pattern)}{_in_regex(blank)}/")
    rules, symbols = text_until(tokenizer, name, name.upper(), marker)
    rules.append(f"{name.upper()}: {' & '.join(parts)}")
    return rules, [" ".join([symbols, *in_grammar(tokenizer, rest)])]


def _anywhere(pattern: str) -> str:
    """A schema's pattern, which may match within a text, as an expression of the whole text."""
    begin, end = pattern.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
    inner = pattern[1 if begin else 0 : len(pattern) - 1 if end else None]
    return f"{'' if begin else '(?s:.*)'}(?:{_in_regex(inner)}){'' if end else '(?s:.*)'}"


def _in_regex(text: str) -> str:
    """Of an expression: as it is written between slashes."""
    return re.sub(r"(?s:\\.)|/", lambda one: r"\/" if one[0] == "/" else one[0], text).replace("\n", "\\n")


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
        closed |= {"additionalProperties": False} if all(name in [*named] for name in required) else {}
    return closed
