"""Calls written as Python are read where they name an offered tool; any other text stays content."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.read_calls import read

from quire.server.outputs.bare_calls import bare_calls
from quire.server.outputs.call_parser import CallParser
from quire.server.outputs.pythonic_calls import pythonic_calls

NAMES = ("f", "g")
CALLS = {
    '[f(city="Oslo"), g()]': ("", [("f", '{"city": "Oslo"}'), ("g", "{}")]),
    "See:\n[f(a=1, b=[1, {'x': true}], c='it\\'s )')]\nbye": (
        "See:\n\nbye",
        [("f", '{"a": 1, "b": [1, {"x": true}], "c": "it\'s )"}')],
    ),
    "<|python_start|>[f(a=-1.5)]<|python_end|>": ("", [("f", '{"a": -1.5}')]),
    "<|tool_call_start|>[f(a=None), g(b=null)]<|tool_call_end|>bye": (
        "bye",
        [("f", '{"a": null}'), ("g", '{"b": null}')],
    ),
    "<function_calls>\nf(a='ø')\ng()\n</function_calls>": ("", [("f", '{"a": "ø"}'), ("g", "{}")]),
    "```tool_code\nf(a=1)\n```": ("", [("f", '{"a": 1}')]),
    "[f(\n  a=1,\n)]": ("", [("f", '{"a": 1}')]),
    '[f(a="\\ud83d\\ude00")]': ("", [("f", '{"a": "😀"}')]),
}
CONTENT = (
    "[f(1)]",
    "[f(*x)]",
    "[f(**x)]",
    "[f(a=x)]",
    "[f(a=open('/etc/passwd'))]",
    "[f(a={1, 2})]",
    "[f(a=1e999)]",
    "[f(a={{'b': 1}})]",
    "[f(a={(1, 2): 3})]",
    "[f(a='\\ud83d')]",
    "[f(a=1, a=2)]",
    "[h(a=1)]",
    "[f(a=1), h()]",
    "[1, 2] is a list",
    "[f(a=1",
    "[f(a='1)]",
    "f(a=1)",
    "so [f(a=1)]",
    "[f(a=" + 300 * "[" + 300 * "]" + ")]",
    "```tool_code\nprint(f(a=1))\n```",
    "<function_calls>none",
)


def parser() -> CallParser:
    return CallParser([*bare_calls(NAMES), *pythonic_calls(NAMES)])


@pytest.mark.parametrize("text", CALLS)
def test_calls_are_read(text: str) -> None:
    said, calls = CALLS[text]
    assert read(parser(), [text]) == (said, calls, [])
    assert read(parser(), [*text, ""]) == (said, calls, [])


@pytest.mark.parametrize("text", CONTENT)
def test_other_text_is_content(text: str) -> None:
    assert read(parser(), [text]) == (text, [], [])
    assert read(parser(), [*text, ""]) == (text, [], [])


def test_without_tools_nothing_is_held_back() -> None:
    assert pythonic_calls(()) == []


@given(data=st.data())
def test_pieces_do_not_matter(data: st.DataObject) -> None:
    parts = [
        "[",
        "]",
        "f(",
        "g(",
        ")",
        "a=",
        '"x"',
        "1",
        ",",
        " ",
        "\n",
        "```tool_code",
        "```",
        "<function_calls>",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=14)))
    assert read(parser(), [*text, ""]) == read(parser(), [text])
