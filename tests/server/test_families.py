"""Requests as third-party programs send them, on tokenizers whose markers are single tokens.

The bodies in recorded_requests.json are what instructor, pydantic-ai, LangChain and the Vercel AI SDK sent to a server
that wrote them down, with lengths in their schemas, so that a random model's texts end. And what the coding agents
opencode and qwen-code sent, with shorter texts and fewer tools; they force nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import families
from support.chat_stream import streamed
from support.running_server import running

from quire import LLM
from quire.sampling import grammar
from quire.server.settings import ServerSettings

RECORDED = json.loads(Path(__file__).with_name("recorded_requests.json").read_text())
AGENTS = [name for name in RECORDED if name.startswith(("opencode", "qwen-code"))]
ADDRESS = {"street", "city"}
ONE_CALL = ("llama3", "python_tag")  # families whose templates refuse an answer with more


@pytest.fixture(scope="module", params=list(families.FAMILIES))
def family(request: pytest.FixtureRequest) -> Iterator[tuple[str, str, LLM]]:
    """(name, URL, model) of a server. Grammars are not tried in processes of their own: that has its own tests."""
    with pytest.MonkeyPatch.context() as patch, families.llm(request.param) as llm:
        patch.setattr(grammar, "try_grammar", lambda text: None)
        with running(llm, ServerSettings()) as (url, _):
            yield request.param, url, llm


def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def check_call(body: dict[str, Any], call: dict[str, Any]) -> None:
    """The call is of a tool that the body names, with its arguments."""
    (tool,) = [
        one["function"] for one in body["tools"] if one["function"]["name"] == call["function"]["name"]
    ]
    arguments = json.loads(call["function"]["arguments"])
    assert set(arguments) == set(tool["parameters"].get("required", []))
    if "address" in arguments:
        assert set(arguments["address"]) == ADDRESS
        assert isinstance(arguments["age"], int)


def with_bias(name: str, body: dict[str, Any]) -> dict[str, Any]:
    """The body as sent; of a model that begins within thoughts, with the end of them likely."""
    fields = {"max_tokens": 300, "temperature": 0, **body, "model": None}
    if name == "qwq":
        fields["logit_bias"] = {families.tokenizer(name).convert_tokens_to_ids("</think>"): 100}
    return fields


@pytest.mark.parametrize("name", [name for name in RECORDED if name not in AGENTS])
def test_recorded_request(family: tuple[str, str, LLM], name: str) -> None:
    which, url, _ = family
    body = with_bias(which, RECORDED[name])
    if body.get("stream"):
        check_stream(url, body)
        return
    choice = ask(url, body)
    if "response_format" in body:
        assert set(json.loads(choice["message"]["content"])) == {"name", "age", "address"}
        return
    assert choice["finish_reason"] == "tool_calls"
    assert not choice["message"]["content"]
    (call,) = choice["message"]["tool_calls"]
    check_call(body, call)


def check_stream(url: str, body: dict[str, Any]) -> None:
    name, arguments, reason = "", "", None
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as events:
        for line in events.iter_lines():
            if not line.startswith("data: {"):
                continue
            choice = json.loads(line.removeprefix("data: "))["choices"][0]
            assert not choice["delta"].get("content")
            reason = choice["finish_reason"] or reason
            for call in choice["delta"].get("tool_calls") or []:
                name += call["function"].get("name") or ""
                arguments += call["function"].get("arguments") or ""
    assert reason == "tool_calls"
    check_call(body, {"function": {"name": name, "arguments": arguments}})


@pytest.mark.parametrize("name", AGENTS)
def test_recorded_agent(family: tuple[str, str, LLM], name: str) -> None:
    """Whatever a random model says to an agent comes as a stream of the right form."""
    which, url, _ = family
    body = {**RECORDED[name], "model": None, "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    if which in ONE_CALL and name.endswith("several calls"):
        assert answer.status_code == 400
        assert "only supports single tool-calls" in answer.json()["error"]["message"]
        return
    assert answer.status_code == 200, answer.text
    told = streamed(answer.text)
    assert told.finish_reason in ("length", "stop", "tool_calls")
    assert told.num_prompt > 0
