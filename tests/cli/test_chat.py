"""`quire chat`: input lines, the report of a turn, and the end of an answer and of the chat."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from support import tiny_llm

from quire import LLM
from quire.cli import chat as chat_module
from quire.cli.main import app
from quire.engine.text_stream import TextStream

Say = Callable[..., tuple[str, list[str]]]
TOLD = re.compile(
    r"  \[(\d+) of (\d+) prompt tokens from the cache, 4 tokens, the first after \d+\.\d\d s, then \d+\.\d tokens/s\]"
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with tiny_llm.llm(kv_memory="2MiB") as one:
        yield one


@pytest.fixture
def asked(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The prompts that the model is asked."""
    prompts: list[Any] = []
    stream = llm.stream

    def note(prompt: Any, *rest: Any) -> TextStream:
        prompts.append(prompt)
        return stream(prompt, *rest)

    monkeypatch.setattr(llm, "stream", note)
    return prompts


@pytest.fixture
def say(llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    """Runs a chat on these lines of standard input: what was printed, and the lines on stderr but the first."""
    monkeypatch.setattr(chat_module, "open_llm", lambda config: nullcontext(llm))

    def run(*lines: str, kind: type[io.StringIO] = io.StringIO) -> tuple[str, list[str]]:
        monkeypatch.setattr(sys, "stdin", kind("".join(f"{line}\n" for line in lines)))
        llm.cache.drop([])
        app(["chat", "--max-tokens", "4", "--temperature", "0"], standalone_mode=False)
        out, err = capsys.readouterr()
        return out, err.splitlines()[1:]

    return run


def roles(prompt: list[dict[str, str]]) -> list[str]:
    return [message["role"] for message in prompt]


def test_a_turn_tells_its_speed_and_what_was_cached(say: Say, asked: list[Any]) -> None:
    out, told = say("abcdef", "more")
    assert len(out.splitlines()) >= 2
    (first, second) = (TOLD.fullmatch(line) for line in told)
    assert first is not None, told
    assert second is not None, told
    assert first.group(1) == "0"
    assert 0 < int(second.group(1)) < int(second.group(2))  # the turn before
    assert [roles(prompt) for prompt in asked] == [["user"], ["user", "assistant", "user"]]


def test_system_stays_over_a_reset(say: Say, asked: list[Any]) -> None:
    say("/system be brief", "a", "/reset", "b", "/system  be kind ", "c", "/system", "d")
    assert [roles(prompt) for prompt in asked] == [
        ["system", "user"],
        ["system", "user"],
        ["system", "user", "assistant", "user"],
        ["user", "assistant", "user", "assistant", "user"],
    ]
    assert [prompt[0]["content"] for prompt in asked] == ["be brief", "be brief", "be kind", "b"]


def test_help_names_every_command_and_exit_leaves(say: Say, asked: list[Any]) -> None:
    out, told = say("/help", "/exit", "never said")
    assert (out, asked) == ("", [])
    assert [line.split()[0] for line in told[:4]] == ["/system", "/reset", "/help", "/exit"]


def test_an_unknown_command_is_one_line_and_no_turn(say: Say, asked: list[Any]) -> None:
    _, told = say("/sytsem be brief", "", " /usr/bin is a folder")
    assert told[0] == "quire: expected /system, /reset, /help or /exit, got /sytsem"
    assert len(told) == 2
    assert [prompt[-1]["content"] for prompt in asked] == [" /usr/bin is a folder"]


def test_ctrl_c_ends_the_answer_and_not_the_chat(
    say: Say, asked: list[Any], llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, num_pieces = TextStream.__next__, 0

    def interrupted(stream: TextStream) -> str:
        nonlocal num_pieces
        num_pieces += 1
        if num_pieces in (1, 3):  # before the first piece of one answer, behind the first of another
            raise KeyboardInterrupt
        return own(stream)

    monkeypatch.setattr(TextStream, "__next__", interrupted)
    _, told = say("a", "b", "c")
    assert [roles(prompt) for prompt in asked] == [["user"], ["user"], ["user", "assistant", "user"]]
    assert asked[2][0]["content"] == "b"  # what got no word of an answer was not said
    assert asked[2][1]["content"]
    assert TOLD.fullmatch(told[-1]), told
    assert llm.cache.stats()["held"] == 0


def test_ctrl_c_at_the_prompt_of_a_terminal_says_how_to_leave(
    say: Say, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([KeyboardInterrupt, "a", EOFError])

    def typed(prompt: str = "") -> str:
        answer = next(answers)
        if isinstance(answer, str):
            return answer
        raise answer

    monkeypatch.setattr("builtins.input", typed)
    _, told = say(kind=Terminal)
    assert "quire: /exit or Ctrl-D leaves" in told
    assert len(asked) == 1
