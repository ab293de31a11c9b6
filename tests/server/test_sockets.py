"""Clients below HTTP: odd headers, partial requests, half-closed connections, slow or no reading."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.until import until

from quire.server import completions, service

STREAM = {"prompt": "def f(", "max_tokens": 40, "ignore_eos": True, "temperature": 0, "stream": True}


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=10)


def request(
    body: object, path: str = "/v1/completions", headers: bytes = b"", length: int | None = None
) -> bytes:
    content = json.dumps(body).encode()
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content) if length is None else length}\r\n".encode()
        + headers
        + b"Connection: close\r\n\r\n"
        + content
    )


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while piece := connection.recv(65536):
        data += piece
    return data


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def wait_until_idle(app: Any) -> None:
    """Who is gone may have requests open for a moment, of other tests too."""
    until(lambda: not app.state.service.num_open)


def serves(url: str) -> bool:
    body = {"prompt": "a", "max_tokens": 1}
    return httpx.post(f"{url}/v1/completions", json=body).status_code == 200


@settings(
    max_examples=80, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
@given(
    name=st.sampled_from(
        [b"Authorization", b"X-Api-Key", b"Accept", b"Expect", b"Transfer-Encoding", b"Upgrade"]
    )
    | st.binary(min_size=1, max_size=12),
    value=st.binary(max_size=60) | st.just(b"x" * 70_000),
)
@example(b"Authorization", b"Bearer \xff\xfe\0")
@example(b"Authorization", b"Bearer " + "\u00e9".encode())
@example(b"Transfer-Encoding", b"chunked")
@example(b"Content-Length", b"-1")
@example(b"Content-Length", b"99999999999999999999999")
@example(b"Expect", b"100-continue")
@example(b"Upgrade", b"websocket")
def test_any_header(small_server, name: bytes, value: bytes) -> None:
    with connect(small_server[0]) as connection:
        headers = name + b": " + value + b"\r\n"
        try:
            connection.sendall(request({"prompt": "a", "max_tokens": 1}, headers=headers))
            connection.shutdown(socket.SHUT_WR)
            answer = read_all(connection)
        except OSError:  # what is refused need not be read to its end: reset, or closed already
            answer = b""
    assert not answer or status_of(answer) < 500, answer


def test_halves_of_requests(small_server) -> None:
    url, app = small_server
    whole = request(STREAM)
    for length in (0, 1, 20, whole.index(b"\r\n\r\n") + 2, len(whole) - 1):
        with connect(url) as connection:
            connection.sendall(whole[:length])
            connection.shutdown(socket.SHUT_WR)
            answer = read_all(connection)
            assert not answer or status_of(answer) < 500
    with connect(url) as connection:  # a body longer than it says, one shorter
        connection.sendall(request(STREAM, length=5))
        assert status_of(read_all(connection)) == 400
    wait_until_idle(app)
    assert serves(url)


def test_a_client_that_has_closed_its_half_is_gone(small_server) -> None:
    """uvicorn ends a connection whose other side sends no more: what it asked for is aborted, nothing is left."""
    url, app = small_server
    for _ in range(20):
        with connect(url) as connection:
            connection.sendall(request(STREAM))
            connection.shutdown(socket.SHUT_WR)
            answer = read_all(connection)
            assert not answer or status_of(answer) == 200
    wait_until_idle(app)
    assert serves(url)


def test_a_slow_writer_gets_its_answer(small_server) -> None:
    with connect(small_server[0]) as connection:
        for byte in request({"prompt": "a", "max_tokens": 2}):
            connection.sendall(bytes([byte]))
            time.sleep(0.001)
        assert status_of(read_all(connection)) == 200


def test_slow_readers_keep_nobody_waiting(small_server) -> None:
    """Those who do not read get no more sent, and others are served beside them."""
    url, app = small_server
    slow = []
    for _ in range(20):
        parts = urlsplit(url)
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect((parts.hostname, parts.port))
        connection.settimeout(10)
        connection.sendall(request(STREAM))
        slow.append(connection)
    assert serves(url)
    whole = read_all(slow[0])  # at last
    assert whole.count(b"data: ") >= 40
    assert b"[DONE]" in whole
    for connection in slow:
        connection.close()
    wait_until_idle(app)
    assert serves(url)


@pytest.mark.parametrize("prompts", [["def f("], ["def f(", "class A"]])
def test_what_is_not_read_is_not_computed(small_server, small_llm, monkeypatch, prompts: list[str]) -> None:
    """The application waits in its first `send`: each request pauses, others do not, and nothing is lost."""
    url, app = small_server
    monkeypatch.setattr(service, "_MAX_UNREAD", 6)
    monkeypatch.setattr(completions, "_MAX_QUEUED", 4)
    scheduler = small_llm.engine.scheduler
    head, _, body = request({**STREAM, "prompt": prompts}).partition(b"\r\n\r\n")
    headers = [tuple(line.lower().split(b": ")) for line in head.split(b"\r\n")[1:]]
    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "path": "/v1/completions", "query_string": b"",
        "headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "scheme": "http",
    }  # fmt: skip

    async def main() -> bytes:
        received, is_read, sent = asyncio.Queue[dict[str, object]](), asyncio.Event(), b""
        received.put_nowait({"type": "http.request", "body": body, "more_body": False})

        async def send(message: dict) -> None:
            nonlocal sent
            if message["type"] == "http.response.body":
                await is_read.wait()
                sent += message["body"]

        answering = asyncio.create_task(app(scope, received.get, send))
        before, lengths = None, []
        while (
            before is None or lengths != before
        ):  # a busy event loop may yet take some, and let a request go on
            while len(scheduler.requests) < len(prompts) or not all(
                one.is_paused for one in list(scheduler.requests.values())
            ):
                await asyncio.sleep(0.005)
            before = lengths
            assert await asyncio.to_thread(serves, url)
            lengths = [len(one.sequences[0].output_ids) for one in scheduler.requests.values()]
        assert max(lengths) < 20
        is_read.set()
        await answering
        return sent

    answer = asyncio.run(asyncio.wait_for(main(), 120))
    assert answer.count(b"data: ") == 40 * len(prompts) + 1
    assert answer.endswith(b"data: [DONE]\n\n")
