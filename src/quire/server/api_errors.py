"""An error as the API answers it: a status, OpenAI's body, never a traceback.

    {"error": {"message": ..., "type": ..., "param": null or the field, "code": null or a word}}

`invalid_request_error` (400, 404, 405, 409, 413, 415), `authentication_error` (401), `permission_error` (403),
`rate_limit_error` (429, with Retry-After), `service_unavailable` (503), `internal_error` (500).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from quire.errors import ArgumentError, CancelledError, CapacityError, PromptTooLongError, QuireError

__all__ = ["ApiError", "answer_of", "error_body", "install_handlers", "json_answer"]

_log = logging.getLogger("quire.server")

_NAMED_FIELD = re.compile(r" - in `([a-z_.]+)`")  # as the engine's errors say which argument is meant
_MOST_SHOWN = 64  # characters of what was got instead

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "internal_error",
    503: "service_unavailable",
}


class ApiError(Exception):
    """An answer other than the one asked for."""

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
        self.code = code
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


def answer_of(error: BaseException) -> ApiError:
    """What the API says to any error: the engine's own ones in their words, others without details."""
    if isinstance(error, ApiError):
        return error
    named = _NAMED_FIELD.search(str(error))
    if isinstance(
        error, (CapacityError, PromptTooLongError)
    ):  # what OpenAI's clients know by a code of its own
        return ApiError(400, str(error), param=named and named[1], code="context_length_exceeded")
    if isinstance(error, ArgumentError):
        return ApiError(400, str(error), param=named and named[1])
    if isinstance(error, CancelledError):
        return ApiError(503, str(error), code="cancelled", retry_after_s=1)
    if isinstance(error, QuireError):
        return ApiError(500, str(error))
    _log.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed on this request; its log says why")


def json_answer(error: ApiError) -> JSONResponse:
    """The answer, with the headers that its status wants."""
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error), error.status, headers)


def install_handlers(app: Any) -> None:
    """Every error of `app` in this form."""

    async def on_error(request: Request, error: Exception) -> JSONResponse:
        return json_answer(answer_of(error))

    async def on_invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return json_answer(_invalid(error, request.headers.get("content-type", "")))

    async def on_http(request: Request, error: HTTPException) -> JSONResponse:
        said = ApiError(error.status_code, str(error.detail))
        if str(said) == HTTPStatus(said.status).phrase:  # of the router itself
            if said.status == 404:
                # What describes the API is made when it is first asked for: not in the loop's time.
                said = _no_route(request, (await asyncio.to_thread(request.app.openapi))["paths"])
            elif said.status == 405:
                said = _no_method(request, (error.headers or {}).get("Allow"))
        answer = json_answer(said)
        answer.headers.update(error.headers or {})
        return answer

    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(ApiError, on_error)
    app.add_exception_handler(QuireError, on_error)
    app.add_exception_handler(Exception, on_error)


def _no_route(request: Request, paths: Mapping[str, Any]) -> ApiError:
    """A path that leads nowhere, with those that do."""
    routes = {
        path: sorted(method.upper() for method in methods)
        for path, methods in paths.items()
        if not path.startswith(("/window", "/admin"))
    }
    path = request.url.path
    hint = ""
    if f"{path}/".startswith("/v1/conversations/"):  # OpenAI's, which this server does not have
        hint = f"; Quire's own conversations are at /quire{path.removeprefix('/v1')[:_MOST_SHOWN]}"
    elif f"/v1{path}" in routes:
        hint = f"; is /v1{path} meant? A client's base URL ends with /v1"
    elif path.startswith("/v1/") and path[3:] in routes:
        hint = f"; is {path[3:]} meant?"
    there = ", ".join(f"{' or '.join(methods)} {path}" for path, methods in routes.items())
    shown = path if len(path) <= _MOST_SHOWN else f"{path[:_MOST_SHOWN]}..."
    return ApiError(
        404,
        f"there is no {request.method} {shown}{hint}; there are {there}; GET /openapi.json describes all",
        code="unknown_url",
    )


def _no_method(request: Request, allowed: str | None) -> ApiError:
    return ApiError(
        405,
        f"expected {allowed or 'another method'} for {request.url.path[:_MOST_SHOWN]}, got {request.method}",
    )


def _invalid(error: RequestValidationError, content_type: str) -> ApiError:
    """What is wrong with a body, or with a path or query: the first thing. Where that could be one of several things
    (a text, or tokens), the one that was told apart last."""
    first, *others = error.errors()
    place = list(first["loc"])
    if first["type"] == "json_invalid":
        why = first.get("ctx", {}).get("error", "it cannot be read")
        return ApiError(400, f"expected a body of JSON, got one that is none: {why}", code="invalid_body")
    if place == ["body"]:
        message = "expected a JSON object as the body"
        if isinstance(error.body, bytes):  # not read as JSON: browsers send other types to any site
            said = content_type.partition(";")[0] or "no Content-Type"
            message += f" and the header `Content-Type: application/json`, got {said}"
        elif error.body is None:
            message += ", got none"
        return ApiError(400, message, code="invalid_body")
    if place[0] == "body":
        places = [
            (_in_body(list(one["loc"][1:]), error.body, is_missing=one["type"] == "missing"), one)
            for one in [first, *others]
            if one["loc"][:2] == first["loc"][:2]
        ]
        # A list that is too short says more than that it is no text.
        place, first = max(places, key=lambda pair: (len(pair[0]), not pair[1]["type"].endswith("_type")))
    else:
        place = place[1:]
    where = ".".join(str(part) for part in place)
    got = first.get("input")
    if first["type"] == "extra_forbidden":
        message = (
            f"expected fields that this request has (see /openapi.json), got an unknown one - in `{where}`"
        )
        return ApiError(400, message, param=where, code="unknown_field")
    shown = "" if first["type"] == "missing" or isinstance(got, (dict, list)) else f", got {got!r}"
    message = f"{first['msg']}{shown if len(shown) <= _MOST_SHOWN else ''} - in `{where}`"
    return ApiError(400, message, param=where or None, code="invalid_body")


def _in_body(place: list[Any], body: Any, *, is_missing: bool) -> list[Any]:
    """A place without the names that pydantic gives to the sides of a union: those that the body itself has."""
    found: list[Any] = []
    for at, part in enumerate(place):
        try:
            body = body[part]
        except (KeyError, IndexError, TypeError):
            if not (is_missing and at == len(place) - 1):
                continue
        found.append(part)
    return found
