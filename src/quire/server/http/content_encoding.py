"""Compressed bodies of requests, gzip and deflate; some clients and gateways compress long prompts.

An ASGI layer behind `BodyLimit`, which bounds the compressed bytes; this layer bounds the decompressed ones, so that
a small body does not unpack to a large one. Another encoding is refused with 415.

Cost: none for a body that is not compressed.
"""

from __future__ import annotations

import zlib
from typing import Any

from quire.server.api_errors import ApiError, json_answer

__all__ = ["DecodedBody", "Unpacker"]

_KNOWN = ("gzip", "x-gzip", "deflate")
_EITHER = 32 + zlib.MAX_WBITS  # gzip or zlib, by the data's own header


class Unpacker:
    """Decompresses pieces of a body, up to `max_bytes`. *raises:* ApiError: a larger body, or damaged data."""

    def __init__(self, max_bytes: int) -> None:
        self.body = bytearray()
        self._max_bytes = max_bytes
        self._decompressor = zlib.decompressobj(_EITHER)

    def add(self, piece: bytes) -> None:
        while piece:
            if self._decompressor.eof:  # a second member, as in `cat a.gz b.gz`
                self._decompressor = zlib.decompressobj(_EITHER)
            try:
                self.body += self._decompressor.decompress(piece, self._max_bytes + 1 - len(self.body))
            except zlib.error as error:
                raise _damaged(str(error)) from error
            if len(self.body) > self._max_bytes:
                raise ApiError(
                    413, f"expected a body of at most {self._max_bytes} bytes, got a larger one once unpacked"
                )
            piece = self._decompressor.unused_data or self._decompressor.unconsumed_tail

    def end(self) -> bytes:
        if not self._decompressor.eof:
            raise _damaged("it ends early")
        return bytes(self.body)


def _damaged(reason: str) -> ApiError:
    return ApiError(
        400,
        f"expected a body compressed by its Content-Encoding, got other data: {reason}",
        code="invalid_body",
    )


class DecodedBody:
    """`app` behind the decompression of bodies."""

    def __init__(self, app: Any, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        encodings = [value for name, value in scope.get("headers", ()) if name == b"content-encoding"]
        if not encodings:
            await self._app(scope, receive, send)
            return
        try:
            body = await self._unpack(b",".join(encodings).decode("latin-1"), receive)
        except ApiError as error:
            answer = json_answer(error, scope)
            if error.status == 415:
                answer.headers["Accept-Encoding"] = "gzip, deflate"
            await answer(scope, receive, send)
            return
        if body is None:  # the client has gone
            return
        is_received = False

        async def receive_unpacked() -> Any:
            nonlocal is_received
            if is_received:
                return await receive()
            is_received = True
            return {"type": "http.request", "body": body, "more_body": False}

        replaced = (b"content-encoding", b"content-length", b"transfer-encoding")
        scope["headers"] = [
            *(pair for pair in scope["headers"] if pair[0] not in replaced),
            (b"content-length", b"%d" % len(body)),
        ]
        await self._app(scope, receive_unpacked, send)

    async def _unpack(self, encoding: str, receive: Any) -> bytes | None:
        """The decompressed body; None if the client has gone."""
        entries = (entry.strip().lower() for entry in encoding.split(","))
        names = [name for name in entries if name not in ("", "identity")]
        if len(names) > 1 or (names and names[0] not in _KNOWN):
            raise ApiError(
                415, f"expected a body that is plain or compressed by gzip or deflate, got {encoding[:64]!r}"
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
