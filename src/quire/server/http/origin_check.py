"""Where requests come from: what a server that asks nobody for a key lets in, and who counts as this machine.

A web page anywhere can have its reader's browser ask a server on the reader's machine. Two headers tell: `Origin` is
the page's site, and `Host` the name under which the browser found the server, which is a name of the page's own choice
where that name was made to lead here (DNS rebinding). So without keys

    Host    is a loopback name or address, or the one that is listened on; not asked of a server that says `insecure`
    Origin  is this server itself, or one of `allowed_origins`

for every path. With keys neither is asked for: a page cannot know one. A request that a proxy has passed on comes from
this machine and is nobody of this machine: any header of `_FORWARDED` says so.

Browsers read answers from pages of `allowed_origins` only; that is CORS, which Starlette's middleware speaks.

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

# What proxies, balancers and tunnels add. Any that begins with x-forwarded counts too.
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
    """The first header, of lower-case `names`, that only a proxy sends."""
    return next((name for name in names if name in _FORWARDED or name.startswith("x-forwarded")), None)


def is_this_machine(request: HTTPConnection) -> bool:
    """Whether a connection comes from a loopback address, through no proxy that says so."""
    return (
        request.client is not None
        and is_loopback(request.client.host)
        and name_of_proxy(request.headers) is None
    )


def foreign_host(request: HTTPConnection, listened_on: str) -> str | None:
    """The Host, where it is no name of this machine; no browser leaves it out."""
    host = request.headers.get("host")
    if host is None:
        return None
    name = re.sub(r":\d*$", "", host.strip().lower()).removeprefix("[").removesuffix("]").removesuffix(".")
    return None if is_loopback(name) or name == listened_on.lower() else host


def foreign_origin(request: HTTPConnection, allowed: Iterable[str] = ()) -> str | None:
    """The Origin, where it is neither this server under the name that it was asked by, nor allowed."""
    origin = request.headers.get("origin")
    if origin is None or origin.lower() in allowed:
        return None
    host = request.headers.get("host", "")
    return None if host and origin.lower().partition("://")[2] == host.lower() else origin


class OriginCheck:
    """`app`, an ASGI application, behind the rules of the module's text."""

    def __init__(self, app: Any, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        refused = self._refusal(HTTPConnection(scope)) if scope["type"] == "http" else None
        await (self._app if refused is None else json_answer(refused))(scope, receive, send)

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
                    "answers this machine only; give it keys, or say --insecure where it shall answer others",
                    code="foreign_host",
                )
        origin = foreign_origin(request, settings.allowed_origins)
        if origin is not None:
            return ApiError(
                403,
                f"expected a request of no other site's page, got one of {origin[:64]!r}; allowed_origins lets some in",
                code="foreign_origin",
            )
        return None


def with_cors(app: Any, origins: Iterable[str]) -> Any:
    """`app`, which tells browsers that pages of these origins may ask it, with any header, and read its answers."""
    return CORSMiddleware(
        app,
        allow_origins=list(origins),
        allow_methods=_METHODS,
        allow_headers=("*",),
        expose_headers=_EXPOSED,
        max_age=600,
    )
