"""Text that a model is still writing, and functions that match pieces of it.

The functions are generators: each yields None while more text may change its result, and returns the result.
*raises:* EndOfTextError: the text is final and too short for a result.
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
    "skip_pieces",
    "wait",
]

BLANKS = " \t\r\n"
_MAX_BLANKS = 64  # between two pieces: text is not held back for more blanks
Piece = str | re.Pattern[str]


class EndOfTextError(Exception):
    """The text has ended, and a result needs more."""


class GrowingText:
    """text: the text so far. is_final: no more will come. num_plain: characters known to hold no call."""

    def __init__(self) -> None:
        self.text = ""
        self.is_final = False
        self.num_plain = 0


def wait(text: GrowingText) -> Generator[None, None, None]:
    """Waits for more text."""
    if text.is_final:
        raise EndOfTextError
    yield None


def match(text: str, at: int, pieces: Sequence[Piece]) -> tuple[int, str] | Literal[False] | None:
    """(the end of these pieces, which begin at a place, with blanks between them; the first text that a pattern
    matched).

    False if they do not match, None while more text may decide it.
    """
    name = ""
    for piece in pieces:
        blanks = at
        while at < len(text) and text[at].isspace():
            at += 1
        if at - blanks > _MAX_BLANKS:
            return False
        if isinstance(piece, str):
            if not text.startswith(piece, at):
                return None if piece.startswith(text[at : at + len(piece)]) else False
            at += len(piece)
            continue
        matched = piece.match(text, at)
        if matched is None:
            return None if at == len(text) else False
        if matched.end() == len(text):
            return None
        name, at = name or matched[0], matched.end()
    return at, name


def expect(
    text: GrowingText, at: int, *alternatives: Sequence[Piece]
) -> Generator[None, None, tuple[int, str] | None]:
    """`match` of the first alternative that fits; None where none fits."""
    while True:
        results = [result for pieces in alternatives if (result := match(text.text, at, pieces)) is not False]
        if not results:
            return None
        first = results[0] or (text.is_final and next(filter(None, results), None))
        if first:
            return first
        yield from wait(text)


def skip_pieces(
    text: GrowingText, at: int, pieces: Sequence[Piece]
) -> Generator[None, None, tuple[int, int]]:
    """(the place behind those of these pieces that are present, their number); a piece that the text's end cuts is
    skipped, too."""
    count = 0
    for piece in pieces:
        while (result := match(text.text, at, [piece])) is None and not text.is_final:
            yield None
        if result is None and text.text[at:].strip():
            return len(text.text), count
        if result:
            at, count = result[0], count + 1
    return at, count


def next_char(text: GrowingText, at: int, skipped: str = BLANKS) -> Generator[None, None, int]:
    """The place of the next character that is not among `skipped`; skips at most `_MAX_BLANKS` characters."""
    limit = at + _MAX_BLANKS
    while True:
        while at < min(len(text.text), limit) and text.text[at] in skipped:
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
    """Finds the end of the JSON value that begins at `start`; looks at each character once."""

    def __init__(self, start: int) -> None:
        self._position = start
        self._depth = 0
        self._in_string = False

    def find(self, text: str) -> int | None:
        """The position behind the value in a growing text, None while it has not ended; a bare value ends at , or
        }."""
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
