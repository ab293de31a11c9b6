"""Test clients of the live page: plain requests, a reader of the events, a request that runs meanwhile."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

__all__ = ["Generating", "Watcher", "ask"]


def ask(
    url: str, path: str, key: str | None = None, body: Any = None, method: str | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    data = None
    if body is not None:
        data, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
    request = urllib.request.Request(url + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, dict(response.headers), response.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


class Watcher:
    """A connection to the events."""

    def __init__(self, url: str, key: str | None = None) -> None:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        request = urllib.request.Request(url + "/window/events", headers=headers)
        self.response = urllib.request.urlopen(request, timeout=30)
        self.raw = b""
        self.state: dict[str, Any] = {}
        self.next()

    def next(self) -> dict[str, Any]:
        while True:
            line = self.response.readline()
            assert line, "the stream has ended"
            self.raw += line
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                self.state |= event
                return event

    def until(self, is_reached: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        for _ in range(100):
            if is_reached(self.state):
                return self.state
            self.next()
        raise AssertionError(f"not reached: {sorted(self.state)}")

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *error: object) -> None:
        self.response.close()


class Generating:
    """A request that runs until the block ends."""

    def __init__(self, url: str, prompt: str, key: str | None = None) -> None:
        host = url.removeprefix("http://")
        self.connection = http.client.HTTPConnection(host, timeout=60)
        body = {"prompt": prompt, "max_tokens": 1500, "ignore_eos": True, "stream": True}
        headers = {"Content-Type": "application/json"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        self.connection.request("POST", "/v1/completions", json.dumps(body), headers)
        self.response = self.connection.getresponse()
        assert self.response.status == 200
        line = self.response.readline()
        self.id = self.response.headers["x-request-id"]
        assert json.loads(line[6:])["id"] == f"cmpl-{self.id}"

    def __enter__(self) -> Generating:
        return self

    def __exit__(self, *error: object) -> None:
        self.response.close()
        self.connection.close()
