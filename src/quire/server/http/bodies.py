"""How the body of a request is read: first who asks, by the headers alone, and whether there is a place for what it
asks for; then its bytes; then JSON; then its fields.

What is large is parsed and checked in a thread of its own, one body at a time: the event loop goes on meanwhile. Python
parses JSON without letting other threads in between, so what a body may hold is counted before (`weight_of`), at the
speed of a search. FastAPI is handed what was checked here, and has nothing left to do.

Cost: of a body below 64 KiB what FastAPI's own reading costs; of others a pass over the bytes, and a thread's turn.
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
from quire.server.schemas.common import SamplingBody

__all__ = ["LARGE_BODY", "BodyRoute", "beside_if_large", "parsed", "weight_of"]

LARGE_BODY = 64 << 10  # bytes: a few milliseconds of parsing

# Texts, and what stands between them. Neither goes back over what it has seen: the time is linear in the bytes.
_PARTS = re.compile(rb'[^"]++|"(?:[^"\\]++|\\.)*+"?+', re.DOTALL)

Result = TypeVar("Result")
_NOT_READ = object()
_thread = ThreadPoolExecutor(1, thread_name_prefix="quire-bodies")


class BodyRoute(APIRoute):
    """A route whose body is read as the module says: `APIRouter(route_class=BodyRoute)`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        kind: Any = self.body_field.field_info.annotation
        adapter: TypeAdapter[Any] = TypeAdapter(kind)
        generates = isinstance(kind, type) and issubclass(kind, SamplingBody)
        checks = list(_who_may_ask(self.dependant))

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
                return Response(status_code=499)  # nobody reads it
            if body and _is_json(request):
                most = service.settings.limits.max_body_values
                if len(body) > LARGE_BODY:
                    run = asyncio.get_running_loop().run_in_executor
                    request.value = await run(_thread, parsed, body, adapter, most)
                else:
                    request.value = parsed(body, adapter, most)
            return await handle(request)

        return read_and_handle


class _ReadRequest(Request):
    """One whose body has been read: `value` is what it says, checked, if it is of JSON."""

    value: Any = _NOT_READ

    async def json(self) -> Any:
        return await super().json() if self.value is _NOT_READ else self.value


async def beside_if_large(request: Request, function: Callable[..., Result], *arguments: Any) -> Result:
    """What a function returns or raises that looks at all of the request's body: in the thread, if that is large."""
    if len(await request.body()) <= LARGE_BODY:
        return function(*arguments)
    return await asyncio.get_running_loop().run_in_executor(_thread, function, *arguments)


def parsed(body: bytes, adapter: TypeAdapter[Any], max_values: int) -> Any:
    """What a body of JSON says, as the type of `adapter`. *raises:* ApiError, RequestValidationError: status 400."""
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
    except UnicodeEncodeError as error:  # JSON can say one, but no tokenizer or answer can
        raise ApiError(
            400, "expected text, got half a surrogate pair (\\ud800 to \\udfff alone)", code="invalid_body"
        ) from error
    except RecursionError:
        raise ApiError(
            400, "expected a body of JSON, got one that is nested too deep to be read", code="invalid_body"
        ) from None
    except ValueError as error:  # not UTF-8, or a number of thousands of digits
        raise ApiError(
            400, f"expected a body of JSON, got one that is none: {error}", code="invalid_body"
        ) from error
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        errors = [{**one, "loc": ("body", *one["loc"])} for one in error.errors(include_url=False)]
        raise RequestValidationError(errors, body=value) from None


def weight_of(body: bytes, most: int) -> int:
    """What a body of JSON takes to be read, counted in plain values: an array or object is 8, a name in one 16. No
    further than `most`, once beyond it."""
    weight = _weight(body)
    if weight <= most:  # the most that it can be: signs within texts were counted too
        return weight
    weight = 0
    for part in _PARTS.finditer(body):
        weight += 1 if body[part.start()] == 0x22 else _weight(part[0])
        if weight > most:
            break
    return weight


def _weight(body: bytes) -> int:
    num_names = body.count(b":")
    return body.count(b",") + 8 * (body.count(b"[") + body.count(b"{")) + 16 * num_names


def _who_may_ask(dependant: Any) -> Iterator[Callable[..., Any]]:
    """Of what a route depends on, those that need nothing but headers to refuse a request."""
    if dependant.call in (tenant_of, administrator):
        yield dependant.call
    for inner in dependant.dependencies:
        yield from _who_may_ask(inner)


def _is_json(request: Request) -> bool:
    kind, _, what = request.headers.get("content-type", "").partition(";")[0].strip().lower().partition("/")
    return kind == "application" and (what == "json" or what.endswith("+json"))
