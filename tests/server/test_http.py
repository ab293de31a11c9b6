"""Corner cases of HTTP: packed bodies, HEAD, HTTP/1.0, unknown paths, addresses as URLs."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import zlib
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from quire.server.api_errors import ApiError
from quire.server.http.content_encoding import DecodedBody, Unpacker
from quire.server.run import bind, url_of
from quire.server.settings import ServerLimits, ServerSettings

BODY = {"prompt": "def f(", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
JSON = {"Content-Type": "application/json"}


def post(url: str, data: bytes, encoding: str, path: str = "/v1/completions") -> httpx.Response:
    return httpx.post(url + path, content=data, headers={**JSON, "Content-Encoding": encoding}, timeout=60)


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "x-gzip", "deflate", "identity", "", "identity, gzip"])
def test_a_packed_body(url: str, encoding: str) -> None:
    plain = json.dumps(BODY).encode()
    pack = {"deflate": zlib.compress, "identity": bytes, "": bytes}.get(encoding, gzip.compress)
    answer = post(url, pack(plain), encoding)
    assert answer.status_code == 200, answer.text
    asked = httpx.post(f"{url}/v1/completions", json=BODY, timeout=60)
    assert answer.json()["choices"] == asked.json()["choices"]


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "gzip, br"])
def test_another_encoding_is_refused(url: str, encoding: str) -> None:
    answer = post(url, b"whatever", encoding)
    assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "gzip, deflate")
    assert encoding in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-3], lambda _: b"{}", lambda data: data + b"more", lambda _: b""]
)
def test_a_damaged_body_is_refused(url: str, damage: Any) -> None:
    answer = post(url, damage(gzip.compress(json.dumps(BODY).encode())), "gzip")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_body")
    assert "Content-Encoding" in answer.json()["error"]["message"]


def test_a_body_that_unpacks_beyond_the_limit(serve: Any) -> None:
    with serve(ServerSettings(limits=ServerLimits(max_body_bytes=10_000))) as (url, _):
        packed = gzip.compress(json.dumps({**BODY, "prompt": "a" * 1_000_000}).encode())
        assert len(packed) < 10_000
        assert post(url, packed, "gzip").status_code == 413
        noise = bytes(range(256)) * 80
        assert post(url, noise, "gzip").status_code == 413  # as it comes
        assert post(url, gzip.compress(json.dumps(BODY).encode()), "gzip").status_code == 200


def test_unpacking_takes_no_more_than_it_may() -> None:
    unpacker = Unpacker(1000)
    with pytest.raises(ApiError, match="at most 1000 bytes"):
        unpacker.add(gzip.compress(bytes(10_000_000)))
    assert len(unpacker.body) == 1001
    unpacker = Unpacker(1000)
    for byte in gzip.compress(b"a" * 500) + gzip.compress(b"b" * 500):  # two, a byte at a time
        unpacker.add(bytes([byte]))
    assert unpacker.end() == b"a" * 500 + b"b" * 500


def test_what_comes_behind_a_packed_body_is_heard() -> None:
    """The application learns that its client has gone."""
    messages = [
        {"type": "http.request", "body": gzip.compress(b"{}"), "more_body": False},
        {"type": "http.disconnect"},
    ]
    seen = []

    async def receive() -> Any:
        return messages.pop(0)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(dict(scope["headers"]))
        seen.extend([await receive(), await receive()])

    scope = {"type": "http", "headers": [(b"content-encoding", b"gzip"), (b"content-length", b"22")]}
    asyncio.run(DecodedBody(app, 100)(scope, receive, None))
    assert seen[0] == {b"content-length": b"2"}
    assert (seen[1]["body"], seen[2]["type"]) == (b"{}", "http.disconnect")


@pytest.mark.parametrize(
    "path", ["/", "/health", "/ready", "/metrics", "/v1/models", "/quire/conversations", "/openapi.json",
             "/admin/report", "/window/events", "/window/main.js"]
)  # fmt: skip
def test_head_is_get_without_the_body(url: str, path: str) -> None:
    answer = httpx.head(url + path, timeout=10)
    assert (answer.status_code, answer.content) == (200, b"")
    with httpx.stream("GET", url + path) as got:
        for name in ("content-type", "cache-control", "content-security-policy"):
            assert answer.headers.get(name) == got.headers.get(name)


def test_head_leaves_nobody_watching(server: tuple[str, Any]) -> None:
    url, app = server
    assert httpx.head(f"{url}/window/events").status_code == 200
    httpx.get(f"{url}/health")
    assert app.state.live_page_feed.num_watchers == 0
    assert httpx.head(f"{url}/v1/completions").status_code == 405


def http10(url: str, method: str, path: str, body: bytes = b"") -> tuple[dict[str, str], bytes]:
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=30) as connection:
        connection.sendall(
            f"{method} {path} HTTP/1.0\r\nContent-Type: application/json\r\n".encode()
            + b"Content-Length: %d\r\n\r\n" % len(body)
            + body
        )
        data = b""
        while piece := connection.recv(65536):
            data += piece
    head, _, content = data.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    assert status.split(" ")[1] == "200", data
    return {k.lower(): v for k, _, v in (line.partition(": ") for line in lines)}, content


def test_http_1_0(url: str) -> None:
    """A client of HTTP/1.0 sends no Host, knows no chunks and reads to the connection's end."""
    headers, whole = http10(url, "POST", "/v1/completions", json.dumps(BODY).encode())
    assert headers["connection"] == "close"
    text = json.loads(whole)["choices"][0]["text"]
    headers, content = http10(url, "POST", "/v1/completions", json.dumps({**BODY, "stream": True}).encode())
    assert "transfer-encoding" not in headers
    assert headers["connection"] == "close"
    parts = content.decode().split("\n\n")
    *events, done, end = (part for part in parts if not part.startswith(":"))
    assert (done, end) == ("data: [DONE]", "")
    assert "".join(json.loads(one[6:])["choices"][0]["text"] for one in events) == text
    headers, content = http10(url, "HEAD", "/window/events")
    assert content == b""


def test_an_unknown_path_gets_one_short_line(url: str) -> None:
    answer = httpx.post(f"{url}/chat/completions", json=BODY)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (404, "invalid_request_error", "unknown_url")
    assert error["message"] == (
        "there is no POST /chat/completions; is /v1/chat/completions meant? A client's base URL ends with /v1"
    )
    message = httpx.get(f"{url}/nowhere").json()["error"]["message"]
    assert message == "there is no GET /nowhere; GET /openapi.json lists the routes"
    assert "is /v1/models meant?" in httpx.get(f"{url}/v1/v1/models").json()["error"]["message"]
    message = httpx.get(f"{url}/{'x' * 3000}").json()["error"]["message"]
    assert "x" * 65 not in message
    assert len(message) < 200
    answer = httpx.get(f"{url}/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["message"] == "expected POST for /v1/completions, got GET"


def test_addresses_as_urls() -> None:
    assert url_of("127.0.0.1", 8000) == "http://127.0.0.1:8000"
    assert url_of("::1", 8000) == "http://[::1]:8000"
    assert url_of("fe80::1%eth0", 80) == "http://[fe80::1%25eth0]:80"
    with pytest.raises(Exception, match=r"cannot listen on \[2001:db8::1\]:1"):
        bind("2001:db8::1", 1)
