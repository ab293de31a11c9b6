"""litellm, langchain-openai and curl against a server process, unchanged.

The two packages pin other versions of what we use, so they live in an environment of their own, which
`scripts/test-clients` makes and names in QUIRE_CLIENTS.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.serve_process import serving

ENVIRONMENT = os.environ.get("QUIRE_CLIENTS")
needs_environment = pytest.mark.skipif(
    not ENVIRONMENT, reason="QUIRE_CLIENTS is not set: scripts/test-clients"
)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving("--kv-memory", "64MiB") as server:
        yield server.url


@needs_environment
@pytest.mark.parametrize("client", ["litellm", "langchain"])
def test_client(url: str, client: str) -> None:
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    chat = {"messages": [{"role": "user", "content": "Write a loop."}], "max_tokens": 12, "temperature": 0}
    expected = httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=30).json()
    text = {"prompt": "def parse_args(argv):", "max_tokens": 12, "temperature": 0}
    completion = httpx.post(f"{url}/v1/completions", json=text, timeout=30).json()
    done = subprocess.run(
        [
            f"{ENVIRONMENT}/bin/python",
            Path(__file__).with_name("other_clients.py"),
            client,
            f"{url}/v1",
            model,
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    answer = expected["choices"][0]["message"]["content"]
    assert said["chat"] == said["streamed"] == said["later"] == answer
    assert said["completion"] == completion["choices"][0]["text"]
    assert said["completion_tokens"] == expected["usage"]["completion_tokens"]
    assert said["arguments"]["a"] in (1, 2)
    assert said["arguments"]["b"] in (3, 4)
    assert said["error"] == 404
    assert 0 <= said.get("age", 0) <= 99


@pytest.mark.ci
@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl(url: str) -> None:
    def curl(*arguments: str) -> str:
        return subprocess.run(
            ["curl", "-sS", "--fail-with-body", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout

    body = {"prompt": "def f(", "max_tokens": 8, "temperature": 0}
    json_type = ("-H", "Content-Type: application/json")
    whole = json.loads(curl(f"{url}/v1/completions", *json_type, "-d", json.dumps(body)))
    events = curl("-N", f"{url}/v1/completions", *json_type, "-d", json.dumps({**body, "stream": True}))
    lines = [line[6:] for line in events.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    text = "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])
    assert text == whole["choices"][0]["text"]
