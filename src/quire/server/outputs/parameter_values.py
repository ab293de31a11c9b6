"""JSON values of arguments that a model writes as bare text, by the tool's schema.

A value that can only be a string is the text itself. Another value is the JSON that the text is; text that is not
JSON, or not of a type of the schema, is a string all the same.
"""

from __future__ import annotations

import json
from typing import Any

__all__ = ["json_of", "resolved", "types_of"]

_MAX_DEPTH = 16
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
    """The schema at the end of a chain of `$ref` within the root, or of an `allOf` with one entry; {} if there is
    none."""
    for _ in range(_MAX_DEPTH):
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
    """The names of a schema's JSON types; None for any type."""
    return _types_of(schema, root, {})


def _types_of(schema: Any, root: Any, seen: dict[int, Any]) -> frozenset[str] | None:
    """seen: the schemas that have been visited, by their ids."""
    schema = resolved(schema, root)
    if id(schema) in seen:
        return frozenset()
    seen[id(schema)] = schema
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset([named])
    if isinstance(named, list):
        return frozenset(name for name in named if isinstance(name, str))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(_NAMES[type(value)] for value in values)
    alternatives = schema.get("anyOf", schema.get("oneOf"))
    if isinstance(alternatives, list):
        types = [_types_of(alternative, root, seen) for alternative in alternatives]
        return None if None in types else frozenset().union(*(names for names in types if names is not None))
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
    raise ValueError(f"{name} is not JSON")
