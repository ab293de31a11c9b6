"""An engine whose steps a test releases one by one, and raw connections to a server over it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from quire import LLM


class HeldSteps:
    """num_begun: steps that have begun, a held one too; `go(n)` lets n of them through, `go_on` all from now on."""

    def __init__(self, llm: LLM) -> None:
        self.num_begun = 0
        self._step = llm.engine.step
        self._permits = threading.Semaphore(0)
        self._is_free = False

    def __call__(self) -> Any:
        self.num_begun += 1
        if not self._is_free:
            self._permits.acquire()
        return self._step()

    def go(self, num_steps: int) -> None:
        self._permits.release(num_steps)

    def go_on(self) -> None:
        self._is_free = True
        self._permits.release(1000)


@contextmanager
def held_steps(llm: LLM) -> Iterator[HeldSteps]:
    steps = HeldSteps(llm)
    llm.engine.step = steps  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        del llm.engine.step  # type: ignore[misc]
        steps.go_on()


def is_idle(llm: LLM) -> bool:
    """Whether no sequence is open and no block in use."""
    counts = llm.cache.stats()
    return counts["held"] == counts["in_flight"] == counts["num_sequences"] == 0


class Raw:
    """A client below HTTP: one request on a connection that the test closes when it likes."""

    def __init__(self, url: str, path: str, body: Any, *, headers: str = "", behind: bytes = b"") -> None:
        parts = urlsplit(url)
        content = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{headers}"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        self.connection = socket.create_connection((parts.hostname, parts.port), timeout=60)
        self.connection.sendall(head.encode() + content + behind)
        self.data = b""

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self.connection.close()

    def read_to(self, what: bytes, count: int = 1) -> bytes:
        """All that has come, once `what` is in it so many times."""
        while self.data.count(what) < count:
            piece = self.connection.recv(65536)
            assert piece, f"the connection ended behind {self.data!r}"
            self.data += piece
        return self.data

    @property
    def events(self) -> list[str]:
        """What the answer's events say, of an answer that has come whole."""
        head, _, rest = self.data.partition(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head.lower(), head
        text = b""
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            text, rest = text + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
        parts = text.decode().split("\n\n")
        assert parts.pop() == ""
        return [part.removeprefix("data: ") for part in parts if not part.startswith(":")]
