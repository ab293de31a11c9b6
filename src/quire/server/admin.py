"""`/admin`: what stays in memory, how much memory, why a prompt was found no further. For the administrator.

The admin key, or this machine where there are no keys (`dependencies.administrator`). Everything that touches the
engine runs in its thread between two steps; what has to be computed for a pin is a request among the others; tiers are
waited for elsewhere.
"""

from __future__ import annotations

import asyncio
import itertools
import weakref

import numpy as np
from fastapi import APIRouter, Depends, Response

from quire.cache.pins import Pin
from quire.cache.prefix_key import NamespaceKeywords, PrefixKey
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
    """For the engine's thread."""
    core = service.engine.core
    return PinCard(
        id=_id(pin),
        owner=name_of_owner(pin.owner),
        is_published=core.engine.tenants.is_published(pin),
        num_tokens=len(pin.tokens),
        bytes=len(pin.block_ids) * core.cache.block_bytes,
        num_hits=pin.num_hits,
        expires_in=None if pin.expires_at is None else max(0.0, pin.expires_at - core.engine.pins.now()),
    )


async def _tokens(service: Service, body: AdminPrompt) -> list[int]:
    """The prompt's."""
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "expected either a prompt or messages")
    if body.messages is not None:
        text = await service.render(body.messages)
        return await service.encode(text, add_special_tokens=False)
    if isinstance(body.prompt, str):
        return await service.encode(body.prompt)
    return body.prompt or []


def _whose(body: AdminPrompt) -> NamespaceKeywords:
    return ApiTenant(body.tenant or ANYBODY.name).key(body.cache_salt)


@router.post("/pins", status_code=201)
async def pin(body: PinRequest, service: TheService) -> PinCard:
    """Computes a prompt where memory lacks it, and keeps it there. 400 where it would not fit, with the numbers."""
    tokens, whose = await _tokens(service, body), _whose(body)
    if body.publish:
        if any(value is not None for value in (*whose.values(), body.ttl)):
            raise ApiError(400, "expected neither tenant, cache_salt nor ttl with publish", param="publish")
        made = await service.engine.publish(tokens)
    else:
        made = await service.engine.pin(tokens, ttl=body.ttl, **whose)
    return await service.engine.between_steps(lambda: _card(service, made))


@router.get("/pins")
async def pins(service: TheService) -> PinList:
    """Those there are, the oldest first."""
    engine = service.engine
    return PinList(data=await engine.between_steps(lambda: [_card(service, one) for one in engine.pins]))


@router.delete("/pins/{pin_id}", status_code=204)
async def unpin(pin_id: str, service: TheService) -> None:
    """Its content may be evicted from now on; what was published is so no more."""
    pins = service.engine.pins

    def remove() -> None:
        for one in pins:
            if _id(one) == pin_id:
                pins.remove(one)
                return
        raise ApiError(404, "there is no such pin", code="pin_not_found")

    await service.engine.between_steps(remove)


@router.post("/drop")
async def drop(body: AdminPrompt, service: TheService) -> ApiDropped:
    """Has memory forget everything that begins with a prompt; tiers keep what they have. What requests hold is not
    found from now on, and free when they end; 400 where some of it is pinned."""
    tokens, core = np.asarray(await _tokens(service, body), np.int64), service.engine.core

    def forget() -> ApiDropped:
        checked = core.engine.check_tokens(tokens)
        key = core.engine.tenants.resolve(PrefixKey.of(**_whose(body)), checked)
        for one in core.cache.pins.in_what_begins_with(checked, **key.content):
            raise ArgumentError(
                f"expected a prefix of which nothing is pinned, got one that {_id(one)} has; unpin that first"
            )
        dropped = core.engine.drop(checked, key)
        return ApiDropped(num_freed=dropped.num_freed, num_held=dropped.num_held)

    return await service.engine.between_steps(forget)


@router.post("/resize")
async def resize(body: Resize, service: TheService) -> Memory:
    """Gives the cache another budget while requests run. 400 where floors, pins or the machine do not allow it."""
    budget = service.engine.core.budget

    def change() -> Memory:
        try:
            budget.resize(body.kv_memory)
        except (OSError, MemoryError, OverflowError) as error:
            raise ArgumentError(f"the system refuses a kv_memory of {body.kv_memory}: {error}") from error
        except CapacityError as error:  # no prompt is too long
            raise ArgumentError(str(error)) from error
        return Memory(kv_memory_bytes=budget.num_bytes, num_blocks=budget.num_blocks, capacity=str(budget))

    return await service.engine.between_steps(change)


@router.post("/explain")
async def explain(body: AdminPrompt, service: TheService) -> Explained:
    """How much of a prompt is known, where, and why no more."""
    tokens = await _tokens(service, body)
    found = await service.engine.explain(tokens, as_administrator=True, **_whose(body))
    names = Explained.model_fields.keys() - {"text"}
    return Explained(text=str(found), **{name: getattr(found, name) for name in names})


@router.get("/report", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def report(service: TheService) -> Response:
    """The cache as a table: states, owners, prefixes, pins, tenants, tiers."""
    text = await service.engine.report()
    return Response(text + "\n", media_type="text/plain; charset=utf-8")


@router.post("/flush")
async def flush(service: TheService, body: Flush | None = None) -> Flushed:
    """Has the tiers hold all that memory does, and then, if asked to, memory forget what nobody holds."""
    body = body or Flush()  # type: ignore[call-arg]
    core = service.engine.core
    if body.tiers:
        await asyncio.to_thread(service.engine.llm.flush)

    def forget() -> int:
        if not core.cache.can_fork:
            return 0  # a storage that keeps nothing once a request has ended
        before = core.cache.stats()["cached"]
        core.budget.trim()
        return before - core.cache.stats()["cached"]

    return Flushed(num_freed=await service.engine.between_steps(forget) if body.memory else 0)
