"""Text that a model is still writing, and what may stand at a place of it.

The functions here are generators: each yields None while more text may change its answer, and returns the answer.
*raises:* EndOfTextError: the text is final before it is there.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from typing import Literal

__all__ = [
    "BLANKS",
    "EndOfTextError",
    "GrowingText",
    "Piece",
    "ValueEnd",
    "expect",
    "match",
    "next_char",
    "overlap",
    "past",
    "wait",
]

BLANKS = " \t\r\n"
_MOST_BLANKS = 64  # between two pieces: text is not held back for more of them
Piece = str | re.Pattern[str]


class EndOfTextError(Exception):
    """No more text comes, and the answer needs some."""


class GrowingText:
    """text: what there is. is_final: no more will come. num_said: so many characters hold no call."""

    def __init__(self) -> None:
        self.text = ""
        self.is_final = False
        self.num_said = 0


def wait(text: GrowingText) -> Generator[None, None, None]:
    """Until there is more text."""
    if text.is_final:
        raise EndOfTextError
    yield None


def match(text: str, at: int, pieces: Sequence[Piece]) -> tuple[int, str] | Literal[False] | None:
    """(the end of these pieces, which begin at a place, with blanks between them; the first that a pattern found).

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
                return None if piece.startswith(text[at : at + len(piece)]) else False
            at += len(piece)
            continue
        found = piece.match(text, at)
        if found is None:
            return None if at == len(text) else False
        if found.end() == len(text):
            return None
        name, at = name or found[0], found.end()
    return at, name


def expect(
    text: GrowingText, at: int, *ways: Sequence[Piece]
) -> Generator[None, None, tuple[int, str] | None]:
    """As `match` of the first of several ways that is there; None where none is."""
    while True:
        found = [one for way in ways if (one := match(text.text, at, way)) is not False]
        if not found:
            return None
        begun = found[0] or (text.is_final and next(filter(None, found), None))
        if begun:
            return begun
        yield from wait(text)


def past(text: GrowingText, at: int, pieces: Sequence[Piece]) -> Generator[None, None, tuple[int, int]]:
    """(the place behind those of these pieces that are there, how many); one that the text's end cuts is passed too."""
    count = 0
    for piece in pieces:
        while (found := match(text.text, at, [piece])) is None and not text.is_final:
            yield None
        if found is None and text.text[at:].strip():
            return len(text.text), count
        if found:
            at, count = found[0], count + 1
    return at, count


def next_char(text: GrowingText, at: int, skipped: str = BLANKS) -> Generator[None, None, int]:
    """The place of the next character that is none of these, or of one of them behind too many."""
    most = at + _MOST_BLANKS
    while True:
        while at < min(len(text.text), most) and text.text[at] in skipped:
            at += 1
        if at < len(text.text):
            return at
        yield from wait(text)


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `marker`."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0


class ValueEnd:
    """Finds where the JSON value that begins at `start` ends, each character looked at once."""

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
