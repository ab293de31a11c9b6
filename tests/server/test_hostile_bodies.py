"""Hostile bodies: refused cheaply, with one answer, without delaying other clients."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import Annotated, Any
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from pydantic import BeforeValidator, TypeAdapter, ValidationError
from starlette.testclient import TestClient

from quire import LLM
from quire.server import service
from quire.server.api_errors import ApiError
from quire.server.api_keys import ApiTenant, KeyRing, digest_of_key
from quire.server.http import bodies
from quire.server.http.bodies import LARGE_BODY, BodyRoute, parse_body, weight_of
from quire.server.http.body_limit import BodyLimit
from quire.server.models import DetokenizeRequest, TokenizeRequest
from quire.server.schemas.admin_bodies import AdminPrompt
from quire.server.schemas.chat_bodies import ChatRequest
from quire.server.schemas.completion_bodies import CompletionRequest
from quire.server.schemas.conversation_bodies import NewConversation, Turn
from quire.server.schemas.strict_body import StrictBody
from quire.server.settings import ServerLimits, ServerSettings
from quire.server.threads import Threads

SHORT = {"prompt": "def f(", "max_tokens": 2, "temperature": 0}
MANY: list[Any] = [{}] * 1000
MESSAGE = {"role": "user", "content": "a"}
JSON = {"Content-Type": "application/json"}


checked: list[Any] = []


class Texts(StrictBody):
    texts: Annotated[list[str], BeforeValidator(lambda texts: checked.append(texts) or texts)]


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (CompletionRequest, {"prompt": MANY}),
        (CompletionRequest, {"prompt": ["a"] * 1000 + MANY}),
        (CompletionRequest, {"prompt": "a", "stop": MANY}),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": MANY}),
        (CompletionRequest, {"prompt": "a", "logit_bias": {str(token): "x" for token in range(1000)}}),
        (ChatRequest, {"messages": MANY}),
        (ChatRequest, {"messages": [{"role": "user", "content": MANY}]}),
        (ChatRequest, {"messages": [{"role": "user", "tool_calls": MANY}]}),
        (ChatRequest, {"messages": [MESSAGE], "tools": MANY}),
        (TokenizeRequest, {"messages": MANY}),
        (DetokenizeRequest, {"tokens": MANY}),
        (NewConversation, {"messages": MANY, "tokens": MANY}),
        (Turn, {"messages": MANY, "tokens": MANY}),
        (AdminPrompt, {"prompt": MANY, "messages": MANY}),
    ],
)
def test_a_list_of_wrong_items_is_one_error_not_one_each(model: type[StrictBody], body: Any) -> None:
    with pytest.raises(ValidationError) as refused:
        model.model_validate(body)
    assert refused.value.error_count() <= 8


def test_biases_are_numbers_also_as_text() -> None:
    body = {"prompt": "a", "logit_bias": {"1": 5, "2": -0.5, "3": "7"}}
    assert CompletionRequest.model_validate(body).logit_bias == {"1": 5, "2": -0.5, "3": 7}
    for wrong in (101, "nan", None, []):
        with pytest.raises(ValidationError, match="-100 to 100"):
            CompletionRequest.model_validate({"prompt": "a", "logit_bias": {"1": wrong}})


def test_weight_is_of_values_and_not_of_what_stands_in_texts() -> None:
    assert weight_of(b"[1,2,3]", 100) == 8 + 2
    assert weight_of(b'{"a":{"b":1}}', 100) == 2 * (8 + 16)
    text = json.dumps({"prompt": ':,{["\\' * 1000}).encode()
    assert weight_of(text, 100) < 100
    assert weight_of(b"[" + b"{}," * 1000, 100) > 100
    assert 100 < weight_of(b'",",' * 1000, 100) < 110  # no further than it has to
    for torn in (b'"' + b'\\"' * 1000, b'"a\\', b'{"a":"b', b'\\"\\'):
        assert weight_of(torn, 1) >= 0


def test_what_holds_too_many_values_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = TypeAdapter(CompletionRequest)
    assert parse_body(b'{"prompt":[1,2,3]}', adapter, 100).prompt == [1, 2, 3]
    monkeypatch.setattr(bodies.json, "loads", lambda body: pytest.fail("it was parsed"))
    with pytest.raises(ApiError, match="max_body_values") as refused:
        parse_body(b'{"prompt":"a","other":[' + b"{}," * 100 + b"{}]}", adapter, 100)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "body",
    [b"[" * 100_000, b'{"a":' * 30_000, b'{"prompt":' + b"1" * 5000 + b"}", b'{"prompt":"\xff"}', b"{"],
)
def test_what_cannot_be_read_is_a_wrong_request(url: str, body: bytes) -> None:
    answer = httpx.post(f"{url}/v1/completions", content=body, headers=JSON)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_body")


def test_large_bodies_are_parsed_beside_the_event_loop(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def watched(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return parse_body(*arguments)

    monkeypatch.setattr(bodies, "parse_body", watched)
    for size in (100, LARGE_BODY):
        answer = httpx.post(f"{url}/v1/completions", json={**SHORT, "user": "x" * size})
        assert answer.status_code == 200
    small, large = threads
    assert not small.startswith("quire-bodies")
    assert large.startswith("quire-bodies")


def test_what_was_checked_is_not_checked_again() -> None:
    checked.clear()
    router = APIRouter(route_class=BodyRoute)

    @router.post("/")
    async def count(body: Texts) -> int:
        return len(body.texts)

    app = FastAPI()
    app.state.service = SimpleNamespace(settings=ServerSettings())
    app.include_router(router)
    client = TestClient(app)
    assert client.post("/", json={"texts": ["a", "b"]}).json() == 2
    assert checked == [["a", "b"]]
    assert client.post("/", json={"texts": [1]}).status_code == 422
    assert len(checked) == 2


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/completions", 401), ("/tokenize", 401), ("/admin/drop", 403)]
)
def test_who_may_not_ask_is_told_before_the_body_is_read(serve, path: str, status: int) -> None:
    async def ask(app: Any) -> int:
        async def receive() -> Any:
            pytest.fail("the body was read")

        statuses = []

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"content-length", b"1000000")],
            "client": ("192.0.2.1", 1),
            "server": ("127.0.0.1", 1),
            "scheme": "http",
        }
        await app(scope, receive, send)
        return statuses[0]

    with serve(ServerSettings(keys=KeyRing([(digest_of_key("key-a"), ApiTenant("a"))]))) as (_, app):
        assert asyncio.run(ask(app)) == status


def test_the_limit_of_values_is_a_setting(serve) -> None:
    with serve(ServerSettings(limits=ServerLimits(max_body_values=1000))) as (url, _):
        body = {**SHORT, "prompt": [5] * 1100}
        answer = httpx.post(f"{url}/v1/completions", json=body)
        assert answer.status_code == 400
        assert "max_body_values" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"prompt": ["a"] * 17, "n": 4}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"stop_token_ids": [5] * 257}, "stop_token_ids"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ({"regex": "a" * 20_000}, "regex"),
        ({"json_schema": {"enum": ["a" * 300_000]}}, "json_schema"),
        ({"json_schema": {"enum": list(range(100_000))}}, "json_schema"),
    ],
)
def test_counts_within_a_request_have_limits(url: str, more: dict[str, Any], param: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", json={**SHORT, **more})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("brackets", ["[" * 100_000, "[" * 900 + "]" * 900, '{"a":' * 100_000])
def test_arguments_nested_too_deep_are_a_wrong_request(url: str, brackets: str) -> None:
    call = {"function": {"name": "f", "arguments": brackets}}
    body = {"messages": [MESSAGE, {"role": "assistant", "tool_calls": [call]}], "max_tokens": 1}
    assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code in (200, 400)
    assert httpx.post(f"{url}/tokenize", json=body).status_code in (200, 400)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", lambda text: {"prompt": text}, 400),
        ("/v1/completions", lambda text: {"prompt": ["a", text]}, 400),
        ("/v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}]}, 400),
        ("/quire/conversations", lambda text: {"text": text}, 400),
        ("/tokenize", lambda text: {"prompt": text[:200_000]}, 200),
        ("/tokenize", lambda text: {"prompt": text}, 400),
    ],
)
def test_a_text_longer_than_the_longest_tokens_is_not_tokenized(
    server: Any, monkeypatch: pytest.MonkeyPatch, path: str, body: Any, status: int
) -> None:
    url, app = server
    most = (
        app.state.service.engine.max_model_len * 80
    )  # the embedded tokenizer's longest: 40 blanks, 2 bytes each
    lengths: list[int] = []
    encode = app.state.service._encode

    def watched(text: str, *options: Any) -> list[int]:
        lengths.append(len(text))
        return encode(text, *options)

    monkeypatch.setattr(app.state.service, "_encode", watched)
    answer = httpx.post(f"{url}{path}", json=body("blue " * (400_000 // 5)), timeout=60)
    assert answer.status_code == status
    if status == 400:
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert all(length <= most for length in lengths)
    else:
        assert lengths == [200_000]


def test_a_chat_template_has_its_time_and_no_more(serve, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    def slow(*arguments: Any, **options: Any) -> str:
        begun.set()
        for _ in itertools.count():
            pass
        raise AssertionError

    within = Threads.run_with_timeout
    monkeypatch.setattr(
        Threads, "run_with_timeout", lambda self, seconds, *work: within(self, seconds / 500, *work)
    )
    with serve(ServerSettings()) as (url, _):
        monkeypatch.setattr(service, "render", slow)
        answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": [MESSAGE], "max_tokens": 1})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
        assert "max_template_seconds" in answer.json()["error"]["message"]
    assert begun.is_set()


def test_large_bodies_have_a_number_of_bytes_together_and_small_ones_do_not_count() -> None:
    async def main() -> None:
        release = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            for _ in range(2):
                await receive()
            await release.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})

        limit = BodyLimit(app, 1 << 20, 600_000)

        async def ask(num_bytes: int) -> int:
            statuses: list[int] = []

            async def receive() -> Any:
                return {"type": "http.request", "body": b"x" * (num_bytes // 2), "more_body": True}

            async def send(message: Any) -> None:
                if message["type"] == "http.response.start":
                    statuses.append(message["status"])

            with suppress(ApiError):
                await limit({"type": "http", "headers": []}, receive, send)
            return statuses[0] if statuses else 0

        first = [asyncio.create_task(ask(size)) for size in (300_000, 200_000, 60_000)]
        await asyncio.sleep(0)
        full = [asyncio.create_task(ask(size)) for size in (200_000, 60_000)]
        await asyncio.sleep(0)
        assert full[0].done()
        assert not full[1].done()
        release.set()
        assert [await task for task in first] == [200, 200, 200]
        assert await full[1] == 200
        assert await ask(500_000) == 200  # all of it is free again

    asyncio.run(main())


def test_bodies_beyond_what_all_may_have_are_told_to_come_again(serve) -> None:
    with serve(ServerSettings(limits=ServerLimits(max_bodies_bytes=100_000))) as (url, _):
        for size, status in ((90_000, 200), (110_000, 429), (90_000, 200), (60_000, 200)):
            answer = httpx.post(f"{url}/v1/completions", json={**SHORT, "user": "x" * size})
            assert answer.status_code == status
            if status == 429:
                assert answer.json()["error"]["code"] == "bodies_full"
                assert answer.headers["retry-after"] == "1"


def test_a_finished_answer_that_is_not_read_holds_no_place(serve) -> None:
    """The engine has ended with it: whoever reads slowly keeps nobody waiting."""

    async def main(app: Any) -> None:
        there = app.state.service
        body = CompletionRequest.model_validate({**SHORT, "max_tokens": 4, "ignore_eos": True})
        params = there.params(body, max_tokens=4)
        tenant = ApiTenant("default")
        with await there.begin(tenant, body, there.requests(tenant, body, [[5, 6]], params)) as begun:
            outputs = begun.outputs()
            await anext(outputs)
            while there.num_open:  # though no second output is asked for
                await asyncio.sleep(0.001)
            assert len([output async for output in outputs]) >= 1

    with serve(ServerSettings()) as (_, app):
        asyncio.run(main(app))


def test_what_no_place_is_left_for_is_refused_before_its_body_is_read(serve, monkeypatch) -> None:
    with serve(ServerSettings()) as (url, app):
        there = app.state.service
        monkeypatch.setattr(bodies, "parse_body", lambda *_: pytest.fail("the body was read"))
        there._admission.admit(ApiTenant("somebody"), there._admission._max_open)
        for size in (1, 3_000_000):  # one that is still being sent hears of it too
            answer = httpx.post(f"{url}/v1/completions", json={**SHORT, "user": "x" * size})
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")


def test_a_client_that_leaves_in_the_middle_of_a_body_is_no_failure(serve, caplog) -> None:
    with serve(ServerSettings()) as (url, app):
        ended = threading.Event()
        guarded = app.state.service.require_place

        def watched(tenant: ApiTenant) -> None:
            ended.set()
            guarded(tenant)

        app.state.service.require_place = watched
        parts = urlsplit(url)
        with socket.create_connection((parts.hostname, parts.port), timeout=10) as connection:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(head + b"Content-Length: 100\r\n\r\n{")
            assert ended.wait(10)
        assert httpx.post(f"{url}/v1/completions", json=SHORT).status_code == 200
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
