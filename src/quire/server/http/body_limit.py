"""Refuses bodies that are too large, each and all together, before they are read into memory. An ASGI layer.

Small bodies do not count in the limit of all: a client that fills it with large bodies blocks no small request.

Cost: negligible.
"""

from __future__ import annotations

from typing import Any

from quire.server.api_errors import ApiError, json_answer

__all__ = ["BodyLimit"]

_SMALL = 64 << 10  # bytes


class BodyLimit:
    """`app` behind two limits: `max_bytes` of one body, with or without a declared length, and `max_bytes_of_all` of
    the large bodies of all open requests."""

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
        num_read = num_counted = 0
        refusal: ApiError | None = None
        is_refused = False

        async def counting_receive() -> Any:
            nonlocal num_read, num_counted, refusal
            message = await receive()
            num_read += len(message.get("body", b""))
            if num_read > self._max_bytes:
                refusal = self._too_large()
            elif num_read > _SMALL:
                num_new = num_read - num_counted
                if self._num_bytes_of_all + num_new > self._max_bytes_of_all:
                    refusal = self._too_many()
                else:
                    num_counted += num_new
                    self._num_bytes_of_all += num_new
            if refusal is not None:
                raise refusal
            return message

        async def send_unless_refused(message: Any) -> None:
            nonlocal is_refused
            if refusal is None:
                await send(message)
            elif not is_refused:  # replaces the application's answer to the error above
                is_refused = True
                await _answer(refusal, scope, receive, send)

        try:
            await self._app(scope, counting_receive, send_unless_refused)
        finally:
            self._num_bytes_of_all -= num_counted

    def _too_large(self) -> ApiError:
        return ApiError(413, f"expected a body of at most {self._max_bytes} bytes, got a larger one")

    def _too_many(self) -> ApiError:
        return ApiError(
            429,
            f"too many requests: their bodies take {self._num_bytes_of_all} bytes, the limit is "
            f"{self._max_bytes_of_all}",
            code="bodies_full",
            retry_after_s=1,
        )


async def _answer(error: ApiError, scope: Any, receive: Any, send: Any) -> None:
    await json_answer(error, scope)(scope, receive, send)
