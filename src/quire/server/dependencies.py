"""What endpoints are given: the service, and who asks."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Coroutine
from typing import Annotated, Any

from fastapi import Depends, Request, Response

from quire.server.errors import ApiError
from quire.server.service import Service
from quire.server.tenants import ADMIN, ANYBODY, Tenant

__all__ = ["TheService", "TheTenant", "administrator", "service_of", "tenant_of", "unless_gone"]

_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")


def service_of(request: Request) -> Service:
    return request.app.state.service


TheService = Annotated[Service, Depends(service_of)]


def tenant_of(request: Request, service: TheService) -> Tenant:
    """Whose key the request brings; anybody where the server has no keys."""
    keys = service.settings.keys
    key = _key(request)
    tenant = None if key is None else keys.find(key)
    if tenant is not None:
        return tenant
    if keys.is_empty:
        return ANYBODY
    what = "none" if key is None else "one that is unknown here"
    raise ApiError(
        401, f"expected an API key as `Authorization: Bearer KEY`, got {what}", code="invalid_api_key"
    )


TheTenant = Annotated[Tenant, Depends(tenant_of)]


def administrator(request: Request, service: TheService) -> Tenant:
    """The administrator: by the admin key or, where there is no key at all, from this machine, under a name of this
    machine and from no other site's page: another site's name may point here, and its page may post here."""
    keys = service.settings.keys
    key = _key(request)
    tenant = None if key is None else keys.find(key)
    if tenant is not None and tenant.is_admin:
        return tenant
    if not keys.has_admin and keys.is_empty and _is_local(request):
        host = request.headers.get("host", "")
        origin = request.headers.get("origin")
        if (host if host.endswith("]") else host.rpartition(":")[0] or host) not in _LOCAL_NAMES:
            raise ApiError(403, "expected this machine's own name or address as Host", code="not_admin")
        if origin is not None and origin.partition("://")[2] != host:
            raise ApiError(403, "expected a request of no other site's page", code="not_admin")
        return ADMIN
    raise ApiError(
        403, "expected the admin key (or, without any keys, a request from this machine)", code="not_admin"
    )


async def unless_gone(request: Request, answer: Coroutine[Any, Any, Response]) -> Response:
    """The answer, or nothing of note once the client has gone: what was asked for is cancelled then."""
    answering = asyncio.ensure_future(answer)

    async def monitor() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        answering.cancel()

    watching = asyncio.create_task(monitor())
    try:
        return await answering
    except asyncio.CancelledError:
        if not watching.done():  # it is we who are cancelled
            answering.cancel()
            raise
        return Response(status_code=499)
    finally:
        watching.cancel()


def _key(request: Request) -> str | None:
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and key.strip():
        return key.strip()
    return request.headers.get("x-api-key") or None


def _is_local(request: Request) -> bool:
    try:
        return request.client is not None and ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False
