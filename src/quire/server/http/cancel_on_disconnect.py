"""Cancels the work on a request once its client has gone. An ASGI layer, the same for every route.

As soon as a request's body has come whole, the connection is watched while the application works: on texts, in the
engine's queue, on a prompt, on an answer, whole or streamed. When the connection closes, the application's task is
cancelled where it waits; its own `finally` blocks then abort its requests in the engine before the next step.

A client that closes only its sending side counts as gone.

Cost: a task for each request.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import Response

from quire.server.http.request_log import current_request

__all__ = ["CancelOnDisconnect"]

_GONE = 499  # for the log: the client does not read it


class CancelOnDisconnect:
    """`app`, an ASGI application; its task is cancelled once the client has gone."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answering = asyncio.current_task()
        assert answering is not None
        watching: asyncio.Task[None] | None = None
        first: Any = None
        is_gone = False

        async def watch() -> None:
            nonlocal is_gone
            while (await receive())["type"] != "http.disconnect":
                pass
            is_gone = True
            answering.cancel()

        async def receive_and_watch() -> Any:
            nonlocal first, watching
            message, first = first or await receive(), None
            if watching is None and not message.get("more_body", False):
                watching = asyncio.create_task(watch())
            return message

        try:
            if not _has_body(scope):  # the application may never call `receive` then
                first = await receive_and_watch()
            await self._app(scope, receive_and_watch, send)
        except asyncio.CancelledError:
            if not is_gone or answering.uncancel():  # this task itself is cancelled
                raise
            if current_request().status is None:
                await Response(status_code=_GONE)(scope, receive, send)
        finally:
            if watching is not None:
                watching.cancel()


def _has_body(scope: Any) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
        for name, value in scope["headers"]
    )
