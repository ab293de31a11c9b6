"""`/admin`: pins, the memory budget, and explanations of prefix hits. For the administrator.

Requests need the admin key, or come from this machine where there are no keys (`dependencies.administrator`). Each
call that touches the engine runs in its thread between two steps. A pin's missing tokens are computed as a request
like any other. Tiers are flushed in another thread.
"""

from __future__ import annotations

import itertools
import weakref

from fastapi import APIRouter, Depends, Response

from quire.cache.pins import Pin
from quire.cache.prefix_key import NamespaceKeywords
from quire.errors import ArgumentError, CapacityError
from quire.server.api_errors import ApiError
from quire.server.api_keys import ANYBODY, ApiTenant, name_of_owner
from quire.server.dependencies import TheService, administrator
from quire.server.http.bodies import BodyRoute
from quire.server.schemas.admin_bodies import (
    AdminPrompt,
    ApiDropped,
    Explained,
    Flush,
    Flushed,
    Memory,
    PinCard,
    PinList,
    PinRequest,
    Resize,
)
from quire.server.schemas.common import ERRORS
from quire.server.service import Service

__all__ = ["router"]

router = APIRouter(
    prefix="/admin",
    tags=["Admin"],
    dependencies=[Depends(administrator)],
    route_class=BodyRoute,
    responses=ERRORS,
)

_ids: weakref.WeakKeyDictionary[Pin, str] = weakref.WeakKeyDictionary()
_numbers = itertools.count(1)


def _id(pin: Pin) -> str:
    if pin not in _ids:
        _ids[pin] = f"pin-{next(_numbers)}"
    return _ids[pin]


def _card(service: Service, pin: Pin) -> PinCard:
    """Runs in the engine's thread."""
    engine = service.engine
    return PinCard(
        id=_id(pin),
        owner=name_of_owner(pin.owner),
        is_published=engine.tenants.is_published(pin),
        num_tokens=len(pin.tokens),
        bytes=len(pin.block_ids) * engine.cache.block_bytes,
        num_hits=pin.num_hits,
        expires_in=engine.pins.seconds_left(pin),
    )


async def _tokens(service: Service, body: AdminPrompt) -> list[int]:
    """The prompt's tokens."""
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "expected either a prompt or messages")
    if body.messages is not None:
        text = await service.render(body.messages)
        return await service.encode(text, add_special_tokens=False)
    if isinstance(body.prompt, str):
        return await service.encode(body.prompt)
    return body.prompt or []


def _namespace(body: AdminPrompt) -> NamespaceKeywords:
    return ApiTenant(body.tenant or ANYBODY.name).key(body.cache_salt)


@router.post("/pins", status_code=201)
async def pin(body: PinRequest, service: TheService) -> PinCard:
    """Computes a prompt's missing tokens and keeps all in memory. 400, with numbers, where it would not fit."""
    tokens, namespace = await _tokens(service, body), _namespace(body)
    if body.publish:
        if any(value is not None for value in (*namespace.values(), body.ttl)):
            raise ApiError(400, "expected neither tenant, cache_salt nor ttl with publish", param="publish")
        made = await service.engine.publish(tokens)
    else:
        made = await service.engine.pin(tokens, ttl=body.ttl, **namespace)
    return await service.engine.between_steps(lambda: _card(service, made))


@router.get("/pins")
async def pins(service: TheService) -> PinList:
    """The pins, oldest first."""
    engine = service.engine
    return PinList(data=await engine.between_steps(lambda: [_card(service, pin) for pin in engine.pins]))


@router.delete("/pins/{pin_id}", status_code=204)
async def unpin(pin_id: str, service: TheService) -> None:
    """Removes a pin: its content may be evicted, and a published prefix is no longer shared."""
    pins = service.engine.pins

    def remove() -> None:
        for pin in pins:
            if _id(pin) == pin_id:
                pins.remove(pin)
                return
        raise ApiError(404, "there is no such pin", code="pin_not_found")

    await service.engine.between_steps(remove)


@router.post("/drop")
async def drop(body: AdminPrompt, service: TheService) -> ApiDropped:
    """Removes a prefix and its continuations from memory; tiers keep theirs. Blocks that requests hold are not found
    any more and are freed when those end. 400 where a pin has some of them."""
    tokens, engine, namespace = await _tokens(service, body), service.engine, _namespace(body)

    def forget() -> ApiDropped:
        for pin in engine.pins.find(tokens, **namespace):
            raise ArgumentError(
                f"expected a prefix without pins, got one of which {_id(pin)} has blocks; unpin that first"
            )
        dropped = engine.llm.drop(tokens, **namespace)
        return ApiDropped(num_freed=dropped.num_freed, num_held=dropped.num_held)

    return await engine.between_steps(forget)


@router.post("/resize")
async def resize(body: Resize, service: TheService) -> Memory:
    """Changes the cache's budget while requests run. 400 where floors, pins or the machine do not allow it."""
    engine = service.engine

    def change() -> Memory:
        try:
            engine.llm.resize(body.kv_memory)
        except (OSError, MemoryError, OverflowError) as error:
            raise ArgumentError(f"the system refuses a kv_memory of {body.kv_memory}: {error}") from error
        except CapacityError as error:  # without the code of a prompt that is too long
            raise ArgumentError(str(error)) from error
        return Memory(
            kv_memory_bytes=engine.kv_memory_bytes,
            num_blocks=engine.num_blocks,
            capacity=engine.cache_capacity,
        )

    return await engine.between_steps(change)


@router.post("/explain")
async def explain(body: AdminPrompt, service: TheService) -> Explained:
    """How much of a prompt is known, in which tier, and why no more."""
    tokens = await _tokens(service, body)
    explanation = await service.engine.explain(tokens, as_administrator=True, **_namespace(body))
    names = Explained.model_fields.keys() - {"text"}
    return Explained(text=str(explanation), **{name: getattr(explanation, name) for name in names})


@router.get("/report", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def report(service: TheService) -> Response:
    """The cache as a table: states, owners, prefixes, pins, tenants, tiers."""
    text = await service.engine.report()
    return Response(text + "\n", media_type="text/plain; charset=utf-8")


@router.post("/flush")
async def flush(service: TheService, body: Flush | None = None) -> Flushed:
    """Writes memory's content to the tiers; then, if asked, evicts all unreferenced blocks."""
    body = body or Flush()  # type: ignore[call-arg]
    engine = service.engine
    if body.tiers:
        await engine.flush()

    def forget() -> int:
        if not engine.cache.can_fork:
            return 0  # this storage caches nothing
        before = engine.cache.stats()["cached"]
        engine.llm.trim()
        return before - engine.cache.stats()["cached"]

    return Flushed(num_freed=await engine.between_steps(forget) if body.memory else 0)
