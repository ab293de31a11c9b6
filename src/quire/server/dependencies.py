"""The arguments of endpoints: the service, and the tenant of the request.

All functions are `async`, though they await nothing: FastAPI calls plain functions in threads. Each request would
wait for a thread, and many requests of one client would occupy all of them.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from quire.server.api_errors import ApiError
from quire.server.api_keys import ADMIN, ANYBODY, ApiTenant
from quire.server.http.origin_check import foreign_host, foreign_origin, is_this_machine, name_of_proxy
from quire.server.http.request_log import current_request
from quire.server.service import Service

__all__ = ["TheService", "TheTenant", "administrator", "api_key_of", "service_of", "tenant_of"]


async def service_of(request: Request) -> Service:
    return request.app.state.service


TheService = Annotated[Service, Depends(service_of)]


async def tenant_of(request: Request, service: TheService) -> ApiTenant:
    """The tenant of the request's key; `ANYBODY` where the server has no keys."""
    tenant = _tenant_of_key(request, service)
    if tenant is not None:
        return tenant
    if service.settings.keys.is_empty:
        current_request().tenant = ANYBODY.name
        return ANYBODY
    got = "none" if api_key_of(request) is None else "an unknown one"
    raise ApiError(
        401,
        f"expected an API key as `Authorization: Bearer KEY` or `X-Api-Key: KEY`, got {got}",
        code="invalid_api_key",
    )


TheTenant = Annotated[ApiTenant, Depends(tenant_of)]


async def administrator(request: Request, service: TheService) -> ApiTenant:
    """The administrator: a request with the admin key or, if the server has no keys and `trust_loopback`, a request
    from this machine, through no proxy, under a name of this machine and from no other site's page (another site's
    name may point here, and its page may post here). Pages of `allowed_origins` need the admin key."""
    keys = service.settings.keys
    tenant = _tenant_of_key(request, service)
    if tenant is not None and tenant.is_admin:
        return tenant
    expected = "the admin key (or, without any keys, a request from this machine)"
    if keys.has_admin or not keys.is_empty or not service.settings.trust_loopback:
        expected = "the admin key"
    elif (proxy := name_of_proxy(request.headers)) is not None:
        expected = f"the admin key: this request came through a proxy, as its header {proxy} says"
    elif is_this_machine(request):
        if foreign_host(request, service.settings.host) is not None or "host" not in request.headers:
            expected = "this machine's own name or address as Host"
        elif foreign_origin(request) is not None:
            expected = "a request of no other site's page"
        else:
            current_request().tenant = ADMIN.name
            return ADMIN
    raise ApiError(403, f"expected {expected}", code="not_admin")


def _tenant_of_key(request: Request, service: Service) -> ApiTenant | None:
    """The tenant of the request's key, which the request's record then names; None without a known key."""
    key = api_key_of(request)
    found = None if key is None else service.settings.keys.find(key)
    if found is None:
        return None
    record = current_request()
    record.tenant, record.key = found.tenant.name, found.name
    return found.tenant


def api_key_of(request: Request) -> str | None:
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and key.strip():
        return key.strip()
    return request.headers.get("x-api-key") or None
