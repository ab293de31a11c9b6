"""Text as it grows, told apart into what is said and what is called.

Invariant
    T1  what is given out, text and calls' arguments together, is the model's text less the markers, in its order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from quire.server.forms.tools import ToolForm

__all__ = ["CallDelta", "CallReader", "SaidText", "ValueEnd", "overlap"]


_BEFORE_OBJECT = tuple(" \t\n\r[")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_MEMBER = re.compile(rf"[\s,]*({_STRING.pattern})\s*:\s*(?=\S)", re.DOTALL)


@dataclass(frozen=True)
class CallDelta:
    """More of call `index`: its name with the first of them, then pieces of its arguments' JSON text."""

    index: int
    name: str | None
    arguments: str


class SaidText:
    """What is said before, between and behind calls: where that is blank all the way from a call on, it is none.

    Blanks are held back there until something else comes.
    """

    def __init__(self) -> None:
        self._blanks = ""
        self._is_begun = True

    def push(self, text: str) -> str:
        """Takes more text; returns what of it, and of what was held back, is said."""
        self._blanks += text
        if not self._is_begun and not self._blanks.strip():
            return ""
        said, self._blanks, self._is_begun = self._blanks, "", True
        return said

    def next_call(self) -> None:
        """A call begins behind what was pushed."""
        self._blanks, self._is_begun = "", False


class CallReader:
    """Text as it grows, told apart into what is said and what is called.

    Where `form` is None everything is said.
    """

    def __init__(self, form: ToolForm | None) -> None:
        self._form = form
        begin = "" if form is None else form.begin.strip()
        self._is_list = begin.endswith("[")
        self._begin = begin.rstrip("[ \t\n\r") or begin  # how the list begins behind the marker varies
        self._end = "" if form is None else form.end.strip()
        self._text = ""  # not yet decided
        self._call: _Call | None = None
        self._in_list = False  # another call may follow without the marker
        self._behind_call = False  # the end marker, or a comma before the next of a list, may follow
        self._said, self._is_said = SaidText(), False
        self.num_calls = 0

    def push(self, text: str, *, final: bool = False) -> Iterator[str | CallDelta]:
        """Takes more text and gives out what it decides. final: no more will come."""
        self._text += text
        while True:
            if self._call is not None:
                yield from self._call.push(self._text)
                self._text = self._call.rest
                if not self._call.is_whole and not final:
                    return
                call, self._call = self._call, None
                if call.name is None:  # it was none
                    self.num_calls -= 1
                    self._is_said, self._in_list = True, False
                    yield self._said.push(call.text)
                else:
                    self._behind_call, self._in_list = True, self._is_list
                    self._said.next_call()
            if self._behind_call and not self._step_behind(final):
                return
            num_said, begin = self._find_call(final)
            if given := self._said.push(self._text[:num_said]):
                self._is_said, self._in_list = True, False
                yield given
            if begin is None:
                self._text = self._text[num_said:]
                return
            assert self._form is not None
            self._call = _Call(self._form, self.num_calls, self._text[num_said:begin])
            self._text = self._text[begin:]
            self.num_calls += 1

    def _step_behind(self, final: bool) -> bool:
        """Past the end marker of the call before, if it is there; False while that is undecided."""
        text = self._text.lstrip()
        if self._end and text.startswith(self._end):
            text, self._in_list = text[len(self._end) :], False
        elif not final and self._end.startswith(text):
            return False
        self._text, self._behind_call = text, False
        return True

    def _find_call(self, final: bool) -> tuple[int, int | None]:
        """(how many characters are said for certain, where the next call's object begins or None)."""
        text, marker = self._text, self._begin
        if self._form is None or not text:
            return len(text), None
        in_list = self._in_list
        blank = len(text) - len(text.lstrip(" \t\n\r," if in_list else None))
        if in_list and text[blank : blank + 1] in ("", "{"):
            return (0, blank) if blank < len(text) else (len(text) if final else 0, None)
        if not marker:
            if self._is_said or text[blank : blank + 1] not in ("", "{"):
                return len(text), None
            return (0, blank) if blank < len(text) else (len(text) if final else 0, None)
        at = text.find(marker)
        while at >= 0:
            begin = at + len(marker)
            while text[begin : begin + 1] in _BEFORE_OBJECT:
                begin += 1
            if text[begin : begin + 1] == "{":
                return at, begin
            if begin == len(text) and not final:
                return at, None
            at = text.find(marker, at + 1)
        return len(text) - (0 if final else overlap(text, marker)), None


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `marker`."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0


class _Call:
    """One call's object as it grows, behind `lead`, which is text too where it turns out to be no call.

    Name and arguments are members of the object itself, in either order.
    """

    def __init__(self, form: ToolForm, index: int, lead: str) -> None:
        self._form, self._index = form, index
        self.text = lead
        self.rest = ""
        self.name: str | None = None
        self.is_whole = False
        self._end = ValueEnd(len(lead))
        self._at = len(lead) + 1  # where the next member is looked for
        self._value: ValueEnd | None = None  # of the member that is read
        self._is_arguments = False  # that member is
        self._arguments = range(0)  # characters of them not yet given out

    def push(self, text: str) -> list[CallDelta]:
        """What is decided; where `is_whole` then, `rest` is what follows."""
        self.text += text
        end = self._end.find(self.text)
        if end is not None:
            self.is_whole, self.text, self.rest = True, self.text[:end], self.text[end:]
        deltas: list[CallDelta] = []
        while True:
            had_name = self.name is not None
            goes_on = self._read_member()
            if self.name is not None:
                if not had_name:
                    deltas.append(CallDelta(self._index, self.name, ""))
                if self._arguments:
                    given = self.text[self._arguments.start : self._arguments.stop]
                    deltas.append(CallDelta(self._index, None, given))
                    self._arguments = range(0)
            if not goes_on:
                return deltas

    def _read_member(self) -> bool:
        """Reads the next member, or more of the one begun; whether there may be another in the text."""
        if self._value is None:
            found = _MEMBER.match(self.text, self._at)
            if found is None:
                return False
            key, start = _string(found[1]), found.end()
            if key == self._form.name_field and self.name is None:
                value = _STRING.match(self.text, start)
                if value is None and self.text.startswith('"', start):
                    return False
                self.name = _string(value[0]) if value else None
            self._at, self._value = start, ValueEnd(start)
            self._is_arguments = key == self._form.arguments_field
        end = self._value.find(self.text)
        upto = len(self.text) if end is None else end
        if self._is_arguments and upto > self._at:
            self._arguments = range(self._arguments.start or self._at, upto)
        self._at = upto
        if end is None:
            return False
        self._value = None
        return True


def _string(text: str) -> str | None:
    """What JSON text says, half a surrogate pair replaced; None where it is none."""
    try:
        return str(json.loads(text)).encode("utf-8", "replace").decode()
    except ValueError:
        return None


class ValueEnd:
    """Finds where the JSON object or array that begins at `start` ends, each character looked at once."""

    def __init__(self, start: int) -> None:
        self._position = start
        self._depth = 0
        self._in_string = False

    def find(self, text: str) -> int | None:
        """The position behind it in a text that only grows, None while it has not ended; a bare one ends at , or }."""
        position = self._position
        while position < len(text):
            char = text[position]
            if self._in_string:
                if char == "\\":
                    position += 1
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]" and self._depth <= 1:
                self._position = position
                return position + self._depth
            elif char in "}]":
                self._depth -= 1
            elif char == "," and not self._depth:
                self._position = position
                return position
            position += 1
        self._position = position
        return None
