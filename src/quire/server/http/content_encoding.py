"""Bodies of requests that come compressed, as some clients and gateways send long prompts: gzip and deflate.

An ASGI layer behind `BodyLimit`, which bounds what comes; this one bounds what it becomes, so that a small body does
not unpack to a large one. Another encoding is refused with 415.

Cost: none for a body that is not compressed.
"""

from __future__ import annotations

import zlib
from typing import Any

from quire.server.api_errors import ApiError, json_answer

__all__ = ["DecodedBody", "Unpacker"]

_KNOWN = ("gzip", "x-gzip", "deflate")
_EITHER = 32 + zlib.MAX_WBITS  # gzip or zlib, as the data itself says


class Unpacker:
    """What pieces of a compressed body become, at most `max_bytes`. *raises:* ApiError: it is more, or no such data."""

    def __init__(self, max_bytes: int) -> None:
        self.body = bytearray()
        self._max_bytes = max_bytes
        self._one = zlib.decompressobj(_EITHER)

    def add(self, piece: bytes) -> None:
        while piece:
            if self._one.eof:  # one behind another, as `cat a.gz b.gz` makes
                self._one = zlib.decompressobj(_EITHER)
            try:
                self.body += self._one.decompress(piece, self._max_bytes + 1 - len(self.body))
            except zlib.error as error:
                raise _damaged(str(error)) from error
            if len(self.body) > self._max_bytes:
                raise ApiError(
                    413, f"expected a body of at most {self._max_bytes} bytes, got a larger one once unpacked"
                )
            piece = self._one.unused_data or self._one.unconsumed_tail

    def end(self) -> bytes:
        if not self._one.eof:
            raise _damaged("it ends early")
        return bytes(self.body)


def _damaged(why: str) -> ApiError:
    return ApiError(
        400,
        f"expected a body packed as Content-Encoding says, got one that is not: {why}",
        code="invalid_body",
    )


class DecodedBody:
    """`app`, which is given bodies as they were before they were compressed."""

    def __init__(self, app: Any, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        said = [value for name, value in scope.get("headers", ()) if name == b"content-encoding"]
        if not said:
            await self._app(scope, receive, send)
            return
        try:
            body = await self._unpacked(b",".join(said).decode("latin-1"), receive)
        except ApiError as error:
            answer = json_answer(error)
            if error.status == 415:
                answer.headers["Accept-Encoding"] = "gzip, deflate"
            await answer(scope, receive, send)
            return
        if body is None:  # the client has gone
            return
        given = False

        async def unpacked() -> Any:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        gone = (b"content-encoding", b"content-length", b"transfer-encoding")
        scope["headers"] = [
            *(pair for pair in scope["headers"] if pair[0] not in gone),
            (b"content-length", b"%d" % len(body)),
        ]
        await self._app(scope, unpacked, send)

    async def _unpacked(self, encoding: str, receive: Any) -> bytes | None:
        names = [name for one in encoding.split(",") if (name := one.strip().lower()) not in ("", "identity")]
        if len(names) > 1 or (names and names[0] not in _KNOWN):
            raise ApiError(
                415, f"expected a body that is plain or packed with gzip or deflate, got {encoding[:64]!r}"
            )
        unpacker = Unpacker(self._max_bytes)
        plain = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            piece = message.get("body", b"")
            if names:
                unpacker.add(piece)
            else:
                plain += piece
            if not message.get("more_body", False):
                return unpacker.end() if names else bytes(plain)
