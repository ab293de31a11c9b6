"""The engine of an application: opened before its first request, closed at the end of its lifespan.

    given          opened                                                     closed at the end
    AsyncEngine    by the caller                                              nothing
    LLM            an AsyncEngine over it, when the application is made       that AsyncEngine
    EngineConfig   at the start of the lifespan, else by the first request    the AsyncEngine and its LLM

A server (uvicorn, hypercorn) runs the lifespan of its application. Nothing runs that of an application mounted in
another one, unless the host's lifespan enters `app.router.lifespan_context(app)`. After an end, only the start of
another lifespan opens the engine again.

Invariants
    L1  `app.state.service` is set before a route runs.
    L2  one call opens an engine, however many requests wait for it; a request that is cancelled does not end it.
    L3  after the end a request gets 503 and opens nothing.

Cost: a model's load in a thread; for each request one comparison.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

from quire.config import EngineConfig
from quire.engine.async_engine import AsyncEngine
from quire.engine.llm import LLM
from quire.errors import ArgumentError
from quire.server.api_errors import ApiError
from quire.server.service import Service
from quire.server.settings import ServerSettings

__all__ = ["AppLifespan", "OpenedEngine"]

_log = logging.getLogger("quire.server")


class AppLifespan:
    """Opens and closes the engine of one application. *raises:* ArgumentError for another kind of engine; with an
    engine that is open, as `Service`.
    """

    def __init__(self, app: Any, engine: AsyncEngine | LLM | EngineConfig, settings: ServerSettings) -> None:
        if not isinstance(engine, (AsyncEngine, LLM, EngineConfig)):
            raise ArgumentError(
                f"expected an AsyncEngine, an LLM or an EngineConfig, got {type(engine).__name__} - in `engine`"
            )
        self._state = app.state
        self._given = engine
        self._settings = settings
        self._opening: asyncio.Task[None] | None = None
        self._has_ended = False
        self._state.service = None if isinstance(engine, EngineConfig) else self._make_service()

    @property
    def is_open(self) -> bool:
        return self._state.service is not None and not self._has_ended

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """The lifespan. *raises:* as `LLM`; as `Service`."""
        if self._has_ended:
            self._state.service = None
            self._has_ended = False
        await self._open()
        try:
            yield
        finally:
            await self._close()

    async def open_for_request(self) -> None:
        """*raises:* ApiError 503: the model cannot be loaded, or the lifespan has ended."""
        if self._has_ended:
            raise ApiError(503, "the server is stopping", code="stopping", retry_after_s=5)
        try:
            await self._open()
        except Exception as error:
            _log.error("the engine cannot be opened", exc_info=error)
            raise ApiError(
                503,
                "expected a model that can be loaded; the server's log says why it cannot",
                code="not_loaded",
            ) from error

    def _make_service(self) -> Service:
        """Waits for the model, if it has to be loaded."""
        given, settings = self._given, self._settings
        if isinstance(given, EngineConfig):
            secrets = {"tenant_secret": settings.tenant_secret, "remote_secret": settings.remote_secret}
            given = replace(given, **{name: secret for name, secret in secrets.items() if secret is not None})
            engine = AsyncEngine(config=given)
        else:
            engine = given if isinstance(given, AsyncEngine) else AsyncEngine(given)
        try:
            return Service(engine, settings)
        except BaseException:  # such as impossible limits of tenants
            if engine is not self._given:
                engine.close()
            raise

    async def _open(self) -> None:
        if self.is_open:
            return
        if self._opening is None:
            self._opening = asyncio.create_task(self._open_in_thread())
        await asyncio.shield(self._opening)

    async def _open_in_thread(self) -> None:
        try:
            self._state.service = await asyncio.to_thread(self._make_service)
            self._state.live_page_feed = None  # that of an earlier lifespan
        finally:
            self._opening = None

    async def _close(self) -> None:
        self._has_ended = True
        if self._opening is not None:
            with suppress(Exception):  # the request that began it reports the error
                await asyncio.shield(self._opening)
        service = self._state.service
        service.draining = True
        service.conversations.close()
        if service.engine is not self._given:
            await asyncio.to_thread(service.engine.close)


class OpenedEngine:
    """`app`, an ASGI application, behind an engine that is open."""

    def __init__(self, app: Any, lifespan: AppLifespan) -> None:
        self._app = app
        self._lifespan = lifespan

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and not self._lifespan.is_open:
            await self._lifespan.open_for_request()
        await self._app(scope, receive, send)
