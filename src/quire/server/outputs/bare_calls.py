"""Calls that models write in JSON without their template's markers: read where they name a tool that is offered.

    {"name": "get_weather", "arguments": {"city": "Oslo"}}      Llama 3, and any model that forgets its markers
    {"name": ..., "parameters": {...}}; {"name": ...}           Llama 3, several
    ```json {"name": ...} ```                                   Qwen2.5-Coder, Hermes
    <tools> {"name": ...} </tools>                              Qwen2.5-Coder
    <|python_tag|>{"name": ...}                                 Llama 3
    [TOOL_CALLS] [{"name": ...}]                                Mistral before v11

Each of them may hold one object, several, or a list. A call is held back until it is whole, a list until it ends;
what is no such call is text.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.server.outputs.call_events import CallFormat, Run, held
from quire.server.outputs.growing_text import BLANKS, GrowingText, expect, next_char, past
from quire.server.outputs.object_calls import ObjectFields, has_more, read_object

__all__ = ["BARE_MARKERS", "bare_calls"]

_AROUND = (
    ("<tool_call>", "</tool_call>"),
    ("<tools>", "</tools>"),
    ("<function_call>", "</function_call>"),
    ("<|python_tag|>", ""),
    ("[TOOL_CALLS]", ""),
    ("```json", "```"),
    ("```", "```"),
    ("", ""),
)
BARE_MARKERS = tuple(begin for begin, _ in _AROUND if begin[:1] in ("<", "["))


def bare_calls(names: Iterable[str]) -> list[CallFormat]:
    """All of these forms. names: of the tools that are offered."""
    fields = ObjectFields(names=frozenset(names))
    return [_BareCalls(begin, end, fields) for begin, end in _AROUND] if fields.names else []


class _BareCalls:
    def __init__(self, begin: str, end: str, fields: ObjectFields) -> None:
        self._begin, self._end, self._fields = begin, end, fields
        self.starts = (begin,) if begin else ("{", "[")
        self.at_line_start = begin not in BARE_MARKERS

    def read(self, text: GrowingText) -> Run:
        begun = (yield from expect(text, 0, [self._begin])) if self._begin else (0, "")
        if begun is None:
            return None
        at = yield from next_char(text, begun[0])
        if text.text[at] == "[":
            end = yield from held(self._list(text, at + 1))
        else:
            end = yield from self._objects(text, at, BLANKS + ";,")
        if end is not None and self._end:
            end, _ = yield from past(text, end, [self._end])
        return end

    def _objects(self, text: GrowingText, at: int, between: str) -> Run:
        """As many as there are; behind the last of them the text may end with separators."""
        end = None
        while text.text[at] == "{" and (found := (yield from held(self._object(text, at)))) is not None:
            end = found
            if not (yield from has_more(text, end, between)):
                return len(text.text)
            at = yield from next_char(text, end, between)
        return end

    def _object(self, text: GrowingText, at: int) -> Run:
        found = yield from read_object(text, at, self._fields)
        return None if found is None else found[0]

    def _list(self, text: GrowingText, at: int) -> Run:
        end = yield from self._objects(text, (yield from next_char(text, at)), BLANKS + ",")
        if end is None:
            return None
        closed = yield from next_char(text, end, BLANKS + ",")
        if text.text[closed] == "]":
            return closed + 1
        text.num_said = closed
        return None
