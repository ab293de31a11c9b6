"""Calls that are no JSON object: the name stands bare, and behind it the arguments, as JSON text or one by one.

    [TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}                       Mistral from v11 on; some with [CALL_ID]
    <｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather ...           DeepSeek V3, within a list of its own markers
    <tool_call> <function=get_weather> <parameter=city> Oslo ...         Qwen3-Coder

Such a form is learnt too: from one call, two calls, and one call of two arguments as the template writes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["CALL_ID", "Call", "ParameterFormat", "TaggedCallFormat", "learn_named_form"]

CALL_ID = (
    "abcdefghi"  # of the call that is rendered to learn from: nine letters, as Mistral's templates demand
)

Call = tuple[str, dict[str, Any], str]  # name, arguments, id
_PIECE = r"<[^<>\s]*>|\[[^\[\]\s]*\]|."


@dataclass(frozen=True)
class ParameterFormat:
    """What stands around an argument that is written by itself: begin KEY value VALUE end.

    json_value: in place of `value` before one that is no string, where the form tells the two apart.
    """

    begin: str
    value: str
    end: str
    json_value: str = ""


@dataclass(frozen=True)
class TaggedCallFormat:
    """What stands around calls: list_begin, of each call begin NAME arguments ARGUMENTS end, list_end.

    arguments: one text, or two with the call's id between them. parameter: None where the arguments are JSON text.
    call_id: a regular expression of the ids that a forced call may have. whole_id: what a template that writes calls
    by their ids alone has to be given as one, "" for any.
    """

    list_begin: str
    begin: str
    arguments: tuple[str, ...]
    end: str
    list_end: str
    parameter: ParameterFormat | None = None
    call_id: str = "[a-zA-Z0-9]{9}"
    whole_id: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """All texts with markers in them."""
        one = self.parameter
        around = () if one is None else (one.begin, one.value, one.json_value, one.end)
        return (self.list_begin, self.begin, *self.arguments, self.end, self.list_end, *around)

    @property
    def example(self) -> str:
        """A call of NAME."""
        one = self.parameter
        arguments = "ARGUMENTS" if one is None else f"{one.begin}PARAMETER{one.value}VALUE{one.end}"
        parts = (
            self.list_begin,
            self.begin,
            "NAME",
            CALL_ID.join(self.arguments),
            arguments,
            self.end,
            self.list_end,
        )
        return "".join(parts)


def learn_named_form(
    written: Callable[[Sequence[Call]], str | None], added: Iterable[str]
) -> TaggedCallFormat | None:
    """The form of calls, None where it is none of these. written: the text of calls, None where the template has none.

    added: the tokenizer's added tokens, which no marker is to be cut within.
    """
    pieces = re.compile(
        "|".join([*map(re.escape, sorted(added, key=len, reverse=True)), _PIECE]), re.DOTALL
    ).findall
    first: Call = ("qfn_name", {"qfn_key": "qfn_value"}, CALL_ID)
    second: Call = ("qfn_other", {"qfn_more": "qfn_last"}, "ihgfedcba")
    one = written([first])
    if one is None or one.count(first[0]) != 1:
        return None
    head, _, behind = one.partition(first[0])
    parameter, found = None, _json_in(behind, first[1])
    if found is None:
        found, parameter = _parameters_in(written, behind, pieces)
    if found is None:
        return None
    between, tail = found
    list_begin = list_end = ""
    two = written([first, second])
    if two is not None and two.count(second[0]) == 1:
        _, _, after = two.partition(first[0])
        after, _, _ = after.partition(second[0])
        inner = _json_in(after, first[1]) if parameter is None else _value_in(after, parameter)
        if inner is None:
            return None
        own_begin = _common(pieces(head), pieces(inner[1]), last=True)
        list_begin, head = head[: len(head) - len(own_begin)], own_begin
        gap = inner[1][: len(inner[1]) - len(own_begin)]
        own_end = _common(pieces(tail), pieces(gap), last=False)
        tail, list_end = own_end, tail[len(own_end) :]
    arguments = tuple(between.split(CALL_ID))
    around = "".join((list_begin, head, tail, list_end))
    if not head.strip() or len(arguments) > 2 or CALL_ID in around or "{" in around + between:
        return None
    if parameter is not None and not (
        tail.strip() and all(map(str.strip, (parameter.begin, parameter.value, parameter.end)))
    ):
        return None
    return TaggedCallFormat(list_begin, head, arguments, tail, list_end, parameter)


def _json_in(text: str, arguments: dict[str, Any]) -> tuple[str, str] | None:
    """What stands before and behind these arguments as JSON text."""
    at = text.find("{")
    while at >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(text, at)
        except ValueError:
            value, end = None, 0
        if value == arguments:
            return text[:at], text[end:]
        at = text.find("{", at + 1)
    return None


def _parameters_in(
    written: Callable[[Sequence[Call]], str | None], behind: str, pieces: Callable[[str], list[str]]
) -> tuple[tuple[str, str] | None, ParameterFormat | None]:
    """What stands before and behind arguments that are written one by one, and their form."""
    both = written([("qfn_name", {"qfn_key": "qfn_value", "qfn_more": "qfn_last"}, CALL_ID)])
    key = re.fullmatch(r"(?s:(.*?))qfn_key(?s:(.*?))qfn_value(?s:(.*))", behind)
    twice = re.search(r"(?s:qfn_value(.*?)qfn_more(.*?)qfn_last)", both or "")
    if key is None or twice is None or key[2] != twice[2]:
        return None, None
    begin = _common(pieces(key[1]), pieces(twice[1]), last=True)
    end = twice[1][: len(twice[1]) - len(begin)]
    if not key[3].startswith(end):
        return None, None
    form = ParameterFormat(begin, key[2], end)
    return (key[1][: len(key[1]) - len(begin)], key[3][len(end) :]), form


def _value_in(text: str, form: ParameterFormat) -> tuple[str, str] | None:
    before, found, behind = text.partition(f"{form.begin}qfn_key{form.value}qfn_value{form.end}")
    return (before, behind) if found else None


def _common(one: list[str], other: list[str], *, last: bool) -> str:
    """The pieces that both have at their end, or at their beginning."""
    step = -1 if last else 1
    same: list[str] = []
    for mine, others in zip(one[::step], other[::step], strict=False):
        if mine != others:
            break
        same.append(mine)
    return "".join(same[::step])
