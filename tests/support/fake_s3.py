"""A server with the part of S3's protocol that a store uses, in this process, with faults on demand.

It checks the access key, has a clock of its own, and keeps its objects in a dict of the caller.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET, ACCESS_KEY, SECRET_KEY = "quire-kv", "an-access-key", "a-secret-key-of-tests"


@dataclass
class FakeS3:
    """fault(method): asked before each request; (status, code) of an error answer, or None. ahead_s: of its clock.

    objects: by name, (bytes, the server's time of the store). num_requests: by method.
    """

    objects: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    fault: Callable[[str], tuple[int, str] | None] = lambda method: None
    ahead_s: float = 0.0
    page_size: int = 1000
    num_requests: dict[str, int] = field(default_factory=dict)

    def now(self) -> float:
        return time.time() + self.ahead_s


@contextmanager
def fake_s3(server: FakeS3 | None = None, *, port: int = 0) -> Iterator[tuple[str, FakeS3]]:
    """The URL of a bucket on the server, and the server."""
    state = FakeS3() if server is None else server
    handler = type("Handler", (_Handler,), {"state": state})
    http = ThreadingHTTPServer(("127.0.0.1", port), handler)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"s3://{BUCKET}/tests?endpoint=http://127.0.0.1:{http.server_port}&addressing=path", state
    finally:
        http.shutdown()
        http.server_close()
        thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 10
    state: FakeS3

    def do_GET(self) -> None:
        self._begin()

    def do_HEAD(self) -> None:
        self._begin()

    def do_PUT(self) -> None:
        self._begin()

    def do_DELETE(self) -> None:
        self._begin()

    def _begin(self) -> None:
        state, method = self.state, self.command
        state.num_requests[method] = state.num_requests.get(method, 0) + 1
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.server.socket.fileno() < 0:  # stopped, but for its open connections
            self.close_connection = True
            return None
        found = re.search(r"Credential=([^/]+)/", self.headers.get("Authorization", ""))
        if found is None or found[1] != ACCESS_KEY:
            return self._refuse(403, "InvalidAccessKeyId")
        fault = state.fault(method)
        if fault is not None:
            return self._refuse(*fault)
        parts = urlsplit(self.path)
        _, bucket, name = (
            unquote(parts.path).split("/", 2) if parts.path.count("/") > 1 else (*parts.path.split("/"), "")
        )
        if bucket != BUCKET:
            return self._refuse(404, "NoSuchBucket")
        if not name:
            return self._list(parse_qs(parts.query))
        match method:
            case "PUT":
                state.objects[name] = (body, state.now())
                return self._answer(200)
            case "DELETE":
                state.objects.pop(name, None)
                return self._answer(204)
        if name not in state.objects:
            return self._refuse(404, "NoSuchKey")
        content, stored_at = state.objects[name]
        return self._answer(200, content, {"Last-Modified": formatdate(stored_at, usegmt=True)})

    def _list(self, query: dict[str, list[str]]) -> None:
        prefix, after = query.get("prefix", [""])[0], query.get("continuation-token", [""])[0]
        names = sorted(name for name in self.state.objects if name.startswith(prefix) and name > after)
        page = names[: min(self.state.page_size, int(query.get("max-keys", ["1000"])[0]))]
        is_cut = len(page) < len(names)
        items = "".join(map(self._item, page))
        more = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if is_cut else ""
        text = f"<ListBucketResult><IsTruncated>{str(is_cut).lower()}</IsTruncated>{more}{items}</ListBucketResult>"
        self._answer(200, text.encode(), {"Content-Type": "application/xml"})

    def _item(self, name: str) -> str:
        content, stored_at = self.state.objects[name]
        when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(stored_at))
        fields = {"Key": escape(name), "Size": len(content), "LastModified": when}
        return (
            "<Contents>" + "".join(f"<{tag}>{text}</{tag}>" for tag, text in fields.items()) + "</Contents>"
        )

    def _refuse(self, status: int, code: str) -> None:
        text = f"<Error><Code>{code}</Code><Message>refused {self.headers.get('Authorization', '')}</Message></Error>"
        self._answer(status, text.encode(), {"Content-Type": "application/xml"})

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def date_time_string(self, timestamp: float | None = None) -> str:
        return formatdate(self.state.now() if timestamp is None else timestamp, usegmt=True)

    def log_message(self, format: str, *arguments: Any) -> None: ...
