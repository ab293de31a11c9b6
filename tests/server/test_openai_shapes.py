"""Rare requests of OpenAI's API, and the exact shape of the answers."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from quire import LLM
from quire.server.api_errors import ApiError
from quire.server.messages import render
from quire.server.outputs.tool_call_format import template_describes_tools
from quire.server.schemas.chat_bodies import ChatMessage
from quire.server.settings import ServerLimits

PROMPT = "def parse_args(argv):"
MESSAGES = [{"role": "user", "content": "Write a loop."}]
SHORT = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
CHAT = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0}


def post(url: str, path: str, body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v1/{path}", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = httpx.post(f"{url}/v1/{path}", json={**body, "stream": True}, timeout=30)
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def text_of(url: str, body: dict[str, Any]) -> str:
    return post(url, "completions", body)["choices"][0]["text"]


def test_a_prompt_of_token_ids_is_echoed_as_its_text(url: str, llm: LLM) -> None:
    tokens = llm.tokenizer(PROMPT)["input_ids"]
    assert text_of(url, {**SHORT, "prompt": tokens, "echo": True}) == PROMPT + text_of(url, SHORT)


def test_an_echo_is_streamed_before_each_answer(url: str) -> None:
    body = {**SHORT, "prompt": [PROMPT, "class A:"], "n": 2, "echo": True, "logprobs": 1}
    whole = post(url, "completions", body)["choices"]
    told = events(url, "completions", body)
    for choice in whole:
        mine = [one["choices"][0] for one in told if one["choices"][0]["index"] == choice["index"]]
        assert "".join(one["text"] for one in mine) == choice["text"]
        offsets = [at for one in mine if one["logprobs"] for at in one["logprobs"]["text_offset"]]
        assert offsets == choice["logprobs"]["text_offset"]


@pytest.mark.parametrize(("path", "body"), [("completions", SHORT), ("chat/completions", CHAT)])
def test_usage_is_null_until_the_last_event(url: str, path: str, body: dict[str, Any]) -> None:
    told = events(url, path, {**body, "stream_options": {"include_usage": True}})
    assert [one["usage"] for one in told[:-1]] == [None] * (len(told) - 1)
    assert told[-1]["choices"] == []
    assert told[-1]["usage"]["completion_tokens"] == 4
    assert all("usage" not in one for one in events(url, path, body))


@pytest.mark.parametrize("more", [{}, {"return_token_ids": True}])
@pytest.mark.parametrize("with_last", [False, True])
@pytest.mark.parametrize(("path", "body"), [("completions", SHORT), ("chat/completions", CHAT)])
def test_every_event_has_the_usage_so_far(
    url: str, path: str, body: dict[str, Any], with_last: bool, more: dict[str, Any]
) -> None:
    options = {"continuous_usage_stats": True, "include_usage": with_last}
    told = events(url, path, {**body, **more, "stream_options": options})
    usage = post(url, path, body)["usage"]
    counts = [one["usage"]["completion_tokens"] for one in told]
    assert counts == sorted(counts)
    assert counts[-1] == usage["completion_tokens"]
    assert {one["usage"]["prompt_tokens"] for one in told} == {usage["prompt_tokens"]}
    assert all(
        one["usage"]["total_tokens"] == usage["prompt_tokens"] + count
        for one, count in zip(told, counts, strict=True)
    )
    assert (told[-1]["choices"] == []) == with_last
    assert len(set(counts)) > 1


@pytest.mark.parametrize(("path", "body"), [("completions", SHORT), ("chat/completions", CHAT)])
def test_stream_options_of_an_answer_that_is_not_streamed_are_refused(
    url: str, path: str, body: dict[str, Any]
) -> None:
    answer = httpx.post(f"{url}/v1/{path}", json={**body, "stream_options": {"include_usage": True}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream_options")


@pytest.mark.parametrize("path", ["health", "ready"])
def test_a_probe_may_ask_without_a_body(url: str, path: str) -> None:
    answer = httpx.head(f"{url}/{path}")
    assert (answer.status_code, answer.content) == (200, b"")


def test_a_message_without_calls_has_no_calls(url: str) -> None:
    message = post(url, "chat/completions", CHAT)["choices"][0]["message"]
    assert set(message) == {"role", "content", "refusal"}


def test_a_developer_is_the_system_where_the_template_knows_none(llm: LLM) -> None:
    def rendered(role: str) -> str:
        messages = [ChatMessage(role=role, content="Be brief."), ChatMessage(role="user", content="Hi.")]
        return render(llm.tokenizer, messages, ServerLimits())

    assert "developer" not in llm.tokenizer.chat_template
    assert rendered("developer") == rendered("system")


@pytest.mark.parametrize("several", [False, True])
def test_a_role_of_the_template_is_taken(several: bool) -> None:
    text = "{% if message['role'] == 'robot' %}"

    class Tokenizer:
        chat_template = {"default": "", "with robots": text + '"'} if several else text

        def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
            return "|".join(message["role"] for message in messages)

    assert render(Tokenizer(), [ChatMessage(role="robot", content="a")], ServerLimits()) == "robot"
    assert not template_describes_tools(Tokenizer())
    with pytest.raises(ApiError, match="got 'robo'"):
        render(Tokenizer(), [ChatMessage(role="robo", content="a")], ServerLimits())


@pytest.mark.parametrize(
    "more",
    [
        {"suffix": ""},
        {"seed": -1},
        {"best_of": 1, "user": "u", "metadata": {"a": "b"}, "store": False},
        {"stop": [], "logit_bias": {}, "n": None, "temperature": None, "stream": None},
    ],
)
def test_legal_and_odd_completions(url: str, more: dict[str, Any]) -> None:
    assert post(url, "completions", {**SHORT, **more})["usage"]["completion_tokens"] == 4


def test_a_chat_goes_on_to_its_end_where_nothing_says_how_long_it_may_be(
    url: str, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    request_validator = llm.engine._validator
    defaults = dict(request_validator._sampling_defaults)
    assert post(url, "chat/completions", {"messages": MESSAGES, "ignore_eos": True})["usage"][
        "completion_tokens"
    ] == defaults.pop("max_new_tokens")
    monkeypatch.setattr(request_validator, "_sampling_defaults", defaults)
    prompt = llm.tokenizer(" x" * 1500)["input_ids"]  # so that the end is near
    answer = post(url, "completions", {"prompt": prompt, "max_tokens": None, "ignore_eos": True})
    assert answer["usage"]["total_tokens"] == llm.max_model_len
    assert answer["usage"]["completion_tokens"] > 256


def test_a_negative_seed_is_a_seed(url: str) -> None:
    body = {**SHORT, "temperature": 1, "max_tokens": 12}
    assert text_of(url, {**body, "seed": -5}) == text_of(url, {**body, "seed": -5})
    assert text_of(url, {**body, "seed": -5}) != text_of(url, {**body, "seed": -6})


@pytest.mark.parametrize(
    "more",
    [
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
            ]
        },
        {"messages": [{"role": "developer", "content": "a"}, *MESSAGES]},
        {
            "max_completion_tokens": 4,
            "max_tokens": None,
            "parallel_tool_calls": False,
            "service_tier": "auto",
        },
        {"tools": [], "tool_choice": "auto"},
        {"response_format": {"type": "text"}, "logprobs": None, "top_logprobs": None},
        {"reasoning_effort": "none", "modalities": ["text"], "prediction": None},
    ],
)
def test_legal_and_odd_chats(url: str, more: dict[str, Any]) -> None:
    assert post(url, "chat/completions", {**CHAT, **more})["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        ("completions", {"prompt": [1, "a"]}, "prompt.1", "got 'a'"),
        ("completions", {"prompt": [[3, -1]]}, "prompt.0.1", "got -1"),
        ("completions", {"prompt": [[3], [99999], [4], [99998]], "cache_salt": "s"}, None, "got 9999"),
        ("completions", {"prompt": "a", "temperature": -1}, "temperature", "got -1"),
        ("completions", {"prompt": "a", "stop": ""}, "stop", "non-empty"),
        ("completions", {"prompt": "a", "logit_bias": {"99999": 1}}, "logit_bias", "got 99999"),
        ("completions", {}, "prompt", "required"),
        ("completions", {"prompt": []}, "prompt", "at least 1 item"),
        ("completions", {"prompt": 5}, "prompt", "got 5"),
        ("completions", {"prompt": "a", "json_schema": {"type": "text"}}, "json_schema", "type"),
        ("chat/completions", {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema":
         {"type": "text"}}}}, "response_format.json_schema.schema", "in `response_format.json_schema.schema`"),
        ("chat/completions", {**CHAT, "tools": [{"type": "function", "function": {"name": "f", "parameters":
         {"type": "text"}}}], "tool_choice": "required"}, "tools", "text"),
        ("chat/completions", {**CHAT, "tool_choice": "some"}, "tool_choice", "got 'some'"),
        ("chat/completions", {"messages": [{"content": "a"}]}, "messages.0.role", "required"),
        ("chat/completions", {"messages": [*MESSAGES, {"role": "robot", "content": "a"}]},
         f"messages.{len(MESSAGES)}.role", "user, assistant, tool, function, got 'robot'"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"text": 5}]}]},
         "messages.0.content.0.type", "required"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_by_the_fields_own_name(
    url: str, path: str, body: dict[str, Any], param: str, said: str
) -> None:
    answer = httpx.post(f"{url}/v1/{path}", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert said in error["message"]


@pytest.mark.parametrize(
    ("content", "content_type", "said"),
    [
        (b"{nope", "application/json", "expected a body of JSON"),
        (b"", "application/json", "got none"),
        (b"[1]", "application/json", "expected a JSON object"),
        (b'{"prompt": "a"}', "application/x-www-form-urlencoded", "Content-Type: application/json"),
    ],
)
def test_what_is_no_body_is_said(url: str, content: bytes, content_type: str, said: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", content=content, headers={"Content-Type": content_type})
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] is None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": [5] * 5000}),
        ("chat/completions", {"messages": [{"role": "user", "content": "loop " * 5000}]}),
    ],
)
def test_a_prompt_that_is_too_long_has_openais_code(url: str, path: str, body: dict[str, Any]) -> None:
    answer = httpx.post(f"{url}/v1/{path}", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith(
        "This model's maximum context length is 2048 tokens. However, you requested 50"
    )


TOOLS_BY_NAME = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("first", "second")
]


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_the_model_is_told_of_the_allowed_tools_alone(url: str) -> None:
    def asked(**more: Any) -> dict[str, Any]:
        answer = httpx.post(f"{url}/v1/chat/completions", json={**CHAT, "max_tokens": 60, **more}, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    auto = asked(tools=TOOLS_BY_NAME, tool_choice=allowed("auto", "second"))
    assert auto["usage"]["prompt_tokens"] == asked(tools=TOOLS_BY_NAME[1:])["usage"]["prompt_tokens"]
    forced = asked(tools=TOOLS_BY_NAME, tool_choice=allowed("required", "second"))
    (call,) = forced["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "second"


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        (allowed("auto", "third"), "tool_choice"),
        (allowed("auto"), "tool_choice.allowed_tools.tools"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        ({"type": "custom", "custom": {"name": "first"}}, "tool_choice.type"),
        ("sometimes", "tool_choice"),
        (7, "tool_choice"),
    ],
)
def test_a_wrong_choice_is_refused_by_name(url: str, choice: Any, param: str) -> None:
    body = {**CHAT, "tools": TOOLS_BY_NAME, "tool_choice": choice}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
