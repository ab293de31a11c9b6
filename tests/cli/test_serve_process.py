"""`quire serve` as a process: it ends on request, names a failed start's reason in one line, and keeps its secrets."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from support.serve_process import ServeProcess, serving
from support.until import until

pytestmark = pytest.mark.ci  # a process takes seconds to start

SHORT = {"prompt": "def f(", "max_tokens": 2, "temperature": 0}
NUM_LONG = 8 * 600
# Some 10 MB of events, more than sockets hold: while the client does not read, the answer is under way.
LONG = {
    "prompt": "def f(", "max_tokens": 600, "n": 8, "logprobs": 20, "ignore_eos": True, "temperature": 0, "stream": True
}  # fmt: skip


def stream_of(server: ServeProcess, body: dict) -> socket.socket:
    """A connection on which the answer to `body` has begun."""
    parts = urlsplit(server.url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(60)
    connection.connect((parts.hostname, parts.port))
    content = json.dumps(body).encode()
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(content) + content
    )
    assert connection.recv(12) == b"HTTP/1.1 200"
    return connection


def rest_of(connection: socket.socket) -> bytes:
    data = b""
    try:
        while piece := connection.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return data


def wait_for_draining(server: ServeProcess) -> None:
    until(lambda: httpx.get(f"{server.url}/ready").status_code == 503)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_lets_requests_finish(number: signal.Signals) -> None:
    with serving("--kv-memory", "32MiB") as server:
        connection = stream_of(server, LONG)
        server.process.send_signal(number)
        wait_for_draining(server)
        refused = httpx.post(f"{server.url}/v1/completions", json=SHORT)
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        whole = rest_of(connection)
        assert b"[DONE]" in whole
        assert whole.count(b'"text":') >= NUM_LONG
        assert server.wait() == 0
        assert "Traceback" not in server.log()


def test_the_second_signal_stops_at_once(tmp_path: Path) -> None:
    config = tmp_path / "quire.toml"
    config.write_text("[server]\ndrain_seconds = 300\n")
    with serving("--kv-memory", "64MiB", "--config", str(config)) as server:
        connection = stream_of(server, LONG)
        server.process.send_signal(signal.SIGTERM)
        wait_for_draining(server)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait(100) == 0
        cut = rest_of(connection)
        assert b'"error":' in cut
        assert cut.count(b'"text":') < NUM_LONG
        assert "Traceback" not in server.log()


def test_what_drains_too_long_is_ended(tmp_path: Path) -> None:
    config = tmp_path / "quire.toml"
    config.write_text("[server]\ndrain_seconds = 0.3\n")
    with serving("--kv-memory", "64MiB", "--config", str(config)) as server, ThreadPoolExecutor(1) as thread:
        # A client that does not read gets no last event: its socket is full.
        reading = thread.submit(rest_of, stream_of(server, LONG))
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        cut = reading.result()
        assert b'"error":' in cut
        assert cut.count(b'"text":') < NUM_LONG


def test_what_was_cached_is_on_disk_after_the_end(tmp_path: Path) -> None:
    body = {"prompt": list(range(3, 200)), "max_tokens": 2, "temperature": 0}
    cached = []
    for _ in range(2):
        with serving("--kv-memory", "32MiB", "--disk-cache", str(tmp_path / "kv")) as server:
            usage = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
            server.process.send_signal(signal.SIGTERM)
            assert server.wait() == 0
    assert cached[0] == 0
    assert cached[1] >= 128


# -- what does not start -------------------------------------------------------------------------------


def refusal(*arguments: str) -> tuple[int, str]:
    """(exit status, the one line) of a `quire serve` that does not start."""
    done = subprocess.run(
        [sys.executable, "-m", "quire", "serve", *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("quire: ")
    return done.returncode, line


def test_a_busy_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, line = refusal("--port", str(port))
    assert status == 2
    assert str(port) in line
    assert "in use" in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--port", "x"], "expected a port of 0 to 65535, got 'x' - as --port"),
        (["--port", "70000"], "70000"),
        (["--colour", "red"], "--colour"),
        (["--host", "0.0.0.0"], "--insecure"),
        (["--host", "203.0.113.9", "--insecure", "--port", "0"], "203.0.113.9"),
        (["--config", "/nowhere/at/all.toml"], "/nowhere/at/all.toml"),
        (["--api-key-file", "/nowhere/keys"], "/nowhere/keys"),
        (["--port", "0", "--kv-memory", "lots"], "lots"),
        (["--port", "0", "--storage", "cloud"], "cloud"),
        (["--port", "0", "/nowhere/model"], "/nowhere/model"),
    ],
)
def test_bad_flags(arguments: list[str], said: str) -> None:
    status, line = refusal(*arguments)
    assert status in (1, 2)
    assert status == 2 or "model" in said
    assert said in line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[server\n", "TOML"),
        ("\udcff", "TOML"),
        ("[server]\nprot = 1\n", "prot"),
        ('[server]\nport = "a"\n', "port"),
        ("[model]\nkv_memroy = 1\n", "kv_memroy"),
        ("[[tenants]]\nname = 'a'\n", "keys"),
        ("[[tenants]]\nname = 'a'\nkeys = ['hush-1', 'hush-1']\n", "twice"),
        ("[[tenants]]\nname = 'a'\nkeys = ['sha256:hush']\n", "64"),
        ("[[tenants]]\nname = 'a'\nkeys = ['env:QUIRE_NOT_SET']\n", "QUIRE_NOT_SET"),
    ],
)
def test_bad_configurations(tmp_path: Path, text: str, said: str) -> None:
    config = tmp_path / "quire.toml"
    config.write_bytes(text.encode("utf-8", "surrogateescape"))
    status, line = refusal("--config", str(config))
    assert status == 2
    assert said in line
    assert "hush" not in line


@pytest.mark.parametrize(
    ("limits", "storage", "said"),
    [
        ("quota = '8MiB'", "growing", "use storage paged"),
        ("floor = '1MiB'", "contiguous", "use storage paged"),
        ("floor = '1GiB'", "paged", "floor"),
    ],
)
def test_limits_of_tenants_that_cannot_be(tmp_path: Path, limits: str, storage: str, said: str) -> None:
    config = tmp_path / "quire.toml"
    config.write_text(f"[[tenants]]\nname = 'alice'\nkeys = ['hush']\n{limits}\n")
    status, line = refusal(
        "--config", str(config), "--storage", storage, "--kv-memory", "32MiB", "--port", "0"
    )
    assert status == 2
    assert said in line
    assert "alice" in line


@pytest.mark.parametrize("storage", ["contiguous", "growing", "virtual"])
def test_tenants_on_every_storage(tmp_path: Path, storage: str) -> None:
    config = tmp_path / "quire.toml"
    config.write_text(
        "[[tenants]]\nname = 'alice'\nkeys = ['key-a']\npriority = 1\nmax_requests = 1\n"
        "[[tenants]]\nname = 'bob'\nkeys = ['key-b']\nrequests_per_minute = 1\n"
    )
    with serving("--config", str(config), "--storage", storage, "--kv-memory", "32MiB") as server:

        def ask(key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            return httpx.post(
                f"{server.url}/v1/completions", json=SHORT, headers=headers, timeout=60
            ).status_code

        assert [ask("key-a"), ask("key-a"), ask("key-b"), ask("key-b"), ask("key-c")] == [
            200, 200, 200, 429, 401,
        ]  # fmt: skip


def test_keys_are_nowhere_to_be_read(tmp_path: Path) -> None:
    secrets = {"TENANT_KEY": "sesame-tenant-51c1", "ADMIN_KEY": "sesame-admin-9d2e"}
    config = tmp_path / "quire.toml"
    config.write_text(
        '[server]\nadmin_key = "env:ADMIN_KEY"\n[[tenants]]\nname = "a"\nkeys = ["env:TENANT_KEY", "sesame-plain-77"]\n'
    )
    with serving("--kv-memory", "32MiB", "--log-requests", "--config", str(config), env=secrets) as server:
        seen = ""
        for key in (*secrets.values(), "sesame-plain-77", "sesame-wrong-1"):
            headers = {"Authorization": f"Bearer {key}"}
            for path in ("/metrics", "/health", "/ready", "/v1/models", "/openapi.json", "/nothing"):
                seen += httpx.get(server.url + path, headers=headers).text
            for body in (SHORT, {"prompt": ""}, {"prompt": "a", "model": "b"}):
                seen += httpx.post(f"{server.url}/v1/completions", json=body, headers=headers).text
        assert '"text"' in seen
        server.process.send_signal(signal.SIGTERM)
        server.wait()
        assert "sesame" not in seen
        assert "sesame" not in server.log()
        assert 'tenant=a route="POST /v1/completions" status=200 prompt_tokens=3' in server.log()
