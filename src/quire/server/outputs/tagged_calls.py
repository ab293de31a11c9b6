"""Reads calls that are not JSON objects: a bare name, and behind it the arguments, as JSON text or one at a time.

Such a call is reported as it grows: of single arguments, a string's text as it comes, other values at their end.
Blanks around markers may differ from the template's; a list's markers and the call's last marker may be missing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping
from typing import Any

from quire.server.outputs.call_events import ArgumentText, CallEnd, CallStart, EventGenerator
from quire.server.outputs.growing_text import (
    GrowingText,
    Piece,
    ValueEnd,
    expect,
    match,
    next_char,
    overlap,
    skip_pieces,
    wait,
)
from quire.server.outputs.object_calls import NO_ARGUMENTS
from quire.server.outputs.parameter_values import json_of, types_of
from quire.server.outputs.tagged_call_format import ParameterFormat, TaggedCallFormat
from quire.server.schemas.chat_bodies import TOOL_NAME

__all__ = ["TaggedCalls"]

_NAME = re.compile(TOOL_NAME)
_ID = re.compile(r"[a-zA-Z0-9_.:-]{0,64}")
_KEY = re.compile(r"[^\s<>\[\]{}\"]{1,128}")
_EMPTY_ARGUMENTS = ("null", '""')
_Arguments = Generator[
    ArgumentText | None, None, tuple[int, bool]
]  # the place behind them, whether they are complete


def _name_before(behind: str) -> re.Pattern[str]:
    """A pattern of a name in front of this text. A name may contain colons; if a colon ends it, the last one does."""
    return re.compile(rf"{TOOL_NAME}(?=:)|{TOOL_NAME}\Z") if behind == ":" else _NAME


class TaggedCalls:
    """schemas: of the offered tools' parameters, by the tools' names. any_name: reads calls of other names, too."""

    at_line_start = False

    def __init__(self, call_format: TaggedCallFormat, schemas: Mapping[str, Any], *, any_name: bool) -> None:
        self._format, self._schemas, self._any_name = call_format, schemas, any_name
        call: list[Piece] = [*call_format.begin.split(), _name_before(call_format.arguments[0])]
        for number, marker in enumerate(call_format.arguments):
            call += ([_ID] if number else []) + marker.split()
        self._list_end = call_format.list_end.split()
        self._end = call_format.end.split()
        list_begin = call_format.list_begin.split()
        self._beginnings = [[*list_begin, *call], call] if list_begin else [call]
        self.starts = (*list_begin[:1], call_format.begin.split()[0])

    def read(self, text: GrowingText) -> EventGenerator:
        """Reads one call. Each further call of its list is read on its own."""
        start = yield from expect(text, 0, *self._beginnings)
        if start is None or not (self._any_name or start[1] in self._schemas):
            return None
        at, name = start
        parameter = self._format.parameter
        ends = [[marker] for marker in self._end]
        json_begins = [["{"], *([text] for text in _EMPTY_ARGUMENTS)]
        begins = json_begins if parameter is None else [parameter.begin.split()]
        if (yield from expect(text, at, *begins, *ends)) is None:
            return None
        yield CallStart(name)
        arguments = self._json(text, at) if parameter is None else self._parameters(text, at, name, parameter)
        end, is_whole = yield from arguments
        if is_whole:
            yield CallEnd(end)
            end, _ = yield from skip_pieces(text, end, [*self._end, *self._list_end])
        return end

    def _json(self, text: GrowingText, at: int) -> _Arguments:
        at = yield from next_char(text, at)
        if text.text[at] != "{":
            empty = yield from expect(text, at, *([word] for word in _EMPTY_ARGUMENTS))
            yield ArgumentText(NO_ARGUMENTS)
            return at if empty is None else empty[0], True
        end = ValueEnd(at)
        while (stop := end.find(text.text)) is None:
            yield ArgumentText(text.text[at:])
            at = len(text.text)
            yield from wait(text)
        yield ArgumentText(text.text[at:stop])
        return stop, True

    def _parameters(self, text: GrowingText, at: int, name: str, parameter: ParameterFormat) -> _Arguments:
        """Arguments that are written one at a time, as JSON text."""
        schema = self._schemas.get(name) or {}
        named = schema.get("properties") if isinstance(schema, dict) else None
        ends = [[marker] for marker in self._end]
        values = [parameter.value, *([parameter.json_value] if parameter.json_value else [])]
        begins = [[*parameter.begin.split(), _KEY, *value.split()] for value in values]
        keys: list[str] = []
        while True:
            start = yield from expect(text, at, *begins, *ends)
            if start is None:
                return at, False
            if not start[1]:
                yield ArgumentText("}" if keys else NO_ARGUMENTS)
                return at, True
            at, key = start
            yield ArgumentText(f"{', ' if keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
            keys.append(key)
            inner = named.get(key, {}) if isinstance(named, dict) else {}
            at = yield from self._value(text, at, parameter, types_of(inner, schema))

    def _value(
        self, text: GrowingText, at: int, parameter: ParameterFormat, types: frozenset[str] | None
    ) -> Generator[ArgumentText | None, None, int]:
        """Reads one value, up to a marker that another argument or the call's end follows; returns the place behind
        it."""
        if parameter.value.endswith("\n"):
            while len(text.text) == at:
                yield from wait(text)
            at += text.text.startswith("\n", at)
        marker, blank = parameter.end.strip(), "\n" if parameter.end.startswith("\n") else ""
        followers = [parameter.begin.split(), *([end] for end in self._end)]
        is_string, start = types == {"string"}, at
        if is_string:
            yield ArgumentText('"')
        searched = at
        while True:
            end = text.text.find(marker, searched)
            if end < 0:
                searched = max(searched, len(text.text) - len(marker))
                tail = text.text[max(at, len(text.text) - len(blank + marker)) :]
                upto = len(text.text) - max(overlap(tail, blank + marker), overlap(tail, marker))
            else:
                matches = [match(text.text, end + len(marker), pieces) for pieces in followers]
                stop = at + len(text.text[at:end].removesuffix(blank))
                if any(matches):
                    yield ArgumentText(
                        f'{_escaped(text.text[at:stop])}"'
                        if is_string
                        else json_of(text.text[start:stop], types)
                    )
                    return end + len(marker)
                if None not in matches:
                    searched = end + 1
                    continue
                upto = stop
            if is_string and upto > at:
                yield ArgumentText(_escaped(text.text[at:upto]))
                at = upto
            yield from wait(text)


def _escaped(text: str) -> str:
    """The text as it stands within the quotes of JSON text."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
