"""The API as an ASGI application over one engine."""

from __future__ import annotations

from fastapi import FastAPI

from quire.engine.async_engine import AsyncEngine
from quire.server import admin, chat, completions, conversations, models
from quire.server.api_errors import install_handlers
from quire.server.http.body_limit import BodyLimit
from quire.server.http.cancel_on_disconnect import CancelOnDisconnect
from quire.server.http.content_encoding import DecodedBody
from quire.server.http.http_versions import HeadAsGet
from quire.server.http.origin_check import OriginCheck, with_cors
from quire.server.http.request_log import RequestLog
from quire.server.live_page import comparison_sessions, routes
from quire.server.service import Service
from quire.server.settings import ServerSettings

__all__ = ["make_app"]


def make_app(engine: AsyncEngine, settings: ServerSettings) -> FastAPI:
    """The application; closing the engine is the caller's."""
    app = FastAPI(
        title="Quire",
        summary="The OpenAI API on a paged, shared and persistent KV cache.",
        docs_url=None,  # FastAPI's page loads scripts from other hosts
        redoc_url=None,
    )
    app.state.service = Service(engine, settings)
    install_handlers(app)
    app.include_router(completions.router)
    app.include_router(chat.router)
    app.include_router(conversations.router)
    app.include_router(models.router)
    app.include_router(models.health_router)
    app.include_router(admin.router)
    app.include_router(comparison_sessions.router)
    app.include_router(routes.router)
    limits = settings.limits
    app.add_middleware(CancelOnDisconnect)
    app.add_middleware(DecodedBody, max_bytes=limits.max_body_bytes)
    app.add_middleware(BodyLimit, max_bytes=limits.max_body_bytes, max_bytes_of_all=limits.max_bodies_bytes)
    if settings.allowed_origins:
        app.add_middleware(with_cors, origins=settings.allowed_origins)
    app.add_middleware(OriginCheck, settings=settings)
    app.add_middleware(RequestLog, is_logged=settings.log_requests, proxies=settings.proxies)
    app.add_middleware(HeadAsGet)
    return app
