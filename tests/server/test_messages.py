"""The `anthropic` package, unchanged, against `/v1/messages`: it reads right answers, events, errors and usage."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import pytest

from quire import LLM
from quire.server.api_errors import ApiError
from quire.server.api_keys import ApiTenant, KeyRing, digest_of_key
from quire.server.service import Service
from quire.server.settings import ServerLimits, ServerSettings

ASK: dict[str, Any] = {
    "model": "embedded",
    "max_tokens": 12,
    "extra_body": {"temperature": 0},  # a field that this version of the package no longer names
    "messages": [{"role": "user", "content": "def parse_args(argv):"}],
}
RAW = {"max_tokens": 12, "temperature": 0, "messages": ASK["messages"]}


@pytest.fixture(scope="module")
def client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)


def post(url: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v1/messages", json=body, timeout=30)
    assert answer.status_code == status, answer.text
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    return answer.json()


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream; each has its type as its name."""
    found = []
    for part in text.split("\n\n"):
        if not part:
            continue
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def num_input(usage: Any) -> int:
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


def test_a_message_is_the_chats(client: anthropic.Anthropic, url: str) -> None:
    answer = client.messages.create(**ASK, system="Short.")
    chat = {**RAW, "messages": [{"role": "system", "content": "Short."}, *RAW["messages"]]}
    expected = httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=30).json()
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "embedded")
    assert [block.text for block in answer.content] == [expected["choices"][0]["message"]["content"]]
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    assert answer.usage.output_tokens == 12
    assert num_input(answer.usage) == expected["usage"]["prompt_tokens"]
    assert answer._request_id
    assert answer.id.endswith(answer._request_id)


def test_a_stream_is_the_whole_answer(client: anthropic.Anthropic, url: str) -> None:
    whole = client.messages.create(**ASK)
    with client.messages.stream(**ASK) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
    final = stream.get_final_message()
    assert [block.model_dump(exclude={"parsed_output"}) for block in final.content] == [
        block.model_dump() for block in whole.content
    ]
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 12)
    raw = list(client.messages.create(**ASK, stream=True))
    assert "".join(event.delta.text for event in raw if event.type == "content_block_delta") == (
        whole.content[0].text
    )
    text = httpx.post(f"{url}/v1/messages", json={**RAW, "stream": True}, timeout=30).text
    kinds = [event["type"] for event in events_of(text)]
    inner = [kind for kind in kinds if kind != "content_block_delta"]
    assert inner == [
        "message_start", "ping", "content_block_start", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    begun, *_, ended, _ = events_of(text)
    assert begun["message"]["content"] == []
    assert begun["message"]["stop_reason"] is None
    told, last = begun["message"]["usage"], ended["usage"]
    assert {**told, "output_tokens": 12} == last
    assert ended["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}


def test_stop_sequences(client: anthropic.Anthropic) -> None:
    text = client.messages.create(**ASK).content[0].text
    stop = text[5:8]
    answer = client.messages.create(**ASK, stop_sequences=["never that", stop])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == text[: text.index(stop)]
    with client.messages.stream(**ASK, stop_sequences=[stop]) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", stop)


def test_an_end_of_the_models_own(client: anthropic.Anthropic, llm: LLM) -> None:
    body = {**ASK, "output_config": {"format": {"type": "json_schema", "schema": {"const": 1}}}}
    answer = client.messages.create(**body)
    assert (answer.content[0].text, answer.stop_reason) == ("1", "end_turn")
    long = client.messages.create(
        **{**ASK, "messages": [{"role": "user", "content": "x " * 1980}], "max_tokens": 99999}, timeout=60
    )
    if long.stop_reason != "end_turn":  # the sequence was full before the length
        assert long.stop_reason == "model_context_window_exceeded"
        assert num_input(long.usage) + long.usage.output_tokens == llm.max_model_len


def test_no_answer_computes_the_prompt(client: anthropic.Anthropic) -> None:
    body = {**ASK, "messages": [{"role": "user", "content": "import os\n" * 20}]}
    warm = client.messages.create(**{**body, "max_tokens": 0})
    assert (warm.content, warm.stop_reason, warm.usage.output_tokens) == ([], "max_tokens", 0)
    assert warm.usage.cache_read_input_tokens < 20
    answer = client.messages.create(**body)
    assert answer.usage.cache_read_input_tokens == num_input(warm.usage) - 1
    with client.messages.stream(**{**body, "max_tokens": 0}) as stream:
        assert stream.get_final_message().content == []


def test_tokens_are_counted(client: anthropic.Anthropic) -> None:
    more: dict[str, Any] = {
        "system": [{"type": "text", "text": "Short."}],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
    }
    counted = client.messages.count_tokens(model="embedded", messages=ASK["messages"], **more)
    assert counted.input_tokens == num_input(client.messages.create(**ASK, **more).usage)
    longest = [{"role": "user", "content": "x " * 5000}]
    assert client.messages.count_tokens(model="embedded", messages=longest).input_tokens > 2048


def test_async_clients_at_once(url: str, client: anthropic.Anthropic) -> None:
    text = client.messages.create(**ASK).content[0].text

    async def main() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as many:

            async def one(number: int) -> str:
                if number % 2:
                    return (await many.messages.create(**ASK)).content[0].text
                async with many.messages.stream(**ASK) as stream:
                    return await stream.get_final_text()

            return await asyncio.gather(*[one(number) for number in range(16)])

    assert asyncio.run(main()) == [text] * 16


def test_parsed_output(client: anthropic.Anthropic) -> None:
    import pydantic

    class Age(pydantic.BaseModel):
        age: bool

    body = {**ASK, "max_tokens": 64}
    assert client.messages.parse(**body, output_format=Age).parsed_output.age in (True, False)


def test_consecutive_messages_are_one(client: anthropic.Anthropic) -> None:
    def count(*messages: dict[str, Any]) -> int:
        return client.messages.count_tokens(model="embedded", messages=list(messages)).input_tokens

    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    one = count({"role": "user", "content": parts})
    assert one == count({"role": "user", "content": "a"}, {"role": "user", "content": "b"})
    assert one < count({"role": "user", "content": "a"}, {"role": "system", "content": "b"})


@pytest.mark.parametrize("beta", [{}, {"anthropic-beta": "prompt-caching-2024-07-31,context-1m-2025-08-07"}])
def test_headers_and_keys(serve: Callable[..., Any], beta: dict[str, str]) -> None:
    keys = KeyRing([(digest_of_key("secret"), ApiTenant("ann"))])
    with serve(ServerSettings(keys=keys)) as (url, _):
        for given in ({"api_key": "secret"}, {"auth_token": "secret"}):
            with anthropic.Anthropic(base_url=url, max_retries=0, default_headers=beta, **given) as client:
                assert client.messages.create(**ASK).usage.output_tokens == 12
        with (
            anthropic.Anthropic(base_url=url, max_retries=0, api_key="wrong") as client,
            pytest.raises(anthropic.AuthenticationError) as caught,
        ):
            client.messages.create(**ASK)
        assert caught.value.type == "authentication_error"
        assert "X-Api-Key" in str(caught.value)


@pytest.mark.parametrize(
    ("more", "error", "kind", "words"),
    [
        ({"model": "gpt-17"}, anthropic.NotFoundError, "not_found_error", "model: expected"),
        ({"max_tokens": -1}, anthropic.BadRequestError, "invalid_request_error", "`max_tokens`"),
        ({"messages": []}, anthropic.BadRequestError, "invalid_request_error", "`messages`"),
        (
            {"messages": [{"role": "user", "content": "x " * 9000}]},
            anthropic.BadRequestError,
            "invalid_request_error",
            "prompt is too long: ",
        ),
        ({"extra_body": {"stop": "x"}}, anthropic.BadRequestError, "invalid_request_error", "`stop`"),
        ({"stop_sequences": ["a"] * 99}, anthropic.BadRequestError, "invalid_request_error", "stop_sequences:"),
    ],
)  # fmt: skip
def test_errors_in_their_form(
    client: anthropic.Anthropic, more: dict[str, Any], error: Any, kind: str, words: str
) -> None:
    for stream in (False, True):
        with pytest.raises(error) as caught:
            client.messages.create(**{**ASK, **more, "stream": stream})
        assert caught.value.type == kind
        assert words in caught.value.api_message
        body = caught.value.body
        assert set(body) == {"type", "error", "request_id"}
        assert body["type"] == "error"
        assert body["request_id"] == caught.value.request_id


def test_errors_outside_of_the_route_have_the_form(serve: Callable[..., Any]) -> None:
    limits = ServerLimits(max_body_bytes=2000)
    with serve(ServerSettings(limits=limits)) as (url, _):
        for method, path, content, status, kind in [
            ("POST", "/v1/messages", b" " * 3000, 413, "request_too_large"),
            ("POST", "/v1/messages/batches", b"{}", 404, "not_found_error"),
            ("GET", "/v1/messages", b"", 405, "invalid_request_error"),
            ("POST", "/v1/messages", b"{", 400, "invalid_request_error"),
        ]:
            headers = {"Content-Type": "application/json"}
            answer = httpx.request(method, url + path, content=content, headers=headers)
            assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind), answer.text
            assert answer.json()["type"] == "error"
        answer = httpx.post(f"{url}/v1/messages_of_another", json={})
        assert "type" not in answer.json()


def test_a_full_server_is_overloaded(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for code, status, kind in [
        ("queue_full", 529, "overloaded_error"),
        ("tenant_limit", 429, "rate_limit_error"),
        ("rate_limit", 429, "rate_limit_error"),
    ]:
        error = ApiError(429, "too many requests", code=code, retry_after_s=7)

        def refuse(service: Any, tenant: Any, error: ApiError = error) -> None:
            raise error

        monkeypatch.setattr(Service, "require_place", refuse)
        answer = httpx.post(f"{url}/v1/messages", json=RAW, timeout=30)
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
        assert answer.headers["Retry-After"] == "7"
        assert (
            httpx.post(f"{url}/v1/messages/count_tokens", json={"messages": RAW["messages"]}).status_code
            == 200
        )


def test_an_error_in_a_stream_is_an_event(
    url: str, server: Any, client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.server.anthropic.messages_answer import MessagesWriter

    def fail(self: Any) -> Any:
        raise RuntimeError("secret of the server")

    monkeypatch.setattr(MessagesWriter, "_end", fail)
    with pytest.raises(anthropic.APIStatusError) as caught:
        list(client.messages.create(**ASK, stream=True))
    assert caught.value.type == "api_error"
    assert "secret" not in str(caught.value)
    text = httpx.post(f"{url}/v1/messages", json={**RAW, "stream": True}, timeout=30).text
    assert events_of(text)[-1]["type"] == "error"
