"""A request's id, which its answer, its log line and the engine share.

The id is the client's `X-Request-Id`, if that is 1 to 128 visible ASCII characters, else a generated one. Every
answer has it in that header; a completion's own `id` ends with it; the live page, `quire top` and the engine's
messages use it for the sequences. If two open requests have one id, the second gets a number behind it (`Service`).

With `log_requests` each request is one line of the logger `LOGGER` at its end. A line has no content: no text, no
token, no query; a path only as its route.

Cost: an object for each request; one more call for each event of a stream.
"""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.server.api_errors import answer_of, json_answer
from quire.server.http.client_address import TrustedProxies

if TYPE_CHECKING:
    from quire.server.stream_progress import StreamProgress

__all__ = ["LOGGER", "RequestLog", "RequestRecord", "current_request"]

LOGGER = "quire.requests"
_log = logging.getLogger(LOGGER)
_ID = re.compile(r"[!-~]{1,128}")
_BARE = re.compile(r"[!#-<>-\[\]-~]+")  # a value that needs no quotes
_MAX_SHOWN = 80  # characters of an unknown path


@dataclass
class RequestRecord:
    """The figures of a request. Counts are tokens of all its prompts and answers together."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    address: str = ""  # the client's, see `client_address`
    tenant: str | None = None
    key: str = ""  # the name of its API key, see `ApiKey`; "" without one
    status: int | None = None  # None: no answer has begun
    num_prompt_tokens: int | None = None  # None: the request generated nothing
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    asked_report: str | None = None  # the value of the header X-Cache-Report
    asked_session: str | None = None  # the value of the header X-Session-Id
    cache_report: str | None = None  # of the answer, see `cache_report`
    progress: StreamProgress | None = (
        None  # of the answer, if it is a stream that another engine could go on with
    )

    def line(self, route: str, seconds: float) -> str:
        """NAME=VALUE words; a value with a space or a quote in it is quoted."""
        words: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "id": self.id,
            "tenant": self.tenant or "-",
            "route": route,
            "status": "-" if self.status is None else self.status,
        }
        if self.num_prompt_tokens is not None:
            words |= {
                "prompt_tokens": self.num_prompt_tokens,
                "cached_tokens": self.num_cached_tokens,
                "generated_tokens": self.num_generated_tokens,
            }
        words["seconds"] = f"{seconds:.3f}"
        if self.finish_reasons:
            words["finish"] = ",".join(sorted(set(self.finish_reasons)))
        return " ".join(f"{name}={_quoted(str(value))}" for name, value in words.items())


def _quoted(value: str) -> str:
    return value if _BARE.fullmatch(value) else json.dumps(value)


_current: ContextVar[RequestRecord] = ContextVar("quire_request")


def current_request() -> RequestRecord:
    """The record of the request that is being answered; outside of one, a new record."""
    return _current.get(None) or RequestRecord()


class RequestLog:
    """`app`, an ASGI application, with an id for each request and, if `is_logged`, a log line."""

    def __init__(self, app: Any, is_logged: bool, proxies: TrustedProxies) -> None:
        self._app = app
        self._is_logged = is_logged
        self._proxies = proxies

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = _header(scope, b"x-request-id")
        record = RequestRecord(given) if given is not None and _ID.fullmatch(given) else RequestRecord()
        record.address = self._proxies.client_of(scope)
        record.asked_report = _header(scope, b"x-cache-report")
        record.asked_session = _header(scope, b"x-session-id")
        record.progress = scope.get("quire.progress")
        began = time.monotonic()

        async def send_with_id(message: Any) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", record.id.encode())]
                if record.cache_report is not None:
                    message["headers"].append((b"x-quire-cache-report", record.cache_report.encode()))
            await send(message)

        token = _current.set(record)
        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:  # outside of this layer the answer would lack the id
            if record.status is not None:
                raise
            await json_answer(answer_of(error), scope)(scope, receive, send_with_id)
        finally:
            _current.reset(token)
            if self._is_logged:
                _log.info("%s", record.line(_route(scope), time.monotonic() - began))


def _header(scope: Any, name: bytes) -> str | None:
    """The first value of a header, as starlette reads it."""
    return next((value.decode("latin-1") for given, value in scope["headers"] if given == name), None)


def _route(scope: Any) -> str:
    method = "HEAD" if scope.get("quire.head") else scope["method"]
    path = getattr(scope.get("route"), "path", None)
    if path is None:
        path = scope["path"]
        path = path if len(path) <= _MAX_SHOWN else f"{path[:_MAX_SHOWN]}..."
    return f"{method} {path}"
