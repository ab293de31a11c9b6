"""Values of arguments that a model writes as bare text: which JSON they stand for, by the tool's schema.

A value that can only be a string is the text itself. Any other is the JSON that the text is; text that is none, or not
of a type that the schema has, is a string all the same.
"""

from __future__ import annotations

import json
from typing import Any

__all__ = ["json_of", "resolved", "types_of"]

_MOST_DEPTH = 16
_NAMES: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
_WORDS = {
    "true": ("boolean", "true"),
    "false": ("boolean", "false"),
    "none": ("null", "null"),
    "null": ("null", "null"),
}


def resolved(schema: Any, root: Any) -> Any:
    """The schema that a chain of `$ref` within the root, or an `allOf` of one, leads to; {} where it leads nowhere."""
    for _ in range(_MOST_DEPTH):
        if not isinstance(schema, dict):
            return {}
        if isinstance(path := schema.get("$ref"), str):
            schema = root
            for key in path.removeprefix("#").split("/")[1:]:
                key = key.replace("~1", "/").replace("~0", "~")
                schema = schema.get(key) if isinstance(schema, dict) else None
        elif isinstance(parts := schema.get("allOf"), list) and len(parts) == 1 and "type" not in schema:
            schema = parts[0]
        else:
            return schema
    return {}


def types_of(schema: Any, root: Any) -> frozenset[str] | None:
    """The names of the JSON types that a schema has; None for any."""
    return _types_of(schema, root, {})


def _types_of(schema: Any, root: Any, seen: dict[int, Any]) -> frozenset[str] | None:
    """seen: the schemas that are counted already, by their ids."""
    schema = resolved(schema, root)
    if id(schema) in seen:
        return frozenset()
    seen[id(schema)] = schema
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset([named])
    if isinstance(named, list):
        return frozenset(one for one in named if isinstance(one, str))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(_NAMES[type(one)] for one in values)
    ways = schema.get("anyOf", schema.get("oneOf"))
    if isinstance(ways, list):
        found = [_types_of(one, root, seen) for one in ways]
        return None if None in found else frozenset().union(*(one for one in found if one is not None))
    return None


def json_of(text: str, types: frozenset[str] | None) -> str:
    """The value as JSON text."""
    if types != {"string"}:
        bare = text.strip()
        kind, word = _WORDS.get(bare.lower(), ("", ""))
        if kind and (types is None or kind in types):
            return word
        try:
            value = json.loads(bare, parse_constant=_refuse)
        except (ValueError, RecursionError):
            value = text
        kind = _NAMES[type(value)]
        fits = types is None or kind in types or (kind == "integer" and "number" in types)
        if kind != "string" and (fits or "string" not in (types or ())):
            return bare
        if kind == "string" and types is not None and "string" not in types and value != text:
            return bare
    return json.dumps(text, ensure_ascii=False)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
