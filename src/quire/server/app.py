"""The API as an ASGI application over one engine.

It runs under any ASGI server, or mounted in another application, at any path. It changes nothing of its process: no
signal handler, no logger, no event loop policy, no garbage collection. Only `quire serve` (`run`) bounds connections
and the time in which a request arrives; here the host's server does.
"""

from __future__ import annotations

import logging
from contextlib import AbstractAsyncContextManager

from fastapi import FastAPI

from quire.config import EngineConfig
from quire.engine.async_engine import AsyncEngine
from quire.engine.llm import LLM
from quire.server import (
    admin,
    chat,
    completions,
    conversations,
    models,
    openai_conversations,
    responses,
)
from quire.server.anthropic import messages_routes
from quire.server.api_errors import install_handlers
from quire.server.app_lifespan import AppLifespan, OpenedEngine
from quire.server.http.body_limit import BodyLimit
from quire.server.http.cancel_on_disconnect import CancelOnDisconnect
from quire.server.http.content_encoding import DecodedBody
from quire.server.http.http_versions import HeadAsGet
from quire.server.http.origin_check import OriginCheck, with_cors
from quire.server.http.request_log import RequestLog
from quire.server.live_page import routes
from quire.server.sessions import session_routes
from quire.server.settings import ServerSettings

__all__ = ["create_app"]

_log = logging.getLogger("quire")


def create_app(engine: AsyncEngine | LLM | EngineConfig, settings: ServerSettings | None = None) -> FastAPI:
    """The application. engine: an open one, which stays the caller's to close, or the config of one that the
    application opens and closes, see `app_lifespan`. settings: all at their defaults if not given; their secrets
    replace those of an EngineConfig.

    Logs the settings' warnings (logger "quire"). *raises:* ArgumentError: another kind of engine, or secrets or limits
    of tenants that the open engine does not have.
    """
    settings = ServerSettings() if settings is None else settings

    def lifespan(app: FastAPI) -> AbstractAsyncContextManager[None]:
        return engine_lifespan.run()

    app = FastAPI(
        title="Quire",
        summary="The OpenAI API on a paged, shared and persistent KV cache.",
        docs_url=None,  # FastAPI's page loads scripts from other hosts
        redoc_url=None,
        lifespan=lifespan,
    )
    engine_lifespan = AppLifespan(app, engine, settings)
    for warning in settings.warnings:
        _log.warning(warning)
    install_handlers(app)
    app.include_router(completions.router)
    app.include_router(chat.router)
    app.include_router(responses.router)
    app.include_router(openai_conversations.router)
    app.include_router(messages_routes.router)
    app.include_router(session_routes.router)
    app.include_router(conversations.router)
    app.include_router(models.router)
    app.include_router(models.health_router)
    app.include_router(admin.router)
    app.include_router(routes.router)
    limits = settings.limits
    app.add_middleware(OpenedEngine, lifespan=engine_lifespan)
    app.add_middleware(CancelOnDisconnect)
    app.add_middleware(DecodedBody, max_bytes=limits.max_body_bytes)
    app.add_middleware(BodyLimit, max_bytes=limits.max_body_bytes, max_bytes_of_all=limits.max_bodies_bytes)
    if settings.allowed_origins:
        app.add_middleware(with_cors, origins=settings.allowed_origins)
    app.add_middleware(OriginCheck, settings=settings)
    app.add_middleware(RequestLog, is_logged=settings.log_requests, proxies=settings.proxies)
    app.add_middleware(HeadAsGet)
    return app
