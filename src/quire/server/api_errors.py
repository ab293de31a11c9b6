"""Errors of the API: a status and a body, never a traceback.

    {"error": {"message": ..., "type": ..., "param": null or the field, "code": a word}}

This is OpenAI's form. Paths of another API have a form of their own (`register_error_form`).

`invalid_request_error` (400, 404, 405, 409, 413, 415), `authentication_error` (401), `permission_error` (403),
`rate_limit_error` (429, with Retry-After), `service_unavailable` (503), `internal_error` (500).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Container, Mapping
from http import HTTPStatus
from typing import Any, Protocol

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from quire.errors import (
    ArgumentError,
    CancelledError,
    CapacityError,
    PromptTooLongError,
    QuireError,
    with_flag_names,
)

__all__ = [
    "ApiError",
    "ErrorForm",
    "answer_of",
    "error_body",
    "error_form",
    "install_handlers",
    "json_answer",
    "register_error_form",
]

_log = logging.getLogger("quire.server")

_NAMED_FIELD = re.compile(r" - in `([a-z_.]+)`")  # how the engine's errors name an argument
_MAX_SHOWN = 64  # characters of a wrong value or path

# Codes of errors without a more specific one; OpenAI's where OpenAI has one.
_CODES = {
    400: "invalid_value",
    401: "invalid_api_key",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    409: "conflict",
    413: "body_too_large",
    414: "url_too_long",
    415: "unsupported_encoding",
    429: "rate_limit_exceeded",
    431: "headers_too_large",
    500: "internal_error",
    503: "service_unavailable",
}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "internal_error",
    503: "service_unavailable",
}


class ApiError(Exception):
    """An error answer to a request."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code or _CODES.get(status, "invalid_request")
        self.retry_after_s = retry_after_s


def error_body(error: ApiError) -> dict[str, Any]:
    return {
        "error": {
            "message": str(error),
            "type": _TYPES.get(error.status, "invalid_request_error"),
            "param": error.param,
            "code": error.code,
        }
    }


class ErrorForm(Protocol):
    """How the errors of one API are written."""

    @property
    def event_name(self) -> str | None:
        """The name of a stream's event with an error; None for an event without a name."""

    def status(self, error: ApiError) -> int: ...
    def body(self, error: ApiError) -> dict[str, Any]: ...
    def headers(self, error: ApiError) -> dict[str, str]: ...


class _OpenAIErrorForm:
    event_name = None

    def status(self, error: ApiError) -> int:
        return error.status

    def body(self, error: ApiError) -> dict[str, Any]:
        return error_body(error)

    def headers(self, error: ApiError) -> dict[str, str]:
        return {}


_openai_form = _OpenAIErrorForm()
_forms: dict[str, ErrorForm] = {}  # by path


def register_error_form(path: str, form: ErrorForm) -> None:
    """Gives errors of this path, and of paths below it, a form."""
    _forms[path] = form


def error_form(scope: Mapping[str, Any]) -> ErrorForm:
    """The form of errors for a request, by its path. scope: ASGI's."""
    path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
    return next((form for start, form in _forms.items() if f"{path}/".startswith(f"{start}/")), _openai_form)


def answer_of(error: BaseException) -> ApiError:
    """The API's answer to any error: the engine's own messages, no details of others."""
    if isinstance(error, ApiError):
        return error
    named = _NAMED_FIELD.search(str(error))
    if isinstance(error, (CapacityError, PromptTooLongError)):
        # The code by which OpenAI's clients know a prompt that is too long.
        message = with_flag_names(str(error), {"max_model_len": "--max-model-len"})
        return ApiError(400, message, param=named and named[1], code="context_length_exceeded")
    if isinstance(error, ArgumentError):
        return ApiError(400, str(error), param=named and named[1])
    if isinstance(error, CancelledError):
        return ApiError(503, str(error), code="cancelled", retry_after_s=1)
    if isinstance(error, QuireError):
        return ApiError(500, str(error))
    _log.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed on this request; its log says why")


def json_answer(error: ApiError, scope: Mapping[str, Any]) -> JSONResponse:
    """The answer to a request in its form, with the headers of its status. scope: ASGI's."""
    form = error_form(scope)
    headers = form.headers(error)
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(form.body(error), form.status(error), headers)


def install_handlers(app: Any) -> None:
    """Makes every error of `app` an answer in this form."""

    async def on_error(request: Request, error: Exception) -> JSONResponse:
        return json_answer(answer_of(error), request.scope)

    async def on_invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return json_answer(_invalid(error, request.headers.get("content-type", "")), request.scope)

    async def on_http(request: Request, error: HTTPException) -> JSONResponse:
        answered = ApiError(error.status_code, str(error.detail))
        if str(answered) == HTTPStatus(answered.status).phrase:  # the router's own error
            if answered.status == 404:
                # The description of the API is made once, outside of the event loop.
                answered = _no_route(request, (await asyncio.to_thread(request.app.openapi))["paths"])
            elif answered.status == 405:
                answered = _no_method(request, (error.headers or {}).get("Allow"))
        answer = json_answer(answered, request.scope)
        answer.headers.update(error.headers or {})
        return answer

    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(ApiError, on_error)
    app.add_exception_handler(QuireError, on_error)
    app.add_exception_handler(Exception, on_error)


def _no_route(request: Request, paths: Container[str]) -> ApiError:
    """An unknown path, with the known path that a client is likely to mean."""
    mount = request.scope.get("root_path", "")  # of this application in another one
    path = request.url.path.removeprefix(mount)
    hint = f"GET {mount}/openapi.json lists the routes"
    if path.startswith("/v1/conversations/"):  # OpenAI's conversations have fewer routes
        hint = f"Quire's own conversations are at {mount}/quire{path.removeprefix('/v1')[:_MAX_SHOWN]}"
    elif f"/v1{path}" in paths:
        hint = f"is {mount}/v1{path} meant? A client's base URL ends with /v1"
    elif path.startswith("/v1/") and path[3:] in paths:
        hint = f"is {mount}{path[3:]} meant?"
    shown = f"{mount}{path if len(path) <= _MAX_SHOWN else f'{path[:_MAX_SHOWN]}...'}"
    return ApiError(404, f"there is no {request.method} {shown}; {hint}", code="unknown_url")


def _no_method(request: Request, allowed: str | None) -> ApiError:
    return ApiError(
        405,
        f"expected {allowed or 'another method'} for {request.url.path[:_MAX_SHOWN]}, got {request.method}",
    )


def _invalid(error: RequestValidationError, content_type: str) -> ApiError:
    """The first error of a body, a path or a query. In a union (a text, or tokens), that of the alternative which
    matches the value furthest."""
    first, *others = error.errors()
    place = list(first["loc"])
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "it cannot be read")
        return ApiError(400, f"expected a body of JSON, got other content: {reason}", code="invalid_body")
    if place == ["body"]:
        message = "expected a JSON object as the body"
        if isinstance(error.body, bytes):  # not read as JSON: browsers send other types to any site
            got = content_type.partition(";")[0] or "no Content-Type"
            message += f" and the header `Content-Type: application/json`, got {got}"
        elif error.body is None:
            message += ", got none"
        return ApiError(400, message, code="invalid_body")
    if place[0] == "body":
        places = [
            (_in_body(list(other["loc"][1:]), error.body, is_missing=other["type"] == "missing"), other)
            for other in [first, *others]
            if other["loc"][:2] == first["loc"][:2]
        ]
        # "too short a list" is more specific than "not a text".
        place, first = max(places, key=lambda pair: (len(pair[0]), not pair[1]["type"].endswith("_type")))
        words = [
            other["ctx"]["expected"]
            for at, other in places
            if at == place and other["type"] == "literal_error"
        ]
    else:
        place, words = place[1:], []
    field = ".".join(str(part) for part in place)
    got = first.get("input")
    if first["type"] == "extra_forbidden":
        message = (
            f"expected fields that this request has (see /openapi.json), got an unknown one - in `{field}`"
        )
        return ApiError(400, message, param=field, code="unknown_field")
    shown = "" if first["type"] == "missing" or isinstance(got, (dict, list)) else f", got {got!r}"
    also = "" if first["type"] == "literal_error" else "".join(f", or {word}" for word in words)
    message = f"{first['msg']}{also}{shown if len(shown) <= _MAX_SHOWN else ''} - in `{field}`"
    return ApiError(400, message, param=field or None, code="invalid_body")


def _in_body(place: list[Any], body: Any, *, is_missing: bool) -> list[Any]:
    """The parts of a place that exist in the body, without pydantic's names for the alternatives of a union."""
    parts: list[Any] = []
    for at, part in enumerate(place):
        try:
            body = body[part]
        except (KeyError, IndexError, TypeError):
            if not (is_missing and at == len(place) - 1):
                continue
        parts.append(part)
    return parts
