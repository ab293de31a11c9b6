"""Calls as Python writes them; they are read where they name an offered tool.

    [get_weather(city="Oslo"), get_time()]                            Llama 3.2
    <|python_start|>[get_weather(city="Oslo")]<|python_end|>          Llama 4
    <|tool_call_start|>[get_weather(city="Oslo")]<|tool_call_end|>    LFM2
    <function_calls>get_weather(city="Oslo")</function_calls>         OLMo 3, one call a line
    ```tool_code get_weather(city="Oslo") ```                         Gemma 3

Arguments are keywords; values are literals of Python or of JSON. Calls are held back until all of them are complete;
any other text is content.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Generator, Iterable
from typing import Any

from quire.server.outputs.call_events import (
    ArgumentText,
    CallEnd,
    CallFormat,
    CallStart,
    EventGenerator,
    buffer_events,
)
from quire.server.outputs.growing_text import BLANKS, GrowingText, expect, next_char, skip_pieces, wait
from quire.server.outputs.object_calls import has_more

__all__ = ["PYTHONIC_MARKERS", "pythonic_calls"]

_MARKERS = (
    ("<|python_start|>", "<|python_end|>"),
    ("<|tool_call_start|>", "<|tool_call_end|>"),
    ("<function_calls>", "</function_calls>"),
    ("```tool_code", "```"),
    ("", ""),
)
PYTHONIC_MARKERS = tuple(begin for begin, _ in _MARKERS if begin.startswith("<"))
_NAME = re.compile(r"[^\W\d][\w.-]*")
_JSON_NAMES = {"true": True, "false": False, "null": None}


def pythonic_calls(names: Collection[str]) -> list[CallFormat]:
    """All of these formats. names: of the offered tools."""
    return [_PythonicCalls(begin, end, frozenset(names)) for begin, end in _MARKERS] if names else []


class _PythonicCalls:
    def __init__(self, begin: str, end: str, names: frozenset[str]) -> None:
        self._begin, self._end, self._names = begin, end, names
        self.starts = (begin or "[",)
        self.at_line_start = begin not in PYTHONIC_MARKERS

    def read(self, text: GrowingText) -> EventGenerator:
        start = (yield from expect(text, 0, [self._begin])) if self._begin else (0, "")
        if start is None:
            return None
        at = yield from next_char(text, start[0])
        is_list = text.text[at] == "["
        end = yield from buffer_events(self._calls(text, at + is_list, is_list=is_list))
        if end is not None and self._end:
            end, _ = yield from skip_pieces(text, end, [self._end])
        return end

    def _calls(self, text: GrowingText, at: int, *, is_list: bool) -> EventGenerator:
        end = None
        while True:
            if end is not None and not is_list and not (yield from has_more(text, end, BLANKS + ",;")):
                return len(text.text)
            at = yield from next_char(text, at, BLANKS + ",;")
            if is_list and text.text[at] == "]":
                return None if end is None else at + 1
            behind = yield from self._call(text, at)
            if behind is None:
                return None if is_list else end
            end = at = behind

    def _call(self, text: GrowingText, at: int) -> EventGenerator:
        head = yield from expect(text, at, [_NAME, "("])
        if head is None or head[1] not in self._names:
            return None
        end = yield from _end_of_call(text, head[0])
        try:
            arguments = _arguments(text.text[head[0] : end - 1])
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return None
        yield CallStart(head[1])
        yield ArgumentText(arguments)
        yield CallEnd(end)
        return end


def _end_of_call(text: GrowingText, at: int) -> Generator[None, None, int]:
    """The place behind the bracket that closes a call whose arguments begin at `at`."""
    depth, quote = 1, ""
    while True:
        while at < len(text.text):
            char = text.text[at]
            at += 1
            if quote:
                at += char == "\\"
                quote = "" if char == quote else quote
            elif char in "\"'":
                quote = char
            else:
                depth += (char in "([{") - (char in ")]}")
                if not depth:
                    return at
        yield from wait(text)


def _arguments(written: str) -> str:
    """The arguments of a call as a JSON object.

    *raises:* SyntaxError, ValueError, TypeError: not keywords with literal values that JSON has.
    """
    call = ast.parse(f"f({written}\n)", mode="eval").body
    if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
        raise ValueError("expected keywords alone")
    arguments: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise ValueError(f"expected each argument's name once, got {keyword.arg}")
        arguments[keyword.arg] = ast.literal_eval(_JsonNames().visit(keyword.value))
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False, default=_refuse)
    # A pair of JSON's escapes is one character; half of a pair is none.
    return written.encode("utf-16", "surrogatepass").decode("utf-16")


class _JsonNames(ast.NodeTransformer):
    """Replaces JSON's true, false and null by Python's values."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


def _refuse(value: Iterable[Any]) -> Any:
    raise ValueError(f"expected a value that JSON has, got {type(value).__name__}")
