"""Calls and thoughts through `/v1/messages`: scripted answers of each family, whole and streamed, and one conversation
that changes its endpoint at every request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from support import families
from support.agents_script import THOUGHT, Answer, Turn, session, tokens
from support.running_server import running
from support.scripted_serve import Script, runner_of

from quire.engine import runner
from quire.sampling import grammar
from quire.server.settings import ServerSettings

LEFT_OUT = ("qwq", "mistral", "llama3", "python_tag")  # see test_scripted_answers
FAMILIES = [name for name in families.FAMILIES if name not in LEFT_OUT]
FOLDER = Path("/home/ann/project")
TURNS: list[Turn] = [turn for number in range(3) for turn in session(number, FOLDER)]
PROPERTIES = {
    "shell": {"command": {"type": "string"}, "description": {"type": "string"}},
    "write": {"path": {"type": "string"}, "content": {"type": "string"}},
    "read": {"path": {"type": "string"}},
    "edit": {"path": {"type": "string"}, "old": {"type": "string"}, "new": {"type": "string"}},
    "nothing": {},
    "echo": {"value": {"type": "object"}, "times": {"type": ["integer", "null"]}},
}
TOOLS = [
    {"name": name, "input_schema": {"type": "object", "properties": properties}}
    for name, properties in PROPERTIES.items()
]
CHAT_TOOLS = [
    {"type": "function", "function": {"name": tool["name"], "parameters": tool["input_schema"]}}
    for tool in TOOLS
]


def call(tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"name": tool, "arguments": arguments}


@pytest.fixture(
    scope="module",
    params=[name if name == "qwen3" else pytest.param(name, marks=pytest.mark.ci) for name in FAMILIES],
)
def scripted(request: pytest.FixtureRequest) -> Iterator[tuple[str, str, Script]]:
    """(family, URL, script) of a server whose model says what the turns' answers are."""
    words = families.tokenizer(request.param)
    answers = {turn.marker: [tokens(words, answer, call) for answer in turn.answers] for turn in TURNS}
    script = Script({"answers": answers, "tool": "write", "else": []}, words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "Runner", runner_of(script))
        patch.setattr(grammar, "try_grammar", lambda text: None)
        with families.llm(request.param) as llm, running(llm, ServerSettings()) as (url, _):
            yield request.param, url, script


@pytest.fixture
def client(scripted: tuple[str, str, Script]) -> Iterator[anthropic.Anthropic]:
    scripted[2]._num_asked.clear()
    with anthropic.Anthropic(base_url=scripted[1], api_key="none", max_retries=0) as client:
        yield client


def results(calls: list[Any], answer: Answer) -> list[dict[str, Any]]:
    return [
        {"type": "tool_result", "tool_use_id": one.id, "content": asked.said or "done"}
        for one, asked in zip(calls, answer.calls, strict=True)
    ]


def check(family: str, message: Any, answer: Answer) -> list[Any]:
    """The message is what the model said; returns its calls."""
    said = [block.text for block in message.content if block.type == "text"]
    thoughts = [block.thinking for block in message.content if block.type == "thinking"]
    calls = [block for block in message.content if block.type == "tool_use"]
    assert "".join(said).strip() == answer.text.strip()
    assert thoughts == ([THOUGHT] if family == "qwen3" else [])
    assert [(one.name, one.input) for one in calls] == [(one.tool, one.arguments) for one in answer.calls]
    assert message.stop_reason == ("tool_use" if answer.calls else "end_turn")
    return calls


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("turn", TURNS, ids=lambda turn: turn.kind)
def test_a_turn(
    scripted: tuple[str, str, Script], client: anthropic.Anthropic, turn: Turn, is_stream: bool
) -> None:
    """Its answers are what the model said, and each prompt is found in the cache up to what it adds."""
    messages: list[Any] = [{"role": "user", "content": turn.asked}]
    body: dict[str, Any] = {"model": scripted_model(scripted), "tools": TOOLS, "max_tokens": 400}
    num_known = 0
    for answer in turn.answers:
        if is_stream:
            with client.messages.stream(**body, messages=messages) as stream:
                got = stream.get_final_message()
        else:
            got = client.messages.create(**body, messages=messages)
        usage = got.usage
        assert usage.cache_read_input_tokens >= num_known
        num_known = usage.input_tokens + usage.cache_read_input_tokens - 1
        if answer.is_cut:
            assert got.stop_reason == "max_tokens"
            assert usage.output_tokens == 400
            if not is_stream:
                assert all(block.type != "tool_use" for block in got.content)
            break
        calls = check(scripted[0], got, answer)
        messages.append({"role": "assistant", "content": got.content})
        if calls:
            messages.append({"role": "user", "content": results(calls, answer)})


def scripted_model(scripted: tuple[str, str, Script]) -> str:
    return httpx.get(f"{scripted[1]}/v1/models").json()["data"][0]["id"]


def test_one_conversation_through_both_endpoints(
    scripted: tuple[str, str, Script], client: anthropic.Anthropic
) -> None:
    """The history that one endpoint wrote goes on through the other: the same prompt, found in the cache."""
    url, model = scripted[1], scripted_model(scripted)
    turn = next(turn for turn in TURNS if turn.kind == "write")
    blocks: list[Any] = [{"role": "user", "content": turn.asked}]
    chat: list[Any] = [{"role": "user", "content": turn.asked}]
    for number, answer in enumerate(turn.answers):
        counted = client.messages.count_tokens(model=model, messages=blocks, tools=TOOLS)
        asked = {"messages": chat, "tools": CHAT_TOOLS}
        assert counted.input_tokens == httpx.post(f"{url}/tokenize", json=asked).json()["count"]
        content: list[Any] = []
        if number % 2:
            got = client.messages.create(model=model, messages=blocks, tools=TOOLS, max_tokens=400)
            check(scripted[0], got, answer)
            content = [block.model_dump() for block in got.content]
        else:
            body = {**asked, "max_tokens": 400}
            told = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
            message = told["choices"][0]["message"]
            if message.get("reasoning_content"):
                thought = message["reasoning_content"]
                content.append({"type": "thinking", "thinking": thought, "signature": ""})
            if message["content"]:
                content.append({"type": "text", "text": message["content"]})
            for one in message.get("tool_calls") or ():
                name, arguments = one["function"]["name"], json.loads(one["function"]["arguments"])
                content.append({"type": "tool_use", "id": one["id"], "name": name, "input": arguments})
        assert [block["input"] for block in content if block["type"] == "tool_use"] == [
            one.arguments for one in answer.calls
        ]
        said = "".join(block["text"] for block in content if block["type"] == "text")
        thoughts = [block["thinking"] for block in content if block["type"] == "thinking"]
        uses = [block for block in content if block["type"] == "tool_use"]
        blocks.append({"role": "assistant", "content": content})
        chat.append(
            {
                "role": "assistant",
                "content": said,
                "reasoning_content": "".join(thoughts) or None,
                "tool_calls": [
                    {
                        "id": use["id"],
                        "type": "function",
                        "function": {"name": use["name"], "arguments": json.dumps(use["input"])},
                    }
                    for use in uses
                ]
                or None,
            }
        )
        if uses:
            told_back = [{"type": "tool_result", "tool_use_id": use["id"], "content": "done"} for use in uses]
            blocks.append({"role": "user", "content": told_back})
            chat += [{"role": "tool", "tool_call_id": use["id"], "content": "done"} for use in uses]
    assert len(turn.answers) == 3


def test_the_tool_runner(scripted: tuple[str, str, Script], client: anthropic.Anthropic) -> None:
    turn = next(turn for turn in TURNS if turn.kind == "nested")
    asked: list[Any] = []

    @anthropic.beta_tool
    def echo(value: dict, times: int | None = None) -> str:
        """Gives the value back; write is not meant."""
        asked.append((value, times))
        return json.dumps(value)

    for is_stream in (False, True):
        scripted[2]._num_asked.clear()
        asked.clear()
        made = client.beta.messages.tool_runner(
            model=scripted_model(scripted),
            max_tokens=400,
            tools=[echo],
            messages=[{"role": "user", "content": turn.asked}],
            stream=is_stream,
        )
        last = [stream.get_final_message() for stream in made][-1] if is_stream else made.until_done()
        arguments = turn.answers[0].calls[0].arguments
        assert asked == [(arguments["value"], arguments["times"])]
        assert "".join(block.text for block in last.content if block.type == "text").strip() == (
            turn.answers[1].text
        )


def test_one_call_only(scripted: tuple[str, str, Script], client: anthropic.Anthropic) -> None:
    turn = next(turn for turn in TURNS if turn.kind == "several")
    body: dict[str, Any] = {
        "model": scripted_model(scripted),
        "tools": TOOLS,
        "max_tokens": 400,
        "messages": [{"role": "user", "content": turn.asked}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    }
    whole = client.messages.create(**body)
    scripted[2]._num_asked.clear()
    with client.messages.stream(**body) as stream:
        streamed = stream.get_final_message()
    for got in (whole, streamed):
        calls = [block for block in got.content if block.type == "tool_use"]
        assert [block.input for block in calls] == [turn.answers[0].calls[0].arguments]
        assert got.stop_reason == "tool_use"


def test_omitted_thoughts_come_back_in_their_signature(
    scripted: tuple[str, str, Script], client: anthropic.Anthropic
) -> None:
    if scripted[0] != "qwen3":
        pytest.skip("this family's scripted answers have no thoughts")
    turn = next(turn for turn in TURNS if turn.kind == "shell")
    body: dict[str, Any] = {"model": scripted_model(scripted), "tools": TOOLS, "max_tokens": 4000}
    messages = [{"role": "user", "content": turn.asked}]
    shown: dict[str, list[Any]] = {}
    for display in ("summarized", "omitted"):
        for is_stream in (False, True):
            scripted[2]._num_asked.clear()
            thinking = {"type": "enabled", "budget_tokens": 1024, "display": display}
            asked = {**body, "messages": messages, "thinking": thinking}
            if is_stream:
                with client.messages.stream(**asked) as stream:
                    got = stream.get_final_message()
            else:
                got = client.messages.create(**asked)
            block = got.content[0]
            assert (block.type, block.thinking) == ("thinking", THOUGHT if display == "summarized" else "")
            shown.setdefault(display, []).append(block.signature)
            history = [*messages, {"role": "assistant", "content": got.content}, messages[0]]
            shown.setdefault("counts", []).append(
                client.messages.count_tokens(model=body["model"], messages=history).input_tokens
            )
    assert len(set(shown["counts"])) == 1
    for display in ("summarized", "omitted"):
        first, second = shown[display]
        assert first == second
        assert THOUGHT not in first
    assert shown["summarized"] != shown["omitted"]
