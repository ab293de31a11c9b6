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

__all__ = ["CallDelta", "CallReader", "ValueEnd", "overlap"]


@dataclass(frozen=True)
class CallDelta:
    """More of call `index`: its name with the first of them, then pieces of its arguments' JSON text."""

    index: int
    name: str | None
    arguments: str


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
        self._behind_call = False  # the end marker, or a comma before the next of a list, may follow
        self._said = False
        self.num_calls = 0

    def push(self, text: str, *, final: bool = False) -> Iterator[str | CallDelta]:
        """Takes more text and gives out what it decides. final: no more will come."""
        self._text += text
        while True:
            if self._call is not None:
                deltas, is_whole = self._call.push(self._text)
                yield from deltas
                self._text = self._call.rest
                if not is_whole:
                    break
                self._call, self._behind_call = None, True
            if self._behind_call and not self._step_behind(final):
                break
            num_said, begin = self._find_call(final)
            said, self._text = self._text[:num_said], self._text[num_said:]
            if said.strip() or (said and not self.num_calls):
                self._said = True
                yield said
            if begin is None:
                break
            assert self._form is not None
            self._text = self._text[begin - num_said :]
            self._call = _Call(self._form, self.num_calls)
            self.num_calls += 1
        if final and self._call is not None and self._call.name is None:
            self.num_calls -= 1
            yield self._call.text  # it was none: no name came
            self._call = None

    def _step_behind(self, final: bool) -> bool:
        """Past the end marker of the call before, if it is there; False while that is undecided."""
        text = self._text.lstrip()
        if self._end and text.startswith(self._end):
            text = text[len(self._end) :]
        elif not final and self._end.startswith(text):
            return False
        self._text, self._behind_call = text, False
        return True

    def _find_call(self, final: bool) -> tuple[int, int | None]:
        """(how many characters are said for certain, where the next call's object begins or None)."""
        text, marker = self._text, self._begin
        if self._form is None or not text:
            return len(text), None
        in_list = self.num_calls and self._is_list
        blank = len(text) - len(text.lstrip(" \t\n\r," if in_list else None))
        if in_list and text[blank : blank + 1] in ("", "{"):
            return (0, blank) if blank < len(text) else (len(text) if final else 0, None)
        if not marker:
            if self._said or text[blank : blank + 1] not in ("", "{"):
                return len(text), None
            return (0, blank) if blank < len(text) else (len(text) if final else 0, None)
        at = text.find(marker)
        if at < 0:
            held = 0 if final else overlap(text, marker)
            return len(text) - held, None
        begin = text.find("{", at + len(marker))
        between = text[at + len(marker) : begin if begin >= 0 else len(text)]
        if between.strip(" \t\n\r[") or (final and begin < 0):
            return len(text), None
        return at, begin if begin >= 0 else None


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `marker`."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0


class _Call:
    """One call's object as it grows."""

    def __init__(self, form: ToolForm, index: int) -> None:
        self._index = index
        self._name = re.compile(rf'"{re.escape(form.name_field)}"\s*:\s*("(?:[^"\\]|\\.)*")')
        self._arguments = re.compile(rf'"{re.escape(form.arguments_field)}"\s*:\s*(?=\S)')
        self.text = ""
        self.rest = ""
        self.name: str | None = None
        self._end = ValueEnd(0)
        self._arguments_end: ValueEnd | None = None
        self._given = 0

    def push(self, text: str) -> tuple[list[CallDelta], bool]:
        """(what is decided, whether the object is whole); `rest` is then what follows it, else empty."""
        self.text += text
        deltas: list[CallDelta] = []
        end = self._end.find(self.text)
        if self.name is None and (found := self._name.search(self.text)) is not None:
            self.name = (
                json.loads(found[1]).encode("utf-8", "replace").decode()
            )  # half a surrogate pair is no text
            deltas.append(CallDelta(self._index, self.name, ""))
        if (
            self.name is not None
            and self._arguments_end is None
            and (found := self._arguments.search(self.text))
        ):
            self._given = found.end()
            self._arguments_end = ValueEnd(self._given)
        if self._arguments_end is not None:
            stop = self._arguments_end.find(self.text)
            upto = len(self.text) if stop is None else stop
            if upto > self._given:
                deltas.append(CallDelta(self._index, None, self.text[self._given : upto]))
                self._given = upto
        if end is None:
            return deltas, False
        self.rest = self.text[end:]
        return deltas, True


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
