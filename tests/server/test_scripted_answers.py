"""Awkward calls written token by token by a model of each family come out of the stream as those calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import families
from support.agents_script import THOUGHT, Answer, Turn, session, tokens
from support.chat_stream import Streamed, streamed
from support.running_server import running
from support.scripted_serve import Script, runner_of

from quire.engine import runner
from quire.sampling import grammar
from quire.server.settings import ServerSettings

# qwq opens thoughts in the prompt; mistral tells tools with the last question alone, so its
# prompts do not go on; the templates of the other two refuse an answer of several calls.
LEFT_OUT = ("qwq", "mistral", "llama3", "python_tag")
FAMILIES = [name for name in families.FAMILIES if name not in LEFT_OUT]
FOLDER = Path("/home/ann/project")
TURNS: list[Turn] = [turn for number in range(3) for turn in session(number, FOLDER)]
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": properties}},
    }
    for name, properties in {
        "shell": {"command": {"type": "string"}, "description": {"type": "string"}},
        "write": {"path": {"type": "string"}, "content": {"type": "string"}},
        "read": {"path": {"type": "string"}},
        "edit": {"path": {"type": "string"}, "old": {"type": "string"}, "new": {"type": "string"}},
        "nothing": {},
        "echo": {"value": {"type": "object"}, "times": {"type": ["integer", "null"]}},
    }.items()
]


def call(tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"name": tool, "arguments": arguments}


@pytest.fixture(
    scope="module",
    params=[name if name == "qwen3" else pytest.param(name, marks=pytest.mark.ci) for name in FAMILIES],
)
def scripted(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """(family, URL) of a server whose model says what the turns' answers are."""
    words = families.tokenizer(request.param)
    answers = {turn.marker: [tokens(words, answer, call) for answer in turn.answers] for turn in TURNS}
    script = Script({"answers": answers, "tool": "write", "else": []}, words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "Runner", runner_of(script))
        patch.setattr(grammar, "try_grammar", lambda text: None)
        with families.llm(request.param) as llm, running(llm, ServerSettings()) as (url, _):
            yield request.param, url


def ask(url: str, messages: list[dict[str, Any]]) -> Streamed:
    body = {
        "messages": messages,
        "tools": TOOLS,
        "max_tokens": 400,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return streamed(answer.text)


def told_again(answer: Answer, got: Streamed) -> list[dict[str, Any]]:
    """The messages with which a client goes on behind an answer."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": got.content,
        "reasoning_content": got.reasoning,
    }
    if not got.calls:
        return [message]
    message["tool_calls"] = [
        {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
        for one in got.calls
    ]
    results = [
        {"role": "tool", "tool_call_id": one.id, "content": asked.said or "done"}
        for one, asked in zip(got.calls, answer.calls, strict=True)
    ]
    return [message, *results]


@pytest.mark.parametrize("turn", TURNS, ids=lambda turn: turn.kind)
def test_a_turn(scripted: tuple[str, str], turn: Turn) -> None:
    """Its answers are what the model said, and each prompt is found in the cache up to what it adds."""
    family, url = scripted
    messages: list[dict[str, Any]] = [{"role": "user", "content": turn.asked}]
    num_known = 0
    for answer in turn.answers:
        got = ask(url, messages)
        assert got.finish_reason == answer.finish_reason
        assert got.num_cached >= num_known
        num_known = got.num_prompt - 1
        if answer.is_cut:
            break
        assert got.content.strip() == answer.text.strip()
        assert got.reasoning.strip() == (THOUGHT if family == "qwen3" else "")
        assert [(one.name, json.loads(one.arguments)) for one in got.calls] == [
            (one.tool, one.arguments) for one in answer.calls
        ]
        messages += told_again(answer, got)
