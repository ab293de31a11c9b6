"""Refuses bodies beyond a number of bytes before they are read into memory. An ASGI layer; cost: none to speak of."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

from quire.server.errors import ApiError, error_body

__all__ = ["BodyLimit"]


class BodyLimit:
    """`app` behind a limit of `max_bytes` a request, whether it says its length or not."""

    def __init__(self, app: Any, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if length.isdigit() and int(length) > self._max_bytes:
            await self._refuse(scope, receive, send)
            return
        num_read = 0
        is_refused = False

        async def counted() -> Any:
            nonlocal num_read
            message = await receive()
            num_read += len(message.get("body", b""))
            if num_read > self._max_bytes:
                raise ApiError(413, self._message)
            return message

        async def send_unless_refused(message: Any) -> None:
            nonlocal is_refused
            if num_read <= self._max_bytes:
                await send(message)
            elif not is_refused:  # whatever the application makes of the error above
                is_refused = True
                await self._refuse(scope, receive, send)

        await self._app(scope, counted, send_unless_refused)

    async def _refuse(self, scope: Any, receive: Any, send: Any) -> None:
        await JSONResponse(error_body(ApiError(413, self._message)), 413)(scope, receive, send)

    @property
    def _message(self) -> str:
        return f"expected a body of at most {self._max_bytes} bytes, got a larger one"
