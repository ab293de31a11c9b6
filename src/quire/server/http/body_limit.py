"""Refuses bodies beyond a number of bytes before they are read into memory, one by one and all together. An ASGI layer.

Small bodies do not count in what all may have: whoever fills that with large ones keeps nobody from asking.

Cost: none to speak of.
"""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

from quire.server.api_errors import ApiError, error_body

__all__ = ["BodyLimit"]

_SMALL = 64 << 10  # bytes


class BodyLimit:
    """`app` behind a limit of `max_bytes` a request, whether it says its length or not, and of `max_bytes_of_all` that
    the large ones of the requests under way may have."""

    def __init__(self, app: Any, max_bytes: int, max_bytes_of_all: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_bytes_of_all = max_bytes_of_all
        self._num_bytes_of_all = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if length.isdigit() and int(length) > self._max_bytes:
            await _answer(self._too_large(), scope, receive, send)
            return
        num_read = num_taken = 0
        refusal: ApiError | None = None
        is_refused = False

        async def counted() -> Any:
            nonlocal num_read, num_taken, refusal
            message = await receive()
            num_read += len(message.get("body", b""))
            if num_read > self._max_bytes:
                refusal = self._too_large()
            elif num_read > _SMALL:
                more = num_read - num_taken
                if self._num_bytes_of_all + more > self._max_bytes_of_all:
                    refusal = self._too_many()
                else:
                    num_taken += more
                    self._num_bytes_of_all += more
            if refusal is not None:
                raise refusal
            return message

        async def send_unless_refused(message: Any) -> None:
            nonlocal is_refused
            if refusal is None:
                await send(message)
            elif not is_refused:  # whatever the application makes of the error above
                is_refused = True
                await _answer(refusal, scope, receive, send)

        try:
            await self._app(scope, counted, send_unless_refused)
        finally:
            self._num_bytes_of_all -= num_taken

    def _too_large(self) -> ApiError:
        return ApiError(413, f"expected a body of at most {self._max_bytes} bytes, got a larger one")

    def _too_many(self) -> ApiError:
        return ApiError(
            429,
            f"too many requests: their bodies take {self._num_bytes_of_all} bytes, at most {self._max_bytes_of_all} "
            "may",
            code="bodies_full",
            retry_after_s=1,
        )


async def _answer(error: ApiError, scope: Any, receive: Any, send: Any) -> None:
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    await JSONResponse(error_body(error), error.status, headers)(scope, receive, send)
