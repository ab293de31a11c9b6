"""Calls that are JSON objects with a name and arguments, in either order, between markers.

Such a call is reported as it grows. Its end marker may be missing; several calls may stand between the markers, or in
a list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from dataclasses import dataclass

from quire.server.outputs.call_events import ArgumentText, CallEnd, CallStart, EventGenerator
from quire.server.outputs.growing_text import (
    BLANKS,
    EndOfTextError,
    GrowingText,
    ValueEnd,
    expect,
    next_char,
    skip_pieces,
    wait,
)
from quire.server.outputs.tool_call_format import ToolCallFormat

__all__ = ["NO_ARGUMENTS", "ObjectCalls", "ObjectFields", "has_more", "read_object"]

NO_ARGUMENTS = "{}"
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_MAX_CHARS = 256  # of a key or a name
_ARGUMENTS = ("arguments", "parameters")
ObjectReader = Generator[CallStart | ArgumentText | CallEnd | None, None, tuple[int, bool] | None]


@dataclass(frozen=True)
class ObjectFields:
    """The fields of a call. names: of the tools that a call may name, None for any; with names, it has these fields
    only."""

    name: str = "name"
    arguments: tuple[str, ...] = _ARGUMENTS
    names: frozenset[str] | None = None
    others: tuple[str, ...] = ("type", "id")


class ObjectCalls:
    """Calls in a template's format."""

    at_line_start = False

    def __init__(self, call_format: ToolCallFormat) -> None:
        marker = call_format.begin.strip()
        self._begin = (
            marker.rstrip("[" + BLANKS) or marker
        )  # models vary the list's bracket behind the marker
        self._end = call_format.end.split()
        self._fields = ObjectFields(call_format.name_field, (call_format.arguments_field, *_ARGUMENTS))
        self.starts = (self._begin or "{",)

    def read(self, text: GrowingText) -> EventGenerator:
        start = yield from expect(text, 0, [self._begin])
        if start is None:
            return None
        at = yield from next_char(text, start[0], BLANKS + "[")
        is_list = "[" in text.text[start[0] : at] and "]" not in self._end
        ends = ["]", *self._end] if is_list else self._end
        end = None
        while text.text[at] == "{":
            result = yield from read_object(text, at, self._fields)
            if result is None:
                break
            end, is_whole = result
            if not is_whole:
                return end
            end, num_ends = yield from skip_pieces(text, end, ends)
            if num_ends or not (yield from has_more(text, end, BLANKS + ",;")):
                break
            at = yield from next_char(text, end, BLANKS + ",;")
        return end


def has_more(text: GrowingText, at: int, skipped: str) -> Generator[None, None, bool]:
    """Whether other characters than these follow."""
    try:
        yield from next_char(text, at, skipped)
    except EndOfTextError:
        return False
    return True


def read_object(text: GrowingText, at: int, fields: ObjectFields) -> ObjectReader:
    """Reads the object at a place; returns (the place behind it, whether the call is complete), None for no call."""
    call = _Call(text, at, fields)
    at += 1
    while True:
        at = yield from next_char(text, at, BLANKS + ",")
        if text.text[at] == "}":
            return (yield from call.read_end(at + 1))
        key = yield from _short_string(text, at, call.keys)
        colon = None if key is None else (yield from expect(text, at + len(key), [":"]))
        if key is None or colon is None:
            return None if call.name is None else (at, False)
        start = yield from next_char(text, colon[0])
        behind = yield from call.read_value(_decoded(key), start)
        if behind is None:
            return None if call.name is None else (at, False)
        at = behind


class _Call:
    """The state of reading one call's object."""

    def __init__(self, text: GrowingText, begin: int, fields: ObjectFields) -> None:
        self._text, self._begin, self._fields = text, begin, fields
        self.name: str | None = None
        self._start: int | None = None  # of the arguments
        self._given = 0  # the place up to which the arguments have been yielded
        self._end: int | None = None
        all_fields = (fields.name, *fields.arguments, *fields.others)
        self.keys = None if fields.names is None else frozenset(map(json.dumps, all_fields))

    def read_value(
        self, key: str | None, start: int
    ) -> Generator[CallStart | ArgumentText | None, None, int | None]:
        """Reads a field's value; returns the place behind it, None if it is invalid."""
        fields, text = self._fields, self._text
        if key == fields.name and self.name is None:
            known = None if fields.names is None else frozenset(map(json.dumps, fields.names))
            name = yield from _short_string(text, start, known)
            if name is None or (decoded := _decoded(name)) is None:
                return None
            self.name = decoded
            yield CallStart(decoded)
            yield from self._new_arguments()
            return start + len(name)
        is_arguments = key in fields.arguments and self._start is None
        if is_arguments:
            self._start = self._given = start
        end = ValueEnd(start)
        while (stop := end.find(text.text)) is None:
            yield from self._new_arguments()
            yield from wait(text)
        if is_arguments:
            self._end = stop
        yield from self._new_arguments()
        return stop

    def _new_arguments(self) -> Generator[ArgumentText, None, None]:
        """The new part of the arguments, without an object's last character; arguments that are not an object come at
        the end."""
        text = self._text.text
        if self.name is None or self._start is None or text[self._start] != "{":
            return
        upto = len(text) if self._end is None else self._end - 1
        if upto > self._given:
            yield ArgumentText(text[self._given : upto])
            self._given = upto

    def read_end(self, end: int) -> Generator[ArgumentText | CallEnd, None, tuple[int, bool] | None]:
        text = self._text.text
        if self.name is None:
            return None
        given = NO_ARGUMENTS if self._start is None else _as_object(text[self._start : self._end].strip())
        if self.keys is not None and not (given.startswith("{") and _is_object(text[self._begin : end])):
            self._text.num_plain = end
            return None
        yield ArgumentText(given[self._given - (self._start or 0) :])
        yield CallEnd(end)
        return end, True


def _short_string(
    text: GrowingText, at: int, known: frozenset[str] | None
) -> Generator[None, None, str | None]:
    """The JSON string at a place, as it is written; None if there is none, or not one of `known`."""
    while True:
        part = text.text[at : at + _MAX_CHARS]
        if match := _STRING.match(part):
            return match[0] if known is None or match[0] in known else None
        fits = part.startswith('"') if known is None else any(text.startswith(part) for text in known)
        if not fits or len(part) == _MAX_CHARS:
            return None
            return None
        yield from wait(text)


def _decoded(text: str) -> str | None:
    """The string of JSON text, half a surrogate pair replaced; None if it is not JSON."""
    try:
        return str(json.loads(text)).encode("utf-8", "replace").decode()
    except ValueError:
        return None


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _as_object(text: str) -> str:
    """Arguments that are not a JSON object: empty ones, or an object within a string; others unchanged."""
    inner = _decoded(text) if text.startswith('"') else None
    if text == "null" or (inner is not None and not inner.strip()):
        return NO_ARGUMENTS
    return inner.strip() if inner is not None and _is_object(inner) else text
