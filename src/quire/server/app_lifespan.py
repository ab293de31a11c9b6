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
    L2  one call opens an engine, however many requests of however many event loops wait for it; neither a cancelled
        request nor the end of its loop ends the call.
    L3  after the end a request gets 503 and opens nothing. `GET /health` never opens anything.
    L4  one thread opens and closes, in this order: an engine that opens after a lifespan was cancelled is closed.
    L5  after a failure, requests open nothing for `_RETRY_S`.

Cost: a model's load; for each request one comparison. An application that was opened keeps one idle thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

from starlette.responses import JSONResponse

from quire.config import EngineConfig
from quire.engine.async_engine import AsyncEngine
from quire.engine.llm import LLM
from quire.errors import ArgumentError
from quire.server.api_errors import ApiError, json_answer
from quire.server.service import Service
from quire.server.settings import ServerSettings
from quire.server.warm_prompts import compute_all, read_warm_prompts

__all__ = ["AppLifespan", "OpenedEngine"]

_log = logging.getLogger("quire.server")

_RETRY_S = 10


class AppLifespan:
    """Opens and closes the engine of one application. *raises:* ArgumentError for another kind of engine; with an
    engine that is open, for a secret that it was not opened with, and as `Service`.
    """

    def __init__(self, app: Any, engine: AsyncEngine | LLM | EngineConfig, settings: ServerSettings) -> None:
        if not isinstance(engine, (AsyncEngine, LLM, EngineConfig)):
            raise ArgumentError(
                f"expected an AsyncEngine, an LLM or an EngineConfig, got {type(engine).__name__} - in `engine`"
            )
        self._state = app.state
        self._given = engine
        self._settings = settings
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="quire-lifespan")
        self._lock = threading.Lock()  # of the four fields below
        self._opening: Future[None] | None = None  # under way, or successful
        self._retry_at = 0.0  # of time.monotonic
        self._is_running = False
        self._has_ended = False
        self._state.warm_prompts = (
            () if settings.warm is None else read_warm_prompts(settings.warm, settings.tenants)
        )
        self._state.service = None if isinstance(engine, EngineConfig) else self._make_service()

    @property
    def is_open(self) -> bool:
        return self._state.service is not None and not self._has_ended

    @property
    def status(self) -> str:
        """The reason why it is not open."""
        return "stopping" if self._has_ended else "not_loaded" if self._opening is None else "loading"

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """The lifespan. *raises:* ArgumentError: another one is open or closing; as `LLM`; as `Service`."""
        with self._lock:
            if self._is_running:
                raise ArgumentError(
                    "expected one lifespan of the application at a time, got another one before its end; call "
                    "create_app for each server, or wait for the end"
                )
            self._is_running = True
            if self._has_ended:
                self._state.service = None
                self._has_ended = False
        warming: asyncio.Task[None] | None = None
        try:
            await self._open()
            if (service := self._state.service) is not None:
                warming = asyncio.create_task(compute_all(service, self._state.warm_prompts))
            yield
        finally:
            if warming is not None:
                warming.cancel()
            with self._lock:
                self._has_ended = True
                closing = self._worker.submit(self._close_in_thread)
            await asyncio.shield(asyncio.wrap_future(closing))

    async def open_for_request(self) -> None:
        """*raises:* ApiError 503: the model cannot be loaded, or the lifespan has ended."""
        if not self._has_ended and time.monotonic() >= self._retry_at:
            with suppress(Exception):  # the thread logs it
                await self._open()
        if self._has_ended:
            raise ApiError(503, "the server is stopping", code="stopping", retry_after_s=5)
        if not self.is_open:
            raise ApiError(
                503,
                "expected a model that can be loaded; the server's log says why it cannot",
                code="not_loaded",
                retry_after_s=_RETRY_S,
            )

    def _make_service(self) -> Service:
        """Waits for the model, if it has to be loaded."""
        given, settings = self._given, self._settings
        secrets = {"tenant_secret": settings.tenant_secret, "remote_secret": settings.remote_secret}
        secrets = {name: secret for name, secret in secrets.items() if secret is not None}
        if isinstance(given, EngineConfig):
            engine = AsyncEngine(config=replace(given, **secrets))
        else:
            for name, secret in secrets.items():
                if not given.has_secret(name, secret):
                    raise ArgumentError(
                        f"expected the {name} that the engine was opened with, got another one in the settings - "
                        f"in `{name}`; open the engine with it, or leave it out of the settings"
                    )
            engine = given if isinstance(given, AsyncEngine) else AsyncEngine(given)
        try:
            return Service(engine, settings)
        except BaseException:  # such as impossible limits of tenants
            if engine is not self._given:
                engine.close()
            raise

    async def _open(self) -> None:
        with self._lock:
            if self.is_open or self._has_ended:
                return
            if self._opening is None:
                self._opening = self._worker.submit(self._open_in_thread)
            opening = self._opening
        await asyncio.shield(asyncio.wrap_future(opening))

    def _open_in_thread(self) -> None:
        try:
            self._state.live_page_feed = None  # that of an earlier lifespan
            self._state.service = self._make_service()
        except BaseException as error:
            _log.error("the engine cannot be opened", exc_info=error)
            with self._lock:
                self._opening, self._retry_at = None, time.monotonic() + _RETRY_S
            raise

    def _close_in_thread(self) -> None:
        service = self._state.service
        try:
            if service is not None:
                service.close(closes_engine=service.engine is not self._given)
        finally:
            with self._lock:
                self._opening, self._is_running = None, False


class OpenedEngine:
    """`app`, an ASGI application, behind an engine that is open."""

    def __init__(self, app: Any, lifespan: AppLifespan) -> None:
        self._app = app
        self._lifespan = lifespan

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        answer = self._app
        if scope["type"] == "http" and not self._lifespan.is_open:
            if scope["path"].removeprefix(scope.get("root_path", "")) == "/health":
                answer = JSONResponse({"status": self._lifespan.status}, 503)
            else:
                try:
                    await self._lifespan.open_for_request()
                except ApiError as error:  # an answer that CORS headers are added to
                    answer = json_answer(error, scope)
        await answer(scope, receive, send)
