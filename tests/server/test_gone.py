"""Clients that disconnect: their request ends before the next step, in every phase."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.held_steps import HeldSteps, Raw, held_steps, is_idle
from support.running_server import running
from support.until import until

from quire import LLM
from quire.server.api_keys import ApiTenant, KeyRing, digest_of_key
from quire.server.http import bodies
from quire.server.settings import ServerSettings

CHUNK = 64
PROMPT = [5 + i % 900 for i in range(1500)]
ASK = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
TEXT = "word " * 30_000
LONG_TEXT = "word " * 5_000  # one that a thread tokenizes


@pytest.fixture(scope="module")
def chunked_llm() -> Iterator[LLM]:
    """A prompt takes many steps."""
    with LLM(kv_memory="64MiB", max_batch_tokens=CHUNK, max_num_seqs=4) as one:
        yield one


@pytest.fixture(scope="module")
def house(chunked_llm: LLM) -> Iterator[tuple[str, Any]]:
    with running(chunked_llm, ServerSettings(log_requests=True)) as one:
        yield one


@pytest.fixture
def steps(chunked_llm: LLM) -> Iterator[HeldSteps]:
    """No step of the engine but those that are let go, and nothing cached."""
    chunked_llm.cache.reset()
    with held_steps(chunked_llm) as held:
        yield held


def asked(url: str, kind: str) -> tuple[str, dict[str, Any]]:
    if kind in ("chat", "messages"):
        path = "/v1/chat/completions" if kind == "chat" else "/v1/messages"
        return path, {
            "max_tokens": ASK["max_tokens"],
            "messages": [{"role": "user", "content": "x = 1\n" * 300}],
        }
    if kind == "response":
        return "/v1/responses", {
            "input": "x = 1\n" * 300, "max_output_tokens": 8, "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
    if kind == "turn":
        made = httpx.post(f"{url}/quire/conversations", json={"tokens": PROMPT}).json()["id"]
        return f"/quire/conversations/{made}/append", ASK
    if kind == "pin":
        return "/admin/pins", {"prompt": PROMPT}
    beams = {"n": 2, "best_of": 4, "use_beam_search": True}
    more = {"several": {"prompt": [PROMPT, PROMPT[::-1]]}, "n": {"n": 3}, "beams": beams}
    return "/v1/completions", {**ASK, "prompt": PROMPT, **more.get(kind, {})}


def num_aborted(url: str) -> float:
    page = httpx.get(f"{url}/metrics", timeout=60).text
    name = 'vllm:request_success_total{finished_reason="abort",'
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))


KINDS = [
    (kind, stream)
    for kind in ("completion", "several", "n", "beams", "chat", "messages", "response", "turn", "pin")
    for stream in ((False,) if kind == "pin" else (False, True))
]


@pytest.mark.parametrize(("kind", "stream"), KINDS)
def test_in_the_middle_of_a_prompt(
    house: tuple[str, Any], chunked_llm: LLM, steps: HeldSteps, lines: list[str], kind: str, stream: bool
) -> None:
    url, app = house
    path, body = asked(url, kind)
    aborted, computed = num_aborted(url), chunked_llm.stats()["num_computed_tokens"]
    with Raw(url, path, {**body, "stream": True} if stream else body):
        steps.go(2)
        until(lambda: steps.num_begun == 3)  # and is held
        lines.clear()
    until(lambda: lines)  # the server has noticed, while the step is under way
    assert app.state.service.num_open == 0
    steps.go_on()
    until(lambda: is_idle(chunked_llm))
    assert steps.num_begun == 3
    assert chunked_llm.stats()["num_computed_tokens"] - computed == 3 * CHUNK
    assert f"status={200 if stream else 499} " in lines[0]
    if kind != "pin":
        assert num_aborted(url) - aborted == (2 if kind == "several" else 1)
        assert lines[0].endswith("finish=abort")
    if kind == "completion":  # what was computed is found by the next one
        again = httpx.post(url + path, json=body, timeout=60).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 3 * CHUNK
    assert app.state.service.records.num_records("default") == 0  # only an answer that has ended is stored
    if kind == "turn":  # nothing had come, and the conversation rests again
        assert httpx.post(url + path, json=body, timeout=60).json()["usage"]["prompt_tokens"] == len(PROMPT)
        assert is_idle(chunked_llm)


@pytest.mark.parametrize("stream", [False, True])
def test_in_the_middle_of_a_search(
    house: tuple[str, Any], chunked_llm: LLM, steps: HeldSteps, lines: list[str], stream: bool
) -> None:
    """Four beams run, two of them behind forks that have not been written yet."""
    url, app = house
    body = {**ASK, "prompt": PROMPT[:20], "n": 2, "best_of": 4, "use_beam_search": True, "stream": stream}
    aborted, computed = num_aborted(url), chunked_llm.stats()["num_computed_tokens"]
    with Raw(url, "/v1/completions", body):
        steps.go(3)
        until(lambda: steps.num_begun == 4)
        assert len(chunked_llm.engine.scheduler.running) == 4
        lines.clear()
    until(lambda: lines)
    steps.go_on()
    until(lambda: is_idle(chunked_llm))
    assert steps.num_begun == 4
    assert chunked_llm.stats()["num_computed_tokens"] - computed == 20 + 3 * 4
    assert (num_aborted(url) - aborted, app.state.service.num_open) == (1, 0)
    counts = chunked_llm.stats()
    assert (counts["held"], counts["num_sequences"]) == (0, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_in_the_queue(
    house: tuple[str, Any], chunked_llm: LLM, steps: HeldSteps, lines: list[str], stream: bool
) -> None:
    """All places in the batch are taken; the one that waits for some leaves, the others go on."""
    url, _ = house
    computed = chunked_llm.stats()["num_computed_tokens"]
    beside = [Raw(url, "/v1/completions", {**ASK, "prompt": [i, 7]}) for i in range(9, 13)]
    driver, scheduler = chunked_llm.driver, chunked_llm.engine.scheduler
    until(lambda: steps.num_begun == 1)
    until(
        lambda: len(scheduler.requests) + len(driver._commands) == 4
    )  # some came while the first step was held
    steps.go(1)
    until(lambda: steps.num_begun == 2)
    with Raw(url, "/v1/completions", {**ASK, "prompt": PROMPT, "stream": stream}):
        until(lambda: driver._commands)
        steps.go(1)
        until(lambda: scheduler.waiting)
    until(lambda: lines)
    steps.go_on()
    for one in beside:
        one.read_to(b'"usage":')
        one.close()
    until(lambda: is_idle(chunked_llm))
    assert chunked_llm.stats()["num_computed_tokens"] - computed == 4 * (2 + ASK["max_tokens"] - 1)
    until(lambda: len(lines) == 5)  # no line of these comes in the next test


def test_before_the_engine_has_taken_it(
    chunked_llm: LLM, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the engine's thread is busy. It never hears of the request, which counts in its client's minute."""
    taken: list[Any] = []
    submit_all = chunked_llm.engine.submit_all
    monkeypatch.setattr(chunked_llm.engine, "submit_all", lambda some: taken.extend(some) or submit_all(some))
    rare = ApiTenant("rare", requests_per_minute=2)
    keys = KeyRing([(digest_of_key("key"), rare)])
    key, body = {"Authorization": "Bearer key"}, {**ASK, "prompt": [5, 6, 7]}
    held = threading.Event()
    with running(chunked_llm, ServerSettings(keys=keys, tenants=(rare,), log_requests=True)) as (url, app):
        service = app.state.service
        waiting = service.engine.submit_between_steps(held.wait)
        try:
            with Raw(url, "/v1/completions", body, headers="Authorization: Bearer key\r\n"):
                until(lambda: service.num_open == 1)
            until(lambda: lines)
            assert (service.num_open, service._names) == (0, set())
        finally:
            held.set()
        waiting.result()
        statuses = [httpx.post(f"{url}/v1/completions", json=body, headers=key).status_code for _ in range(2)]
    assert "status=499" in lines[0]
    assert statuses == [200, 429]
    assert len(taken) == 1


@pytest.mark.parametrize("kind", ["tokens", "parsing"])
@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions", "/quire/conversations"])
def test_before_a_large_body_has_been_worked_on(
    house: tuple[str, Any], lines: list[str], monkeypatch: pytest.MonkeyPatch, path: str, kind: str
) -> None:
    url, app = house
    service = app.state.service
    worked: list[bool] = []
    monkeypatch.setattr(type(service), "_encode", lambda *_: worked.append(True) or [5])
    monkeypatch.setattr(
        bodies, "parse_body", (lambda *_: worked.append(True)) if kind == "parsing" else bodies.parse_body
    )
    threads = bodies._thread if kind == "parsing" else service.threads._threads
    field = "text" if path == "/quire/conversations" else "prompt"
    text, held = TEXT if kind == "parsing" else LONG_TEXT, threading.Event()
    busy = [threads.submit(held.wait) for _ in range(threads._max_workers)]
    until(lambda: threads._work_queue.empty())
    try:
        with Raw(url, path, {field: text}):
            until(lambda: threads._work_queue.qsize() == 1)
        until(lambda: lines)
    finally:
        held.set()
    for one in busy:
        one.result()
    threads.submit(int).result()  # what waited had its turn before
    assert "status=499" in lines[0]
    assert worked == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
def test_with_more_requests_behind_it(
    house: tuple[str, Any], chunked_llm: LLM, steps: HeldSteps, lines: list[str], stream: bool, at_once: bool
) -> None:
    """A pipeline, whose answers nobody will read: the first one ends, the others never begin."""
    url, app = house
    content = json.dumps({**ASK, "prompt": PROMPT[::-1]}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    behind = head % len(content) + content
    body = {**ASK, "prompt": PROMPT, "stream": stream}
    with Raw(url, "/v1/completions", body, behind=behind if at_once else b"") as client:
        steps.go(1)
        until(lambda: steps.num_begun == 2)
        if not at_once:
            client.connection.sendall(behind)
    until(lambda: lines)
    assert app.state.service.num_open == 0
    steps.go_on()
    until(lambda: is_idle(chunked_llm))
    assert (steps.num_begun, len(lines)) == (2, 1)


def test_before_the_headers_could_be_sent(house: tuple[str, Any], chunked_llm: LLM) -> None:
    """A connection that takes nothing: no output was asked for, and all is given back and counted."""
    url, app = house
    for kind in ("completion", "several", "turn"):
        path, body = asked(url, kind)
        aborted = num_aborted(url)
        content = json.dumps({**body, "stream": True}).encode()
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json"),
                   (b"content-length", b"%d" % len(content))]  # fmt: skip
        scope = {
            "type": "http", "http_version": "1.1", "method": "POST", "path": path, "query_string": b"",
            "headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "scheme": "http",
        }  # fmt: skip

        async def main(content: bytes = content, scope: dict[str, Any] = scope) -> None:
            received: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
            received.put_nowait({"type": "http.request", "body": content, "more_body": False})

            async def send(message: dict[str, Any]) -> None:
                received.put_nowait({"type": "http.disconnect"})
                await asyncio.Event().wait()

            await app(scope, received.get, send)

        asyncio.run(asyncio.wait_for(main(), 120))
        assert (app.state.service.num_open, app.state.service._names) == (0, set())
        assert num_aborted(url) - aborted == (2 if kind == "several" else 1)
        until(lambda: is_idle(chunked_llm))
    assert httpx.post(url + path, json=body, timeout=60).status_code == 200  # the conversation rests
