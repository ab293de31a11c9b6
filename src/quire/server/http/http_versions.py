"""HEAD where GET is served, and answers to HTTP/1.0.

HTTP/1.0 has no chunks: an answer without a length ends with its connection, so that a stream is a stream there too.
(nginx sends HTTP/1.0 by default.) uvicorn alone would send chunks.

Cost: none for HTTP/1.1.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

__all__ = ["HeadAsGet", "Protocol"]


class HeadAsGet:
    """`app`, an ASGI application, with HEAD answered like GET, without the body. A stream ends before it begins."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        has_ended = False

        async def head(message: Any) -> None:
            nonlocal has_ended
            if message["type"] == "http.response.start":
                await send(message)
            elif not has_ended:
                has_ended = True
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        async def gone_when_answered() -> Any:
            return {"type": "http.disconnect"} if has_ended else await receive()

        await self._app({**scope, "method": "GET", "quire.head": True}, gone_when_answered, head)


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol; its answers to HTTP/1.0 have a length or end with the connection."""

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.scope.get("http_version") == "1.0" and self.cycle is not None:
            self.cycle.send = _without_chunks(self.cycle)  # pyright: ignore[reportAttributeAccessIssue]


def _without_chunks(cycle: RequestResponseCycle) -> Any:
    """A `send` of the cycle that never uses chunks."""
    send, has_length = cycle.send, True

    async def send_without_chunks(message: Any) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not has_length:
                cycle.chunked_encoding = False
        elif not has_length and cycle.scope["method"] != "HEAD":
            cycle.expected_content_length = len(message.get("body", b""))  # the length so far
        await send(message)

    return send_without_chunks
