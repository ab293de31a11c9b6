"""Splits growing text into content and calls.

Several formats are read at once. Where one may begin, the text is held back and the formats are tried in their order;
if none of them has a call there, the text is content.

Invariants
    T1  the output does not depend on the pieces in which the text comes.
    T2  a text without a call comes out unchanged. A call comes out complete, or it ends with `CutCall`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TypeGuard

from quire.server.outputs.call_events import (
    ArgumentText,
    CallDelta,
    CallEnd,
    CallFormat,
    CallStart,
    CutCall,
    EventGenerator,
)
from quire.server.outputs.growing_text import EndOfTextError, GrowingText

__all__ = ["CallParser"]

_LINE_BLANKS = " \t\r"


class CallParser:
    """formats: the first that fits at a place is read. Without formats, all text is content."""

    def __init__(self, formats: Sequence[CallFormat]) -> None:
        self._formats = [*formats]
        first = {start[0] for call_format in formats for start in call_format.starts}
        self._first = re.compile(f"[{re.escape(''.join(sorted(first)))}]") if first else None
        self._text = GrowingText()  # undecided text; while a format is read, from its first character on
        self._reading: tuple[CallFormat, EventGenerator] | None = None
        self._candidates: Iterator[CallFormat] = iter(())  # formats still to be tried there
        self._is_undecided = False  # a candidate was, when the text ended
        self._is_open = False  # a call is, which begins at:
        self._begin = 0
        self._blanks = ""  # held back: blanks around calls are no content
        self._has_content = False  # since the last call
        self._is_line_start = True
        self.num_calls = 0
        self.is_cut = False

    def push(self, text: str, *, final: bool = False) -> Iterator[str | CallDelta | CutCall]:
        """Takes more text and yields the decided parts. final: no more text will come."""
        if self._first is None:
            yield from (text,) if text else ()
            return
        self._text.text += text
        self._text.is_final = final
        yield from _joined(self._decide(final=final))

    def _decide(self, *, final: bool) -> Iterator[str | CallDelta | CutCall]:
        while True:
            if self._reading is None:
                at, candidates = self._find(0)
                yield self._release(self._text.text[:at])
                self._text.text = self._text.text[at:]
                if not candidates:
                    if final and not self.num_calls:
                        yield self._blanks
                    return
                self._candidates, self._is_undecided, self._text.num_plain = iter(candidates), False, 0
                self._read_next_format()
                continue
            call_format, run = self._reading
            try:
                event = next(run)
            except StopIteration as stop:
                yield from self._end(stop.value)
                continue
            except EndOfTextError:
                self._is_undecided = True
                self._formats.remove(call_format)  # an unfinished call would hold back all following text
                self.is_cut |= self._is_open or self._begin > 0
                yield from self._end(len(self._text.text) if self._is_open else self._begin or None)
                continue
            if event is None:
                return
            yield from self._deltas(event)

    def _read_next_format(self) -> bool:
        """Starts the next candidate; whether there is one."""
        call_format = next(self._candidates, None)
        if call_format is None:
            return False
        self._reading = call_format, call_format.read(self._text)
        return True

    def _find(self, at: int) -> tuple[int, list[CallFormat]]:
        """(the first place where a format may begin, or the text's end; the formats that may)."""
        assert self._first is not None
        text = self._text.text
        for match in self._first.finditer(text, at):
            at = match.start()
            is_line_start = self._is_at_line_start(at)
            candidates = [
                call_format
                for call_format in self._formats
                if (is_line_start or not call_format.at_line_start)
                and any(
                    text.startswith(start, at) or start.startswith(text[at : at + len(start)])
                    for start in call_format.starts
                )
            ]
            if candidates:
                return at, candidates
        return len(text), []

    def _is_at_line_start(self, at: int) -> bool:
        line = self._text.text.rfind("\n", 0, at) + 1
        return (line > 0 or self._is_line_start) and not self._text.text[line:at].strip(_LINE_BLANKS)

    def _deltas(self, event: CallStart | ArgumentText | CallEnd) -> Iterator[CallDelta]:
        if isinstance(event, CallStart):
            self._is_open, self._has_content, self._blanks = True, False, ""
            self.num_calls += 1
            yield CallDelta(self.num_calls - 1, event.text, "")
        elif isinstance(event, ArgumentText):
            yield CallDelta(self.num_calls - 1, None, event.text)
        else:
            self._is_open, self._begin = False, event.end

    def _end(self, end: int | None) -> Iterator[str | CutCall]:
        """Ends a reader: with its calls; else the next candidate is tried; else the first character is content."""
        if end is None and self._read_next_format():
            return
        self._reading = None
        if (
            end is None
        ):  # the candidates of the next place are found again once the text before it is released
            self.is_cut |= self._is_undecided
            at, _ = self._find(max(1, self._text.num_plain))
            yield self._release(self._text.text[:at])
            self._text.text = self._text.text[at:]
            return
        if self._is_open:
            self.is_cut, self._is_open = True, False
            yield CutCall(self.num_calls - 1, self._text.text[self._begin : end])
        self._text.text, self._begin, self._is_line_start = self._text.text[end:], 0, True

    def _release(self, text: str) -> str:
        """The part of this text, and of blanks held back before it, that is content by now."""
        if not text:
            return ""
        self._is_line_start = not text[text.rfind("\n") + 1 :].strip(_LINE_BLANKS) and (
            "\n" in text or self._is_line_start
        )
        self._blanks += text
        if not self._has_content and not self._blanks.strip():
            return ""
        content, self._blanks, self._has_content = self._blanks, "", True
        return content


def _joined(parts: Iterator[str | CallDelta | CutCall]) -> Iterator[str | CallDelta | CutCall]:
    """The parts without empty ones, adjacent parts of one kind joined."""
    last: str | CallDelta | CutCall = ""
    for part in parts:
        if isinstance(last, str) and isinstance(part, str):
            last = last + part
        elif _is_continuation(last) and _is_continuation(part):
            last = CallDelta(last.index, None, last.arguments + part.arguments)
        elif part != "":
            if last != "":
                yield last
            last = part
    if last != "":
        yield last


def _is_continuation(part: str | CallDelta | CutCall) -> TypeGuard[CallDelta]:
    """Whether the part continues a call's arguments."""
    return isinstance(part, CallDelta) and part.name is None
