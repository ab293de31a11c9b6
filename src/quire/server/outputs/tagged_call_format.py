"""Call formats that are not JSON objects: a bare name, and behind it the arguments, as JSON text or one at a time.

    [TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}                       Mistral from v11 on; some with [CALL_ID]
    <｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather ...           DeepSeek V3, within a list of its own markers
    <tool_call> <function=get_weather> <parameter=city> Oslo ...         Qwen3-Coder

Such a format is learnt from one call, two calls, and one call of two arguments as the template writes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["CALL_ID", "Call", "ParameterFormat", "TaggedCallFormat", "learn_tagged_format"]

CALL_ID = "abcdefghi"  # of the rendered calls: nine letters, as Mistral's templates demand

Call = tuple[str, dict[str, Any], str]  # name, arguments, id
_PIECE = r"<[^<>\s]*>|\[[^\[\]\s]*\]|."


@dataclass(frozen=True)
class ParameterFormat:
    """The text around one argument: begin KEY value VALUE end.

    json_value: replaces `value` before a value that is not a string, in a format that distinguishes them.
    """

    begin: str
    value: str
    end: str
    json_value: str = ""


@dataclass(frozen=True)
class TaggedCallFormat:
    """The text around calls: list_begin, for each call begin NAME arguments ARGUMENTS end, list_end.

    arguments: one text, or two with the call's id between them. parameter: None if the arguments are JSON text.
    call_id: a regular expression of the ids of forced calls. whole_id: the id that a template gets which writes calls
    by their ids alone; "" for any.
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
        parameter = self.parameter
        around = (
            ()
            if parameter is None
            else (parameter.begin, parameter.value, parameter.json_value, parameter.end)
        )
        return (self.list_begin, self.begin, *self.arguments, self.end, self.list_end, *around)

    @property
    def example(self) -> str:
        """An example call, of NAME."""
        parameter = self.parameter
        arguments = (
            "ARGUMENTS"
            if parameter is None
            else f"{parameter.begin}PARAMETER{parameter.value}VALUE{parameter.end}"
        )
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


def learn_tagged_format(
    written: Callable[[Sequence[Call]], str | None], added: Iterable[str]
) -> TaggedCallFormat | None:
    """The format of a template's calls, None if it is not such a format.

    written: returns the text of calls, None if the template writes none. added: the tokenizer's added tokens, which a
    marker has to contain as a whole.
    """
    pieces = re.compile(
        "|".join([*map(re.escape, sorted(added, key=len, reverse=True)), _PIECE]), re.DOTALL
    ).findall
    first: Call = ("qfn_name", {"qfn_key": "qfn_value"}, CALL_ID)
    second: Call = ("qfn_other", {"qfn_more": "qfn_last"}, "ihgfedcba")
    single = written([first])
    if single is None or single.count(first[0]) != 1:
        return None
    head, _, behind = single.partition(first[0])
    parameter, around = None, _json_in(behind, first[1])
    if around is None:
        around, parameter = _parameters_in(written, behind, pieces)
    if around is None:
        return None
    between, tail = around
    list_begin = list_end = ""
    both = written([first, second])
    if both is not None and both.count(second[0]) == 1:
        _, _, after = both.partition(first[0])
        after, _, _ = after.partition(second[0])
        inner = _json_in(after, first[1]) if parameter is None else _value_in(after, parameter)
        if inner is None:
            return None
        call_begin = _common(pieces(head), pieces(inner[1]), from_end=True)
        list_begin, head = head[: len(head) - len(call_begin)], call_begin
        gap = inner[1][: len(inner[1]) - len(call_begin)]
        call_end = _common(pieces(tail), pieces(gap), from_end=False)
        tail, list_end = call_end, tail[len(call_end) :]
    arguments = tuple(between.split(CALL_ID))
    markers = "".join((list_begin, head, tail, list_end))
    if not head.strip() or len(arguments) > 2 or CALL_ID in markers or "{" in markers + between:
        return None
    if parameter is not None and not (
        tail.strip() and all(map(str.strip, (parameter.begin, parameter.value, parameter.end)))
    ):
        return None
    return TaggedCallFormat(list_begin, head, arguments, tail, list_end, parameter)


def _json_in(text: str, arguments: dict[str, Any]) -> tuple[str, str] | None:
    """The text before and behind these arguments as JSON text."""
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
    """The text before and behind arguments that are written one at a time, and their format."""
    both = written([("qfn_name", {"qfn_key": "qfn_value", "qfn_more": "qfn_last"}, CALL_ID)])
    key = re.fullmatch(r"(?s:(.*?))qfn_key(?s:(.*?))qfn_value(?s:(.*))", behind)
    twice = re.search(r"(?s:qfn_value(.*?)qfn_more(.*?)qfn_last)", both or "")
    if key is None or twice is None or key[2] != twice[2]:
        return None, None
    begin = _common(pieces(key[1]), pieces(twice[1]), from_end=True)
    end = twice[1][: len(twice[1]) - len(begin)]
    if not key[3].startswith(end):
        return None, None
    parameter = ParameterFormat(begin, key[2], end)
    return (key[1][: len(key[1]) - len(begin)], key[3][len(end) :]), parameter


def _value_in(text: str, parameter: ParameterFormat) -> tuple[str, str] | None:
    argument = f"{parameter.begin}qfn_key{parameter.value}qfn_value{parameter.end}"
    before, found, behind = text.partition(argument)
    return (before, behind) if found else None


def _common(first: list[str], second: list[str], *, from_end: bool) -> str:
    """The pieces that both have in common at their beginning, or at their end."""
    step = -1 if from_end else 1
    same: list[str] = []
    for piece, other in zip(first[::step], second[::step], strict=False):
        if piece != other:
            break
        same.append(piece)
    return "".join(same[::step])
