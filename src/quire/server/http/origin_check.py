"""Checks the origin of requests to a server without keys, and recognises clients on this machine.

A web page anywhere can make its reader's browser send a request to a server on the reader's machine. Two headers show
it: `Origin` is the page's site, and `Host` the name by which the browser found the server, which may be any name that
its owner made lead here (DNS rebinding). So without keys

    Host    has to be a loopback name or address, or the one that is listened on; unchecked with `insecure`
    Origin  has to be this server itself, or one of `allowed_origins`

for every path. With keys neither is checked: a page cannot know a key. A request that a proxy has passed on comes
from this machine's address without being this machine's: any header of `_FORWARDED` shows that.

Browsers let pages of `allowed_origins` read the answers; that is CORS, by Starlette's middleware.

Cost: a pass over the headers of each request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import HTTPConnection

from quire.server.api_errors import ApiError, json_answer
from quire.server.settings import ServerSettings, is_loopback

__all__ = ["OriginCheck", "foreign_host", "foreign_origin", "is_this_machine", "name_of_proxy", "with_cors"]

# Headers of proxies, balancers and tunnels. Any header that begins with x-forwarded counts, too.
_FORWARDED = frozenset(
    (
        "forwarded", "via", "x-real-ip", "x-client-ip", "x-cluster-client-ip", "true-client-ip", "client-ip",
        "cf-connecting-ip", "cf-ray", "cdn-loop", "fastly-client-ip", "fly-client-ip", "x-appengine-user-ip",
        "x-azure-clientip", "x-envoy-external-address", "x-original-forwarded-for", "x-original-host",
        "x-proxyuser-ip", "x-real-port", "x-remote-addr", "x-remote-ip", "proxy-connection",
    )
)  # fmt: skip
_METHODS = ("GET", "HEAD", "POST", "DELETE")
_EXPOSED = ("X-Request-Id", "X-Quire-Cached-Tokens", "Retry-After")


def name_of_proxy(names: Iterable[str]) -> str | None:
    """The first of the lower-case header `names` that only a proxy sends."""
    return next((name for name in names if name in _FORWARDED or name.startswith("x-forwarded")), None)


def is_this_machine(request: HTTPConnection) -> bool:
    """Whether a connection comes from a loopback address, without a proxy's header."""
    return (
        request.client is not None
        and is_loopback(request.client.host)
        and name_of_proxy(request.headers) is None
    )


def foreign_host(request: HTTPConnection, listened_on: str) -> str | None:
    """The Host header, if it is no name of this machine; None without one, which browsers always send."""
    host = request.headers.get("host")
    if host is None:
        return None
    name = re.sub(r":\d*$", "", host.strip().lower()).removeprefix("[").removesuffix("]").removesuffix(".")
    return None if is_loopback(name) or name == listened_on.lower() else host


def foreign_origin(request: HTTPConnection, allowed: Iterable[str] = ()) -> str | None:
    """The Origin header, if it is neither allowed nor this server by the name in Host."""
    origin = request.headers.get("origin")
    if origin is None or origin.lower() in allowed:
        return None
    host = request.headers.get("host", "")
    return None if host and origin.lower().partition("://")[2] == host.lower() else origin


class OriginCheck:
    """`app`, an ASGI application, behind the checks described above."""

    def __init__(self, app: Any, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        refusal = self._refusal(HTTPConnection(scope)) if scope["type"] == "http" else None
        await (self._app if refusal is None else json_answer(refusal, scope))(scope, receive, send)

    def _refusal(self, request: HTTPConnection) -> ApiError | None:
        settings = self._settings
        if not settings.keys.is_empty:
            return None
        if settings.is_loopback and not settings.insecure:
            host = foreign_host(request, settings.host)
            if host is not None:
                return ApiError(
                    403,
                    f"expected this machine's own name or address as Host, got {host[:64]!r}: without keys this server "
                    "answers this machine only; give it keys, or say --insecure to answer other machines",
                    code="foreign_host",
                )
        origin = foreign_origin(request, settings.allowed_origins)
        if origin is not None:
            return ApiError(
                403,
                f"expected a request from no other site's page, got one from {origin[:64]!r}; --allowed-origins lets "
                "a site in",
                code="foreign_origin",
            )
        return None


def with_cors(app: Any, origins: Iterable[str]) -> Any:
    """`app` with the CORS headers that let pages of these origins send any header and read the answers."""
    return CORSMiddleware(
        app,
        allow_origins=list(origins),
        allow_methods=_METHODS,
        allow_headers=("*",),
        expose_headers=_EXPOSED,
        max_age=600,
    )
