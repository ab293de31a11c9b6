"""Streams before their first token, between two, and on failure: the bytes on the wire."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from support.held_steps import HeldSteps, Raw, held_steps
from support.running_server import running
from support.until import until

from quire import LLM, AsyncEngine
from quire.errors import CancelledError
from quire.server.api_keys import ApiTenant
from quire.server.http import sse
from quire.server.http.sse import DONE, EventStream, event
from quire.server.settings import ServerLimits, ServerSettings

COMMENT = b": still working\n\n"
HEAD_END = b"\r\n\r\n"
BODY = {"prompt": "def f(", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
CHAT = {
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 6,
    "temperature": 0,
    "ignore_eos": True,
}


@pytest.fixture
def steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldSteps]:
    """No step of the engine but those that are let go; comments come often."""
    monkeypatch.setattr(sse, "_HEARTBEAT_S", 0.01)
    with held_steps(llm) as held:
        yield held


def asked(url: str, kind: str) -> tuple[str, dict[str, Any]]:
    """The path and body of a request of that kind."""
    if kind == "chat":
        return "/v1/chat/completions", CHAT
    if kind == "turn":
        made = httpx.post(f"{url}/quire/conversations", json={"text": "def f("}).json()["id"]
        return f"/quire/conversations/{made}/append", {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    more = {"several": {"prompt": ["def f(", "class A:"]}, "n": {"n": 3, "seed": 5}}
    return "/v1/completions", {**BODY, **more.get(kind, {})}


def texts(choices: list[dict[str, Any]]) -> dict[int, str]:
    """By index."""
    found: dict[int, str] = {}
    for choice in choices:
        part = choice.get("delta") or choice.get("message") or choice
        found[choice["index"]] = found.get(choice["index"], "") + (
            part.get("content") or part.get("text") or ""
        )
    return found


@pytest.mark.parametrize("kind", ["completion", "several", "n", "chat", "turn"])
def test_headers_at_once_and_comments_until_an_event_comes(url: str, steps: HeldSteps, kind: str) -> None:
    path, body = asked(url, kind)
    with Raw(url, path, {**body, "stream": True}, headers="Connection: close\r\n") as client:
        assert b" 200 OK\r\n" in client.read_to(HEAD_END)
        assert b"data:" not in client.read_to(COMMENT, 3)
        before = client.data.count(COMMENT)
        while b"data:" not in client.data:  # the prompt, and a first token that may be part of a character
            steps.go(1)
            client.read_to(COMMENT, before + 2)
            before = client.data.count(COMMENT)
        assert DONE not in client.data
        client.read_to(COMMENT, before + 3)  # the next step is held: a gap
        steps.go_on()
        client.read_to(b"\r\n0\r\n\r\n")
        *events, done = client.events
    assert done == "[DONE]"
    path, again = asked(url, kind)
    whole = httpx.post(url + path, json=again, timeout=60).json()["choices"]
    streamed = [choice for one in events for choice in json.loads(one)["choices"]]
    assert texts(streamed) == texts(whole)


def test_refusals_are_answers_of_their_own(serve: Any, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is known before a place in the queue is taken has its status, whatever the engine is at."""
    settings = ServerSettings(limits=ServerLimits(max_body_bytes=100_000, max_waiting=1))
    with serve(settings) as (url, app), held_steps(llm):
        there = app.state.service
        made = httpx.post(f"{url}/quire/conversations", json={"text": "def f("}).json()["id"]

        def status(path: str, body: dict[str, Any]) -> tuple[int, bool]:
            answer = httpx.post(url + path, json={**body, "stream": True}, timeout=60)
            assert answer.json()["error"]["message"]
            return answer.status_code, "retry-after" in answer.headers

        assert status("/v1/completions", {**BODY, "temperature": -1}) == (400, False)
        assert status("/v1/completions", {**BODY, "prompt": [5] * 3000}) == (400, False)
        assert status("/v1/completions", {**BODY, "prompt": [10**7]}) == (400, False)
        assert status("/v1/completions", {**BODY, "model": "another"}) == (404, False)
        assert status("/v1/completions", {**BODY, "user": "x" * 200_000}) == (413, False)
        turn = f"/quire/conversations/{made}/append"
        with Raw(url, turn, {"max_tokens": 2, "stream": True}) as first:
            first.read_to(HEAD_END)
            assert status(turn, {"max_tokens": 2}) == (409, False)
            places = there._admission._max_open - there.num_open
            taken = there._admission.admit(ApiTenant("somebody"), places)
            assert status("/v1/chat/completions", CHAT) == (429, True)
            taken.release()
        monkeypatch.setattr(there, "draining", True)
        assert status("/v1/chat/completions", CHAT) == (503, True)


def test_a_second_turn_is_refused_while_the_first_is_not_queued_yet(serve: Any) -> None:
    """The engine's thread is busy; a client that leaves then leaves the conversation as it was."""
    with serve(ServerSettings()) as (url, app):
        path, body = asked(url, "turn")
        held = threading.Event()
        waiting = app.state.service.engine.submit_between_steps(held.wait)
        try:
            with Raw(url, path, {**body, "stream": True}):
                until(lambda: app.state.service.num_open == 1)
                second = httpx.post(url + path, json={**body, "stream": True}, timeout=10)
                assert (second.status_code, second.json()["error"]["code"]) == (409, "conflict")
            until(lambda: app.state.service.num_open == 0)
        finally:
            held.set()
        waiting.result()
        assert httpx.post(url + path, json=body, timeout=60).status_code == 200


@pytest.mark.parametrize("kind", ["completion", "several", "chat", "turn"])
def test_an_error_behind_the_headers_is_an_event(
    url: str, llm: LLM, steps: HeldSteps, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def fail() -> None:
        raise RuntimeError("broken on purpose")

    path, body = asked(url, kind)
    with Raw(url, path, {**body, "stream": True}) as client:
        client.read_to(COMMENT)
        schedule = llm.engine.scheduler.schedule
        monkeypatch.setattr(llm.engine.scheduler, "schedule", fail)
        steps.go(1)
        client.read_to(b"\r\n0\r\n\r\n")
        monkeypatch.setattr(llm.engine.scheduler, "schedule", schedule)
        error, done = client.events
    assert done == "[DONE]"
    assert json.loads(error)["error"]["type"] == "internal_error"
    assert "broken on purpose" not in error
    steps.go_on()
    assert httpx.post(url + path, json=body, timeout=60).status_code == 200  # a conversation rests again


def test_the_openai_package_skips_comments_and_raises_the_error(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a server that stops while requests wait, too."""
    monkeypatch.setattr(sse, "_HEARTBEAT_S", 0.01)
    sent, send = [], EventStream._send

    async def noted(self: EventStream, to: Any, data: bytes) -> None:
        await send(self, to, data)
        sent.append(data)

    monkeypatch.setattr(EventStream, "_send", noted)
    with running(llm, ServerSettings()) as (url, app):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with held_steps(llm) as steps:
            stream = client.chat.completions.create(model="embedded", stream=True, **pick(CHAT))
            until(lambda: sent.count(COMMENT) >= 5)
            steps.go_on()
            said = "".join(one.choices[0].delta.content or "" for one in stream if one.choices)
        whole = client.chat.completions.create(model="embedded", **pick(CHAT))
        assert said == whole.choices[0].message.content
        with held_steps(llm) as steps:
            stream = client.completions.create(
                model="embedded",
                prompt="def f(",
                max_tokens=400,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            steps.go(3)
            engine: AsyncEngine = app.state.service.engine
            closing = engine.driver.submit(engine._drop_all)
            steps.go_on()
            closing.result()
            with pytest.raises(openai.APIError, match="the engine was closed while the request ran"):
                list(stream)


def pick(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != "ignore_eos"}


def test_cached_tokens_of_a_stream_are_in_its_usage(url: str, llm: LLM) -> None:
    """The headers went out before anybody looked."""
    body = {
        **BODY,
        "prompt": list(range(300, 364)),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    for num_cached in (0, 63):
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert "x-quire-cached-tokens" not in answer.headers
        data = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        usage = json.loads(data[-1])["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == num_cached


def test_a_stream_of_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself: nothing follows its end, and what it reads from is closed."""
    monkeypatch.setattr(sse, "_HEARTBEAT_S", 0.001)
    closed = []

    async def events(go: asyncio.Event, error: Exception | None) -> Any:
        try:
            yield event({"a": 1})
            await go.wait()
            if error is not None:
                raise error
            yield event({"a": 2})
        finally:
            closed.append(True)

    async def main(error: Exception | None) -> tuple[list[bytes], bytes]:
        go, sent = asyncio.Event(), []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)
            if sum(one.get("body") == COMMENT for one in sent) == 3:
                go.set()

        await EventStream(b"", events(go, error), end=DONE)({"type": "http"}, None, send)
        num_sent = len(sent)
        await asyncio.sleep(0.05)
        assert len(sent) == num_sent
        assert [one.get("more_body") for one in sent] == [None, *[True] * (num_sent - 2), False]
        return [one["body"] for one in sent[1:-1] if one["body"] != COMMENT], sent[-1]["body"]

    assert asyncio.run(main(None)) == ([event({"a": 1}), event({"a": 2})], DONE)
    (first, failed), end = asyncio.run(main(CancelledError("closed")))
    assert (first, end) == (event({"a": 1}), DONE)
    assert json.loads(failed[6:])["error"]["code"] == "cancelled"
    assert closed == [True, True]
