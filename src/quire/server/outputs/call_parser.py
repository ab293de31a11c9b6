"""Text as it grows, told apart into what is said and what is called.

Several forms are read at once. Where one may begin the text is held back, and the forms are tried in their order;
where none of them has a call there, the text is said.

Invariants
    T1  what is given out does not depend on the pieces that the text comes in.
    T2  a text without a call comes out as it is. A call is told as whole, or it ends with `CutCall`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TypeGuard

from quire.server.outputs.call_events import CallDelta, CallFormat, CutCall, More, Name, Run, Whole
from quire.server.outputs.growing_text import EndOfTextError, GrowingText

__all__ = ["CallParser"]

_LINE_BLANKS = " \t\r"


class CallParser:
    """forms: those that are read, the first that fits at a place. Without any, everything is said."""

    def __init__(self, forms: Sequence[CallFormat]) -> None:
        self._forms = [*forms]
        first = {start[0] for form in forms for start in form.starts}
        self._first = re.compile(f"[{re.escape(''.join(sorted(first)))}]") if first else None
        self._text = GrowingText()  # not yet decided; where a form is read, from its first character on
        self._reading: tuple[CallFormat, Run] | None = None
        self._ways: Iterator[CallFormat] = iter(())  # still to be tried there
        self._is_undecided = False  # one of them was when the text ended
        self._is_open = False  # a call is, which begins at:
        self._begin = 0
        self._blanks = ""  # held back: they are not said where a call is all that follows or precedes them
        self._is_said = False  # anything since the last call is
        self._is_line_start = True
        self.num_calls = 0
        self.is_cut = False

    def push(self, text: str, *, final: bool = False) -> Iterator[str | CallDelta | CutCall]:
        """Takes more text and gives out what it decides. final: no more will come."""
        if self._first is None:
            yield from (text,) if text else ()
            return
        self._text.text += text
        self._text.is_final = final
        yield from _joined(self._decide(final=final))

    def _decide(self, *, final: bool) -> Iterator[str | CallDelta | CutCall]:
        while True:
            if self._reading is None:
                at, ways = self._find(0)
                yield self._say(self._text.text[:at])
                self._text.text = self._text.text[at:]
                if not ways:
                    if final and not self.num_calls:
                        yield self._blanks
                    return
                self._ways, self._is_undecided, self._text.num_said = iter(ways), False, 0
                self._read_next_form()
                continue
            form, run = self._reading
            try:
                event = next(run)
            except StopIteration as stop:
                yield from self._end(stop.value)
                continue
            except EndOfTextError:
                self._is_undecided = True
                self._forms.remove(form)  # what has begun and does not end holds all that follows
                self.is_cut |= self._is_open or self._begin > 0
                yield from self._end(len(self._text.text) if self._is_open else self._begin or None)
                continue
            if event is None:
                return
            yield from self._tell(event)

    def _read_next_form(self) -> bool:
        """Begins with the next of those that may have a call here; whether there is one."""
        form = next(self._ways, None)
        if form is None:
            return False
        self._reading = form, form.read(self._text)
        return True

    def _find(self, at: int) -> tuple[int, list[CallFormat]]:
        """(the first place where a form may begin, or the text's end; the forms that may)."""
        assert self._first is not None
        text = self._text.text
        for found in self._first.finditer(text, at):
            at = found.start()
            is_line_start = self._is_at_line_start(at)
            ways = [
                form
                for form in self._forms
                if (is_line_start or not form.at_line_start)
                and any(
                    text.startswith(start, at) or start.startswith(text[at : at + len(start)])
                    for start in form.starts
                )
            ]
            if ways:
                return at, ways
        return len(text), []

    def _is_at_line_start(self, at: int) -> bool:
        line = self._text.text.rfind("\n", 0, at) + 1
        return (line > 0 or self._is_line_start) and not self._text.text[line:at].strip(_LINE_BLANKS)

    def _tell(self, event: Name | More | Whole) -> Iterator[CallDelta]:
        if isinstance(event, Name):
            self._is_open, self._is_said, self._blanks = True, False, ""
            self.num_calls += 1
            yield CallDelta(self.num_calls - 1, event.text, "")
        elif isinstance(event, More):
            yield CallDelta(self.num_calls - 1, None, event.text)
        else:
            self._is_open, self._begin = False, event.end

    def _end(self, end: int | None) -> Iterator[str | CutCall]:
        """A run has ended: with calls, or the next form is tried at its place, or its first character is said."""
        if end is None and self._read_next_form():
            return
        self._reading = None
        if end is None:  # the forms of the next place are looked up again once the text before it is said
            self.is_cut |= self._is_undecided
            at, _ = self._find(max(1, self._text.num_said))
            yield self._say(self._text.text[:at])
            self._text.text = self._text.text[at:]
            return
        if self._is_open:
            self.is_cut, self._is_open = True, False
            yield CutCall(self.num_calls - 1, self._text.text[self._begin : end])
        self._text.text, self._begin, self._is_line_start = self._text.text[end:], 0, True

    def _say(self, text: str) -> str:
        """What of this text, and of blanks held back before it, is said by now."""
        if not text:
            return ""
        self._is_line_start = not text[text.rfind("\n") + 1 :].strip(_LINE_BLANKS) and (
            "\n" in text or self._is_line_start
        )
        self._blanks += text
        if not self._is_said and not self._blanks.strip():
            return ""
        said, self._blanks, self._is_said = self._blanks, "", True
        return said


def _joined(parts: Iterator[str | CallDelta | CutCall]) -> Iterator[str | CallDelta | CutCall]:
    """The parts, neighbours of one kind as one, without empty ones."""
    last: str | CallDelta | CutCall = ""
    for part in parts:
        if isinstance(last, str) and isinstance(part, str):
            last = last + part
        elif _goes_on(last) and _goes_on(part):
            last = CallDelta(last.index, None, last.arguments + part.arguments)
        elif part != "":
            if last != "":
                yield last
            last = part
    if last != "":
        yield last


def _goes_on(part: str | CallDelta | CutCall) -> TypeGuard[CallDelta]:
    """Whether it is more of a call's arguments."""
    return isinstance(part, CallDelta) and part.name is None
