"""Calls that are JSON objects with a name and arguments, in either order, between markers of their own.

Such a call is told as it grows. Its end marker may be missing; several may stand between the markers, or in a list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from dataclasses import dataclass

from quire.server.outputs.call_events import More, Name, Run, Whole
from quire.server.outputs.growing_text import (
    BLANKS,
    EndOfTextError,
    GrowingText,
    ValueEnd,
    expect,
    next_char,
    past,
    wait,
)
from quire.server.outputs.tool_call_format import ToolCallFormat

__all__ = ["NO_ARGUMENTS", "ObjectCalls", "ObjectFields", "has_more", "read_object"]

NO_ARGUMENTS = "{}"
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_MOST_CHARS = 256  # of a key or a name
_ARGUMENTS = ("arguments", "parameters")
ObjectRun = Generator[Name | More | Whole | None, None, tuple[int, bool] | None]


@dataclass(frozen=True)
class ObjectFields:
    """The fields of a call. names: of the tools that it may name, None for any. With names it has only these fields."""

    name: str = "name"
    arguments: tuple[str, ...] = _ARGUMENTS
    names: frozenset[str] | None = None
    others: tuple[str, ...] = ("type", "id")


class ObjectCalls:
    """Calls in a template's form."""

    at_line_start = False

    def __init__(self, form: ToolCallFormat) -> None:
        marker = form.begin.strip()
        self._begin = marker.rstrip("[" + BLANKS) or marker  # how the list begins behind the marker varies
        self._end = form.end.split()
        self._fields = ObjectFields(form.name_field, (form.arguments_field, *_ARGUMENTS))
        self.starts = (self._begin or "{",)

    def read(self, text: GrowingText) -> Run:
        begun = yield from expect(text, 0, [self._begin])
        if begun is None:
            return None
        at = yield from next_char(text, begun[0], BLANKS + "[")
        is_list = "[" in text.text[begun[0] : at] and "]" not in self._end
        ends = ["]", *self._end] if is_list else self._end
        end = None
        while text.text[at] == "{":
            found = yield from read_object(text, at, self._fields)
            if found is None:
                break
            end, is_whole = found
            if not is_whole:
                return end
            end, num_ends = yield from past(text, end, ends)
            if num_ends or not (yield from has_more(text, end, BLANKS + ",;")):
                break
            at = yield from next_char(text, end, BLANKS + ",;")
        return end


def has_more(text: GrowingText, at: int, skipped: str) -> Generator[None, None, bool]:
    """Whether anything but these characters follows."""
    try:
        yield from next_char(text, at, skipped)
    except EndOfTextError:
        return False
    return True


def read_object(text: GrowingText, at: int, fields: ObjectFields) -> ObjectRun:
    """Reads the object at a place; returns (the place behind it, whether the call is whole), None for no call."""
    call = _Call(text, at, fields)
    at += 1
    while True:
        at = yield from next_char(text, at, BLANKS + ",")
        if text.text[at] == "}":
            return (yield from call.ended(at + 1))
        key = yield from _short_string(text, at, call.keys)
        colon = None if key is None else (yield from expect(text, at + len(key), [":"]))
        if key is None or colon is None:
            return None if call.name is None else (at, False)
        start = yield from next_char(text, colon[0])
        behind = yield from call.value(_decoded(key), start)
        if behind is None:
            return None if call.name is None else (at, False)
        at = behind


class _Call:
    """What is known of one call's object."""

    def __init__(self, text: GrowingText, begin: int, fields: ObjectFields) -> None:
        self._text, self._begin, self._fields = text, begin, fields
        self.name: str | None = None
        self._start: int | None = None  # of the arguments
        self._given = 0  # the place up to which they are told
        self._end: int | None = None
        all_of = (fields.name, *fields.arguments, *fields.others)
        self.keys = None if fields.names is None else frozenset(map(json.dumps, all_of))

    def value(self, key: str | None, start: int) -> Generator[Name | More | None, None, int | None]:
        """Reads a field's value; returns the place behind it, None where there is none."""
        fields, text = self._fields, self._text
        if key == fields.name and self.name is None:
            known = None if fields.names is None else frozenset(map(json.dumps, fields.names))
            name = yield from _short_string(text, start, known)
            if name is None or (decoded := _decoded(name)) is None:
                return None
            self.name = decoded
            yield Name(decoded)
            yield from self._told()
            return start + len(name)
        is_arguments = key in fields.arguments and self._start is None
        if is_arguments:
            self._start = self._given = start
        end = ValueEnd(start)
        while (stop := end.find(text.text)) is None:
            yield from self._told()
            yield from wait(text)
        if is_arguments:
            self._end = stop
        yield from self._told()
        return stop

    def _told(self) -> Generator[More, None, None]:
        """The arguments so far, without an object's last character; arguments that are no object come at the end."""
        text = self._text.text
        if self.name is None or self._start is None or text[self._start] != "{":
            return
        upto = len(text) if self._end is None else self._end - 1
        if upto > self._given:
            yield More(text[self._given : upto])
            self._given = upto

    def ended(self, end: int) -> Generator[More | Whole, None, tuple[int, bool] | None]:
        text = self._text.text
        if self.name is None:
            return None
        given = NO_ARGUMENTS if self._start is None else _as_object(text[self._start : self._end].strip())
        if self.keys is not None and not (given.startswith("{") and _is_object(text[self._begin : end])):
            self._text.num_said = end
            return None
        yield More(given[self._given - (self._start or 0) :])
        yield Whole(end)
        return end, True


def _short_string(
    text: GrowingText, at: int, known: frozenset[str] | None
) -> Generator[None, None, str | None]:
    """The JSON string at a place, as it is written; None where there is none, or none of those that are known."""
    while True:
        part = text.text[at : at + _MOST_CHARS]
        if found := _STRING.match(part):
            return found[0] if known is None or found[0] in known else None
        fits = part.startswith('"') if known is None else any(one.startswith(part) for one in known)
        if not fits or len(part) == _MOST_CHARS:
            return None
        yield from wait(text)


def _decoded(text: str) -> str | None:
    """What JSON text says, half a surrogate pair replaced; None where it is none."""
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
    """Arguments that are no JSON object: none, or an object within a string; any other as it is written."""
    inner = _decoded(text) if text.startswith('"') else None
    if text == "null" or (inner is not None and not inner.strip()):
        return NO_ARGUMENTS
    return inner.strip() if inner is not None and _is_object(inner) else text
