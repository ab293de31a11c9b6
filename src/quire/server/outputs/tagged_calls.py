"""Calls that are no JSON object: the name stands bare, and behind it the arguments, as JSON text or one by one.

Such a call is told as it grows: of arguments one by one a string's text as it comes, other values whole. Blanks around
markers may differ from the template's, the markers of a list may be missing, and so may the call's last marker.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping
from typing import Any

from quire.server.outputs.call_events import More, Name, Run, Whole
from quire.server.outputs.growing_text import (
    GrowingText,
    Piece,
    ValueEnd,
    expect,
    match,
    next_char,
    overlap,
    past,
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
_NOTHING = ("null", '""')
_Arguments = Generator[More | None, None, tuple[int, bool]]  # the place behind them, whether they are whole


def _name_before(behind: str) -> re.Pattern[str]:
    """Of a name in front of this text. A colon may stand in a name: where one ends it, the last one does."""
    return re.compile(rf"{TOOL_NAME}(?=:)|{TOOL_NAME}\Z") if behind == ":" else _NAME


class TaggedCalls:
    """schemas: of the parameters of the tools that are offered, by their names. any_name: others may be named too."""

    at_line_start = False

    def __init__(self, form: TaggedCallFormat, schemas: Mapping[str, Any], *, any_name: bool) -> None:
        self._form, self._schemas, self._any_name = form, schemas, any_name
        call: list[Piece] = [*form.begin.split(), _name_before(form.arguments[0])]
        for number, one in enumerate(form.arguments):
            call += ([_ID] if number else []) + one.split()
        self._list_end = form.list_end.split()
        self._end = form.end.split()
        list_begin = form.list_begin.split()
        self._ways = [[*list_begin, *call], call] if list_begin else [call]
        self.starts = (*list_begin[:1], form.begin.split()[0])

    def read(self, text: GrowingText) -> Run:
        """One call. Of others in its list, each is read by itself."""
        begun = yield from expect(text, 0, *self._ways)
        if begun is None or not (self._any_name or begun[1] in self._schemas):
            return None
        at, name = begun
        form = self._form.parameter
        begins = [["{"], *([one] for one in _NOTHING)] if form is None else [form.begin.split()]
        if (yield from expect(text, at, *begins, *([one] for one in self._end))) is None:
            return None
        yield Name(name)
        arguments = self._json(text, at) if form is None else self._parameters(text, at, name, form)
        end, is_whole = yield from arguments
        if is_whole:
            yield Whole(end)
            end, _ = yield from past(text, end, [*self._end, *self._list_end])
        return end

    def _json(self, text: GrowingText, at: int) -> _Arguments:
        at = yield from next_char(text, at)
        if text.text[at] != "{":
            nothing = yield from expect(text, at, *([one] for one in _NOTHING))
            yield More(NO_ARGUMENTS)
            return at if nothing is None else nothing[0], True
        end = ValueEnd(at)
        while (stop := end.find(text.text)) is None:
            yield More(text.text[at:])
            at = len(text.text)
            yield from wait(text)
        yield More(text.text[at:stop])
        return stop, True

    def _parameters(self, text: GrowingText, at: int, name: str, form: ParameterFormat) -> _Arguments:
        """Arguments that are written one by one, as JSON text."""
        schema = self._schemas.get(name) or {}
        named = schema.get("properties") if isinstance(schema, dict) else None
        ends = [[one] for one in self._end]
        values = [form.value, *([form.json_value] if form.json_value else [])]
        ways = [[*form.begin.split(), _KEY, *value.split()] for value in values]
        keys: list[str] = []
        while True:
            found = yield from expect(text, at, *ways, *ends)
            if found is None:
                return at, False
            if not found[1]:
                yield More("}" if keys else NO_ARGUMENTS)
                return at, True
            at, key = found
            yield More(f"{', ' if keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
            keys.append(key)
            own = named.get(key, {}) if isinstance(named, dict) else {}
            at = yield from self._value(text, at, form, types_of(own, schema))

    def _value(
        self, text: GrowingText, at: int, form: ParameterFormat, types: frozenset[str] | None
    ) -> Generator[More | None, None, int]:
        """Reads one value, up to a marker that another value or the call's end follows; returns the place behind it."""
        if form.value.endswith("\n"):
            while len(text.text) == at:
                yield from wait(text)
            at += text.text.startswith("\n", at)
        marker, blank = form.end.strip(), "\n" if form.end.startswith("\n") else ""
        behind = [form.begin.split(), *([one] for one in self._end)]
        is_string, start = types == {"string"}, at
        if is_string:
            yield More('"')
        searched = at
        while True:
            found = text.text.find(marker, searched)
            if found < 0:
                searched = max(searched, len(text.text) - len(marker))
                tail = text.text[max(at, len(text.text) - len(blank + marker)) :]
                upto = len(text.text) - max(overlap(tail, blank + marker), overlap(tail, marker))
            else:
                ways = [match(text.text, found + len(marker), way) for way in behind]
                stop = at + len(text.text[at:found].removesuffix(blank))
                if any(ways):
                    yield More(
                        f'{_escaped(text.text[at:stop])}"'
                        if is_string
                        else json_of(text.text[start:stop], types)
                    )
                    return found + len(marker)
                if None not in ways:
                    searched = found + 1
                    continue
                upto = stop
            if is_string and upto > at:
                yield More(_escaped(text.text[at:upto]))
                at = upto
            yield from wait(text)


def _escaped(text: str) -> str:
    """As it stands within the quotes of JSON text."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
