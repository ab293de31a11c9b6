"""Calls in JSON without the template's markers; they are read where they name an offered tool.

    {"name": "get_weather", "arguments": {"city": "Oslo"}}      Llama 3, and any model that forgets its markers
    {"name": ..., "parameters": {...}}; {"name": ...}           Llama 3, several
    ```json {"name": ...} ```                                   Qwen2.5-Coder, Hermes
    <tools> {"name": ...} </tools>                              Qwen2.5-Coder
    <|python_tag|>{"name": ...}                                 Llama 3
    [TOOL_CALLS] [{"name": ...}]                                Mistral before v11

Each format may hold one object, several, or a list. A call is held back until it is complete, a list until it ends;
any other text is content.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.server.outputs.call_events import CallFormat, EventGenerator, buffer_events
from quire.server.outputs.growing_text import BLANKS, GrowingText, expect, next_char, skip_pieces
from quire.server.outputs.object_calls import ObjectFields, has_more, read_object

__all__ = ["BARE_MARKERS", "bare_calls"]

_MARKERS = (
    ("<tool_call>", "</tool_call>"),
    ("<tools>", "</tools>"),
    ("<function_call>", "</function_call>"),
    ("<|python_tag|>", ""),
    ("[TOOL_CALLS]", ""),
    ("```json", "```"),
    ("```", "```"),
    ("", ""),
)
BARE_MARKERS = tuple(begin for begin, _ in _MARKERS if begin[:1] in ("<", "["))


def bare_calls(names: Iterable[str]) -> list[CallFormat]:
    """All of these formats. names: of the offered tools."""
    fields = ObjectFields(names=frozenset(names))
    return [_BareCalls(begin, end, fields) for begin, end in _MARKERS] if fields.names else []


class _BareCalls:
    def __init__(self, begin: str, end: str, fields: ObjectFields) -> None:
        self._begin, self._end, self._fields = begin, end, fields
        self.starts = (begin,) if begin else ("{", "[")
        self.at_line_start = begin not in BARE_MARKERS

    def read(self, text: GrowingText) -> EventGenerator:
        start = (yield from expect(text, 0, [self._begin])) if self._begin else (0, "")
        if start is None:
            return None
        at = yield from next_char(text, start[0])
        if text.text[at] == "[":
            end = yield from buffer_events(self._list(text, at + 1))
        else:
            end = yield from self._objects(text, at, BLANKS + ";,")
        if end is not None and self._end:
            end, _ = yield from skip_pieces(text, end, [self._end])
        return end

    def _objects(self, text: GrowingText, at: int, between: str) -> EventGenerator:
        """Reads all objects; behind the last of them the text may end with separators."""
        end = None
        while (
            text.text[at] == "{"
            and (behind := (yield from buffer_events(self._object(text, at)))) is not None
        ):
            end = behind
            if not (yield from has_more(text, end, between)):
                return len(text.text)
            at = yield from next_char(text, end, between)
        return end

    def _object(self, text: GrowingText, at: int) -> EventGenerator:
        result = yield from read_object(text, at, self._fields)
        return None if result is None else result[0]

    def _list(self, text: GrowingText, at: int) -> EventGenerator:
        end = yield from self._objects(text, (yield from next_char(text, at)), BLANKS + ",")
        if end is None:
            return None
        closed = yield from next_char(text, end, BLANKS + ",")
        if text.text[closed] == "]":
            return closed + 1
        text.num_plain = closed
        return None
