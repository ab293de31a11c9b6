"""Reads the body of a request: first authorisation and a free place, by the headers alone; then bytes, JSON, fields.

A large body is parsed and checked in a thread, one body at a time, while the event loop goes on. Python's JSON parser
lets no other thread run, so the size of a body's content is counted before (`weight_of`), at the speed of a search.
FastAPI gets the checked value and parses nothing.

Cost: FastAPI's own reading for a body below 64 KiB; for others a pass over the bytes, and a turn of the thread.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect

from quire.server.api_errors import ApiError
from quire.server.dependencies import administrator, service_of, tenant_of
from quire.server.schemas.strict_body import GeneratingBody

__all__ = ["LARGE_BODY", "BodyRoute", "parse_body", "run_in_thread_if_large", "weight_of"]

LARGE_BODY = 64 << 10  # bytes: a few milliseconds of parsing

# Strings, and the text between them. Neither backtracks: the time is linear in the bytes.
_PARTS = re.compile(rb'[^"]++|"(?:[^"\\]++|\\.)*+"?+', re.DOTALL)

Result = TypeVar("Result")
_NOT_READ = object()
_thread = ThreadPoolExecutor(1, thread_name_prefix="quire-bodies")


class BodyRoute(APIRoute):
    """A route whose body is read as described above: `APIRouter(route_class=BodyRoute)`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        kind: Any = self.body_field.field_info.annotation
        adapter: TypeAdapter[Any] = TypeAdapter(kind)
        generates = isinstance(kind, type) and issubclass(kind, GeneratingBody)
        checks = list(_authorisations(self.dependant))

        async def read_and_handle(request: Request) -> Response:
            service = await service_of(request)
            for check in checks:
                tenant = await check(request, service)
                if generates:
                    service.require_place(tenant)
            request = _ReadRequest(request.scope, request.receive)
            try:
                body = await request.body()
            except ClientDisconnect:
                return Response(status_code=499)  # the client has gone
            if body and _is_json(request):
                max_values = service.settings.limits.max_body_values
                if len(body) > LARGE_BODY:
                    run = asyncio.get_running_loop().run_in_executor
                    request.value = await run(_thread, parse_body, body, adapter, max_values)
                else:
                    request.value = parse_body(body, adapter, max_values)
            return await handle(request)

        return read_and_handle


class _ReadRequest(Request):
    """A request whose body has been read. value: the checked content of a JSON body."""

    value: Any = _NOT_READ

    async def json(self) -> Any:
        return await super().json() if self.value is _NOT_READ else self.value


async def run_in_thread_if_large(
    request: Request, function: Callable[..., Result], *arguments: Any
) -> Result:
    """The result or error of a function that reads the whole body; it runs in the thread if the body is large."""
    if len(await request.body()) <= LARGE_BODY:
        return function(*arguments)
    return await asyncio.get_running_loop().run_in_executor(_thread, function, *arguments)


def parse_body(body: bytes, adapter: TypeAdapter[Any], max_values: int) -> Any:
    """A JSON body as the type of `adapter`. *raises:* ApiError, RequestValidationError: status 400."""
    if 16 * len(body) > max_values and (weight := weight_of(body, max_values)) > max_values:
        raise ApiError(
            400,
            f"expected a body of at most {max_values} values (an array or object counts as 8, a name in one as 16), "
            f"got {weight} or more; the setting is max_body_values",
            code="invalid_body",
        )
    try:
        value = json.loads(body)
        if b"\\ud" in body or b"\\uD" in body:
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise RequestValidationError(
            [{"type": "json_invalid", "loc": ("body", error.pos), "input": {}, "ctx": {"error": error.msg}}]
        ) from error
    except UnicodeEncodeError as error:  # valid in JSON, but not for a tokenizer or an answer
        raise ApiError(
            400, "expected text, got half a surrogate pair (\\ud800 to \\udfff alone)", code="invalid_body"
        ) from error
    except RecursionError:
        raise ApiError(
            400, "expected a body of JSON, got one that is nested too deeply", code="invalid_body"
        ) from None
    except ValueError as error:  # not UTF-8, or a number of thousands of digits
        raise ApiError(
            400, f"expected a body of JSON, got other content: {error}", code="invalid_body"
        ) from error
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        errors = [
            {**details, "loc": ("body", *details["loc"])} for details in error.errors(include_url=False)
        ]
        raise RequestValidationError(errors, body=value) from None


def weight_of(body: bytes, max_weight: int) -> int:
    """The cost of parsing a JSON body, in plain values: an array or object is 8, a name in one 16. Counting stops
    beyond `max_weight`."""
    weight = _weight(body)
    if weight <= max_weight:  # an upper bound: it counts signs within strings, too
        return weight
    weight = 0
    for part in _PARTS.finditer(body):
        weight += 1 if body[part.start()] == 0x22 else _weight(part[0])
        if weight > max_weight:
            break
    return weight


def _weight(body: bytes) -> int:
    num_names = body.count(b":")
    return body.count(b",") + 8 * (body.count(b"[") + body.count(b"{")) + 16 * num_names


def _authorisations(dependant: Any) -> Iterator[Callable[..., Any]]:
    """The dependencies of a route that may refuse a request by its headers alone."""
    if dependant.call in (tenant_of, administrator):
        yield dependant.call
    for inner in dependant.dependencies:
        yield from _authorisations(inner)


def _is_json(request: Request) -> bool:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    kind, _, subtype = media_type.partition("/")
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))
