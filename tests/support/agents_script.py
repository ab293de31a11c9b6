"""Scripted answers of a model to a coding agent: sessions of three turns, each with calls of the agent's own tools.

A turn is a user message with its own marker, and the answers to the requests that it causes. The turns cover: one call,
successive calls, several calls in one answer, calls without arguments, with nested and with awkward arguments, and an
answer and a call that are cut by their length.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.agents_tools import NOTHING, said

from quire.server.messages import render
from quire.server.schemas.chat_bodies import ChatMessage, Tool
from quire.server.settings import ServerLimits

__all__ = ["THOUGHT", "TURNS", "Answer", "Call", "Turn", "session", "tokens"]

TURNS = 3
AWKWARD = (
    "é ß — “quotes”, 漢字, 🙂\n"
    '\tprint("one \\"two\\" \\\\n", \'three\')\n'
    '{"json": [1, 2.5, null, {"a": "b"}]} <b>&amp;</b> %s ${HOME} `x`\n'
    "\n"
    "the last line\n"
)
NESTED: dict[str, Any] = {
    "list": [1, -2.5, True, None, "", [], {}],
    "inner": {"key with blanks": {"deep": [[{"é": 'ü\n\t"\\/'}]]}, "empty": {}},
    "text": AWKWARD,
}
MARKERS = 'One "<tool_call>" and "</tool_call>", <think> and </think>, [TOOL_CALLS] and [ARGS].\n'
THOUGHT = "The user wants this, so I do it."
LONG = "and so on, " * 1500  # more than any agent lets an answer have


@dataclass(frozen=True)
class Call:
    """tool: in the script's own words, as `Agent.tools` has them. said: what the result has in it."""

    tool: str
    arguments: dict[str, Any] = field(default_factory=dict)
    said: str = ""


@dataclass(frozen=True)
class Answer:
    """is_cut: there is more of it than an answer may have."""

    text: str = ""
    calls: tuple[Call, ...] = ()
    is_cut: bool = False

    @property
    def finish_reason(self) -> str:
        return "length" if self.is_cut else "tool_calls" if self.calls else "stop"


@dataclass(frozen=True)
class Turn:
    """files: what the session's folder has afterwards, by name."""

    kind: str
    marker: str
    answers: tuple[Answer, ...]
    files: dict[str, str] = field(default_factory=dict)

    @property
    def asked(self) -> str:
        return f"[{self.marker}] Please do this."


def _shell(marker: str, folder: Path) -> tuple[tuple[Answer, ...], dict[str, str]]:
    command = f"echo {marker} > {marker}.txt && cat {marker}.txt"
    call = Call("shell", {"command": command, "description": "Writes and shows a file"}, said=marker)
    return (Answer(calls=(call,)), Answer("The file is there.")), {f"{marker}.txt": f"{marker}\n"}


def _write(marker: str, folder: Path) -> tuple[tuple[Answer, ...], dict[str, str]]:
    path = str(folder / f"{marker}.py")
    answers = (
        Answer("I write it.", (Call("write", {"path": path, "content": AWKWARD}),)),
        Answer(calls=(Call("read", {"path": path}, said="the last line"),)),
        Answer("Written, and read.\n\n- once\n- twice"),
    )
    return answers, {f"{marker}.py": AWKWARD}


def _edit(marker: str, folder: Path) -> tuple[tuple[Answer, ...], dict[str, str]]:
    path = str(folder / f"{marker}.txt")
    answers = (
        Answer(calls=(Call("write", {"path": path, "content": "one\ntwo\nthree\n"}),)),
        Answer(calls=(Call("read", {"path": path}, said="two"),)),
        Answer(calls=(Call("edit", {"path": path, "old": "two\n", "new": "2\n"}),)),
        Answer("Edited."),
    )
    return answers, {f"{marker}.txt": "one\n2\nthree\n"}


def _several(marker: str, folder: Path) -> tuple[tuple[Answer, ...], dict[str, str]]:
    calls = (
        Call("write", {"path": str(folder / f"{marker}-1.txt"), "content": "1\n"}),
        Call("write", {"path": str(folder / f"{marker}-2.txt"), "content": "2\n"}),
        Call("echo", {"value": {"marker": marker}}, said=marker),
    )
    return (Answer("All three at once.", calls), Answer("All done.")), {
        f"{marker}-1.txt": "1\n",
        f"{marker}-2.txt": "2\n",
    }


def _nothing(marker: str, folder: Path) -> tuple[tuple[Answer, ...], dict[str, str]]:
    return (Answer(calls=(Call("nothing", said=NOTHING),)), Answer(f"Nothing, {marker}.")), {}


def _nested(marker: str, folder: Path) -> tuple[tuple[Answer, ...], dict[str, str]]:
    value = {**NESTED, "marker": marker}
    call = Call("echo", {"value": value, "times": None}, said=said(value))
    return (Answer(calls=(call,)), Answer("It came back.")), {}


def _markers(marker: str, folder: Path) -> tuple[tuple[Answer, ...], dict[str, str]]:
    path = str(folder / f"{marker}.md")
    answers = (Answer(calls=(Call("write", {"path": path, "content": MARKERS}),)), Answer("Written."))
    return answers, {f"{marker}.md": MARKERS}


def _cut_text(marker: str, folder: Path) -> tuple[tuple[Answer, ...], dict[str, str]]:
    answers, files = _shell(marker, folder)
    return (answers[0], Answer(LONG, is_cut=True)), files


def _cut_call(marker: str, folder: Path) -> tuple[tuple[Answer, ...], dict[str, str]]:
    path = str(folder / f"{marker}.txt")
    answers, files = _shell(f"{marker}-first", folder)
    cut = Answer(calls=(Call("write", {"path": path, "content": LONG}),), is_cut=True)
    return (answers[0], cut, Answer("It was too long.")), files


KINDS: list[Callable[[str, Path], tuple[tuple[Answer, ...], dict[str, str]]]] = [
    _shell,
    _write,
    _several,
    _nothing,
    _edit,
    _nested,
    _cut_text,
    _markers,
    _cut_call,
]


def session(number: int, folder: Path) -> list[Turn]:
    """The turns of one session, which has its folder for itself. Sessions one after the other have every kind."""
    turns: list[Turn] = []
    for turn in range(TURNS):
        kind = KINDS[(number * TURNS + turn) % len(KINDS)]
        marker = f"session-{number}-turn-{turn + 1}"
        answers, files = kind(marker, folder)
        turns.append(Turn(kind.__name__.strip("_").replace("_", " "), marker, answers, files))
    return turns


def tokens(
    tokenizer: Any, answer: Answer, call: Callable[[str, dict[str, Any]], dict[str, Any]]
) -> list[int]:
    """An answer as the model would write it: what its chat template makes of one, up to the end of the answer. A
    template that writes thoughts gets one.

    call: a call of a tool and arguments in the agent's names.
    """
    called = [call(one.tool, one.arguments) for one in answer.calls]
    told = [
        {
            "id": f"{index:09}",
            "type": "function",
            "function": {"name": one["name"], "arguments": json.dumps(one["arguments"])},
        }
        for index, one in enumerate(called)
    ]
    user = ChatMessage(role="user", content="-")
    message = ChatMessage.model_validate(
        {
            "role": "assistant",
            "content": answer.text,
            "reasoning_content": THOUGHT,
            "tool_calls": told or None,
        }
    )
    names = [{"type": "function", "function": {"name": one["name"]}} for one in called]
    tools = [Tool.model_validate(one) for one in names]
    asked = render(tokenizer, [user], ServerLimits(), tools)
    text = render(tokenizer, [user, message], ServerLimits(), tools, {"add_generation_prompt": False})
    assert text.startswith(asked), (asked, text)
    said = text[len(asked) :].partition(tokenizer.eos_token)[0] + tokenizer.eos_token
    return tokenizer(said, add_special_tokens=False)["input_ids"]
