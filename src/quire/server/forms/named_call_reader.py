"""Text as it grows, told apart into what is said and what is called, of calls in a `NamedForm`.

Blanks around markers may differ from the template's. What begins like a call and is none is text, as it stands: it is
held back until the name and what has to follow it are there.

Invariant
    T1  what is given out is the model's text less the markers, in its order; of arguments written one by one the names
        and values, as JSON text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from quire.server.forms.call_reader import CallDelta, SaidText, ValueEnd, overlap
from quire.server.forms.named_form import NamedForm, ParameterForm
from quire.server.forms.parameter_values import json_of, types_of
from quire.server.schemas.chat import TOOL_NAME

__all__ = ["NamedCallReader"]

_NAME = re.compile(TOOL_NAME)
_ID = re.compile(r"[a-zA-Z0-9_.:-]{0,64}")
_KEY = re.compile(r"[^\s<>\[\]{}\"]{1,128}")
_MOST_BLANKS = 64  # between markers: what is undecided is read again with every piece of text
_Pieces = list[str | re.Pattern[str]]


class NamedCallReader:
    """schemas: of each tool's parameters, by its name, which say what a value written as text is."""

    def __init__(self, form: NamedForm, schemas: Mapping[str, Any]) -> None:
        self._form = form
        self._schemas = schemas
        behind: _Pieces = [_NAME]
        for number, one in enumerate(form.arguments):
            behind += ([_ID] if number else []) + one.split()
        self._next = [*form.begin.split(), *behind]
        self._first = [*form.list_begin.split(), *self._next]
        self._end, self._list_end = form.end.split(), form.list_end.split()
        self._text = ""  # not yet decided
        self._call: _JsonArguments | _Parameters | None = None
        self._behind = ""  # "end": of a call, "list": another call, or the end of them
        self._in_list = False
        self._said = SaidText()
        self.num_calls = 0

    def push(self, text: str, *, final: bool = False) -> Iterator[str | CallDelta]:
        """Takes more text and gives out what it decides. final: no more will come."""
        self._text += text
        while True:
            if self._call is not None:
                arguments, rest = self._call.push(self._text, final=final)
                if arguments:
                    yield CallDelta(self.num_calls - 1, None, arguments)
                self._text = rest or ""
                if rest is None:
                    return
                self._call, self._behind = None, "end"
            if self._behind and not self._step_behind(final=final):
                return
            said, name, rest = self._split(final=final)
            if given := self._said.push(said):
                yield given
            self._text = rest
            if name is None:
                return
            self._in_list = False
            self._said.next_call()
            yield CallDelta(self.num_calls, name, "")
            self.num_calls += 1
            if self._form.parameter is None:
                self._call = _JsonArguments()
            else:
                self._call = _Parameters(self._form.parameter, self._end, self._schemas.get(name) or {})

    def _step_behind(self, *, final: bool) -> bool:
        """Past the markers behind a call, as far as they are there; False while that is undecided."""
        if self._behind == "end":
            end = _match(self._text, 0, self._end)
            if end is None and not final:
                return False
            if end is not False:
                self._text = (
                    self._text[end[0] :] if end else ""
                )  # a beginning of the markers is none of the text
            self._behind = "list" if self._form.list_begin else ""
        if self._behind == "list":
            another, end = _match(self._text, 0, self._next[:1]), _match(self._text, 0, self._list_end)
            if not another and not end and None in (another, end) and not final:
                return False
            self._in_list = bool(another)
            if end and not another:
                self._text = self._text[end[0] :]
            self._behind = ""
        return True

    def _split(self, *, final: bool) -> tuple[str, str | None, str]:
        """(what is said for certain, the name of the call behind it or None, the text behind both)."""
        text = self._text
        pieces = self._next if self._in_list else self._first
        marker = pieces[0]
        assert isinstance(marker, str)
        at = text.find(marker)
        while at >= 0:
            found = _match(text, at, pieces)
            if found and self._begins(text, found[0], final=final):
                return text[:at], found[1], text[found[0] :]
            if not final and (found is None or (found and self._begins(text, found[0]) is None)):
                return text[:at], None, text[at:]
            at = text.find(marker, at + 1)
        cut = len(text) - (0 if final else overlap(text, marker))
        return text[:cut], None, text[cut:]

    def _begins(self, text: str, at: int, *, final: bool = False) -> bool | None:
        """Whether arguments begin there; None while that is undecided."""
        one = self._form.parameter
        begins = [["{"]] if one is None else [one.begin.split(), self._end]
        ways = [_match(text, at, pieces) for pieces in begins]
        return True if any(ways) or (final and None in ways) else None if None in ways else False


def _match(text: str, at: int, pieces: _Pieces | list[str]) -> tuple[int, str] | Literal[False] | None:
    """(the end of these pieces, which begin at a place, with blanks between them; the name among them).

    False where they do not, None while more text may decide it.
    """
    name = ""
    for piece in pieces:
        blanks = at
        while at < len(text) and text[at].isspace():
            at += 1
        if at - blanks > _MOST_BLANKS:
            return False
        if isinstance(piece, str):
            if not text.startswith(piece, at):
                return None if piece.startswith(text[at:]) else False
            at += len(piece)
            continue
        found = piece.match(text, at)
        if found is None:
            return None if at == len(text) else False
        if found.end() == len(text):
            return None
        name, at = name or found[0], found.end()
    return at, name


class _JsonArguments:
    """Arguments as JSON text."""

    def __init__(self) -> None:
        self._text = ""
        self._given = 0
        self._end = ValueEnd(0)

    def push(self, text: str, *, final: bool) -> tuple[str, str | None]:
        """(more of them, what stands behind them or None)."""
        self._text = (self._text + text) if self._text else text.lstrip()
        end = self._end.find(self._text)
        upto = len(self._text) if end is None else end
        more, self._given = self._text[self._given : upto], upto
        return more, None if end is None else self._text[end:]


class _Parameters:
    """Arguments that are written one by one, as JSON text. end: what stands behind the last of them."""

    def __init__(self, form: ParameterForm, end: list[str], schema: Any) -> None:
        self._form = form
        self._end = end
        self._schema = schema
        self._named = schema.get("properties") if isinstance(schema, dict) else None
        self._marker = form.end.strip()
        self._text = ""  # not yet decided
        self._searched = 0  # characters of a value in which no marker ends it
        self._num = 0
        self._in_value = False
        self._is_string = False  # the value is: its text is given out as it comes
        self._is_first = True  # piece of the value
        self._types: frozenset[str] | None = None

    def push(self, text: str, *, final: bool) -> tuple[str, str | None]:
        """(more of them, what stands behind them or None)."""
        self._text += text
        given = ""
        while True:
            if self._in_value:
                more, is_whole = self._value(final=final)
                given += more
                if not is_whole:
                    return given, None
            begun = self._begin()
            if begun is None:
                return given, None
            if begun is False:
                end = _match(self._text, 0, self._end)
                if end is None and not final:
                    return given, None
                given += "}" if self._num else "{}"
                return given, self._text  # where it is not the call's end, the rest is text
            given += begun

    def _begin(self) -> str | Literal[False] | None:
        """The name of the next value as JSON text; False if none comes, None while that is undecided."""
        pieces = [*self._form.begin.split(), _KEY, *self._form.value.split()]
        found = _match(self._text, 0, pieces)
        if not found:
            return None if found is None and not _match(self._text, 0, self._end) else False
        at, key = found
        self._text = self._text[at:]
        self._in_value, self._is_first = True, True
        schema = self._named.get(key, {}) if isinstance(self._named, dict) else {}
        self._types = types_of(schema, self._schema)
        self._is_string = self._types == {"string"}
        self._num += 1
        quote = '"' if self._is_string else ""
        return f"{'{' if self._num == 1 else ', '}{json.dumps(key, ensure_ascii=False)}: {quote}"

    def _value(self, *, final: bool) -> tuple[str, bool]:
        """(more of the value as JSON text, whether it is whole)."""
        if self._is_first and self._form.value.endswith("\n"):
            if not self._text:
                return "", False
            self._text = self._text.removeprefix("\n")
            self._is_first = False
        text, blank = self._text, "\n" if self._form.end.startswith("\n") else ""
        at, is_whole = self._find_end(final=final)
        if is_whole:
            value = text[:at].removesuffix(blank)
            self._text, self._in_value, self._searched = text[at + len(self._marker) :], False, 0
            if self._is_string:
                return f'{_escaped(value)}"', True
            return json_of(value, self._types), True
        if not self._is_string:
            return (text.strip(), False) if final else ("", False)
        cut = at
        if not final:
            held = max(overlap(text[:at], blank + self._marker), overlap(text[:at], self._marker))
            cut = at - (held if at == len(text) else len(text[:at]) - len(text[:at].removesuffix(blank)))
        self._text, self._searched = text[cut:], max(0, self._searched - cut)
        return _escaped(text[:cut]), False

    def _find_end(self, *, final: bool) -> tuple[int, bool]:
        """(where the value ends, whether that is certain): at a marker with another value or the call's end behind."""
        at = self._text.find(self._marker, self._searched)
        while at >= 0:
            behind = at + len(self._marker)
            ways = [
                _match(self._text, behind, self._form.begin.split()),
                _match(self._text, behind, self._end),
            ]
            if any(ways) or (final and None in ways):
                return at, True
            if None in ways:
                return at, False
            self._searched = at + 1
            at = self._text.find(self._marker, at + 1)
        self._searched = max(self._searched, len(self._text) - len(self._marker))
        return len(self._text), False


def _escaped(text: str) -> str:
    """As it stands within the quotes of JSON text."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
