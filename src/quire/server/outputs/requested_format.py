"""`RequestedFormat`: the output format that a request asks for, by any of its many names.

OpenAI's field is `response_format`, vLLM's `structured_outputs` and, until 0.11, `guided_json` and others; Quire's
own are `json_schema` and `regex`. All become one JSON schema, regular expression or Lark grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from quire.errors import ArgumentError
from quire.server.api_errors import ApiError
from quire.server.schemas.common import SamplingBody
from quire.server.service import Service

__all__ = ["RequestedFormat", "api_field_names", "requested_format"]

_MAX_GBNF = 16384  # characters: a tenth of a second of the converter


@dataclass(frozen=True)
class RequestedFormat:
    """field: in the client's request. kind, value: a parameter of `SamplingParams` and its value."""

    field: str
    kind: str
    value: Any


def requested_format(body: SamplingBody, service: Service) -> RequestedFormat | None:
    """The format that the body asks for, None for free text. *raises:* ApiError: several, too large, or invalid."""
    requested = list(_requested_formats(body))
    if len(requested) > 1:
        fields = " and ".join(entry.field for entry in requested)
        raise ApiError(400, f"expected one output format, got {fields}", param=requested[1].field)
    if not requested:
        return None
    only = requested[0]
    if only.kind == "json_schema":
        _check_schema(only, service)
    else:
        limits = service.settings.limits
        max_chars = limits.max_regex_chars if only.kind == "regex" else limits.max_schema_bytes
        if (num_chars := len(only.value)) > max_chars:
            raise ApiError(400, f"expected at most {max_chars} characters, got {num_chars}", param=only.field)
    if only.kind == "grammar" and "::=" in only.value:
        return RequestedFormat(only.field, only.kind, _lark_of_gbnf(only))
    return only


@contextmanager
def api_field_names(body: SamplingBody) -> Iterator[None]:
    """Errors of the engine within the block name the client's field."""
    try:
        yield
    except ArgumentError as error:
        # A grammar that is not the body's own is made of its tools, or of its schema after reasoning.
        fields = {requested.kind: requested.field for requested in _requested_formats(body)}
        wrapped = "tools" if getattr(body, "tools", None) else fields.get("json_schema", "tools")
        names = {"grammar": wrapped} | fields
        message = str(error)
        if "grammar" not in fields:
            message = message.replace("expected a grammar that", "expected tools or a schema that")
        for name, field in names.items():
            message = message.replace(f" - in `{name}`", f" - in `{field}`")
        if getattr(body, "max_completion_tokens", None) is not None:
            message = re.sub(r"\bmax_tokens\b", "max_completion_tokens", message)
        if message == str(error):
            raise
        raise ArgumentError(message) from error


def _requested_formats(body: SamplingBody) -> Iterator[RequestedFormat]:
    """All formats that the body asks for."""
    response = body.response_format
    if response is not None and response.type == "json_object":
        yield RequestedFormat("response_format", "json_schema", {"type": "object"})
    elif response is not None and response.type == "json_schema":
        field = "response_format.json_schema.schema"
        if response.json_schema is None or response.json_schema.schema_ is None:
            raise ApiError(400, "expected a schema", param=field)
        yield RequestedFormat(field, "json_schema", response.json_schema.schema_)
    structured = body.structured_outputs
    if structured is not None:
        name = "structured_outputs."
        requested = list(
            _from_fields(name, structured.json_, structured.regex, structured.choice, structured.grammar)
        )
        if structured.json_object:
            requested.append(
                RequestedFormat("structured_outputs.json_object", "json_schema", {"type": "object"})
            )
        if not requested:
            message = "expected json, regex, choice, grammar or json_object: true, got none"
            raise ApiError(400, message, param="structured_outputs")
        yield from requested
    yield from _from_fields(
        "guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar
    )
    yield from _from_fields("", None, getattr(body, "regex", None), None, None)
    if (schema := getattr(body, "json_schema", None)) is not None:
        yield RequestedFormat("json_schema", "json_schema", schema)


def _from_fields(
    prefix: str, schema: Any, regex: str | None, choice: list[str] | None, grammar: str | None
) -> Iterator[RequestedFormat]:
    if schema is not None:
        yield RequestedFormat(f"{prefix}json", "json_schema", schema)
    if regex is not None:
        yield RequestedFormat(f"{prefix}regex", "regex", regex)
    if choice is not None:
        lark = "start: " + " | ".join(map(json.dumps, choice))
        yield RequestedFormat(f"{prefix}choice", "grammar", lark)
    if grammar is not None:
        yield RequestedFormat(f"{prefix}grammar", "grammar", grammar)


def _check_schema(requested: RequestedFormat, service: Service) -> None:
    schema, max_bytes = requested.value, service.settings.limits.max_schema_bytes
    if isinstance(schema, str):
        if len(schema) > max_bytes:
            raise ApiError(400, f"expected a schema of at most {max_bytes} bytes", param=requested.field)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"expected a schema as JSON text: {error}", param=requested.field) from error
    service.check_schema(schema, requested.field)


def _lark_of_gbnf(requested: RequestedFormat) -> str:
    """A grammar of `name ::= ...` rules, as llama.cpp and xgrammar write them, in Lark."""
    from llguidance.gbnf_to_lark import any_to_lark

    text = re.sub(r"\n\s*\n", "\n", requested.value)  # the converter's time is quadratic in empty lines
    if len(text) > _MAX_GBNF:
        raise ApiError(
            400, f"expected {_MAX_GBNF} characters of ::= rules at most, or Lark", param=requested.field
        )
    try:
        return any_to_lark(text)
    except Exception as error:  # the converter raises bare exceptions
        raise ApiError(
            400, f"expected a grammar of ::= rules or in Lark: {error}", param=requested.field
        ) from error
