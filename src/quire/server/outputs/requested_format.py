"""`RequestedFormat`: the form that a request asks its answer to have, by whichever of many names, in the engine's
words.

OpenAI says `response_format`, vLLM `structured_outputs` and, until 0.11, `guided_json` and the like; we say
`json_schema` and `regex`. All come to one JSON schema, regular expression or Lark grammar.
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
    """field: the client's name of it. kind: what `SamplingParams` calls it; value: as that takes it."""

    field: str
    kind: str
    value: Any


def requested_format(body: SamplingBody, service: Service) -> RequestedFormat | None:
    """The form that the body asks for, None for any. *raises:* ApiError: several, too large, not understood."""
    forms = list(_forms(body))
    if len(forms) > 1:
        got = " and ".join(form.field for form in forms)
        raise ApiError(400, f"expected one form of the answer, got {got}", param=forms[1].field)
    if not forms:
        return None
    form = forms[0]
    if form.kind == "json_schema":
        _check_schema(form, service)
    else:
        limits = service.settings.limits
        most = limits.max_regex_chars if form.kind == "regex" else limits.max_schema_bytes
        if (num_chars := len(form.value)) > most:
            raise ApiError(400, f"expected at most {most} characters, got {num_chars}", param=form.field)
    if form.kind == "grammar" and "::=" in form.value:
        return RequestedFormat(form.field, form.kind, _lark_of_gbnf(form))
    return form


@contextmanager
def api_field_names(body: SamplingBody) -> Iterator[None]:
    """An error of the engine's names the field that the client has written."""
    try:
        yield
    except ArgumentError as error:
        # A grammar that the body does not ask for is of a call that may come, or of a schema behind thoughts.
        asked = {form.kind: form.field for form in _forms(body)}
        wrapped = "tools" if getattr(body, "tools", None) else asked.get("json_schema", "tools")
        names = {"grammar": wrapped} | asked
        message = str(error)
        if "grammar" not in asked:
            message = message.replace("expected a grammar that", "expected tools or a schema that")
        for name, field in names.items():
            message = message.replace(f" - in `{name}`", f" - in `{field}`")
        if message == str(error):
            raise
        raise ArgumentError(message) from error


def _forms(body: SamplingBody) -> Iterator[RequestedFormat]:
    """Everything that the body asks for."""
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
        found = list(_of(name, structured.json_, structured.regex, structured.choice, structured.grammar))
        if structured.json_object:
            found.append(RequestedFormat("structured_outputs.json_object", "json_schema", {"type": "object"}))
        if not found:
            message = "expected json, regex, choice, grammar or json_object: true, got none"
            raise ApiError(400, message, param="structured_outputs")
        yield from found
    yield from _of("guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)
    yield from _of("", None, getattr(body, "regex", None), None, None)
    if (schema := getattr(body, "json_schema", None)) is not None:
        yield RequestedFormat("json_schema", "json_schema", schema)


def _of(
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


def _check_schema(form: RequestedFormat, service: Service) -> None:
    schema, most = form.value, service.settings.limits.max_schema_bytes
    if isinstance(schema, str):
        if len(schema) > most:
            raise ApiError(400, f"expected a schema of at most {most} bytes", param=form.field)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"expected a schema as JSON text: {error}", param=form.field) from error
    service.check_schema(schema, form.field)


def _lark_of_gbnf(form: RequestedFormat) -> str:
    """A grammar of `name ::= ...` rules, as llama.cpp and xgrammar write them, in Lark."""
    from llguidance.gbnf_to_lark import any_to_lark

    text = re.sub(r"\n\s*\n", "\n", form.value)  # its time grows with the square of empty lines
    if len(text) > _MAX_GBNF:
        raise ApiError(
            400, f"expected {_MAX_GBNF} characters of ::= rules at most, or Lark", param=form.field
        )
    try:
        return any_to_lark(text)
    except Exception as error:  # it raises bare ones
        raise ApiError(
            400, f"expected a grammar of ::= rules or in Lark: {error}", param=form.field
        ) from error
