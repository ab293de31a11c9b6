"""The comparison's sessions: one small simulation each, made, stepped and read with JSON.

    POST   /window/storages                {"id", ...state}; takes a block size and a reservation
    POST   /window/storages/ID/requests    adds requests
    POST   /window/storages/ID/step        does steps; the new state
    POST   /window/storages/ID/finish      ends one request, or all
    DELETE /window/storages/ID

There are at most `_MAX_SESSIONS`: a new session replaces the one unused longest, and all that are unused for
`_IDLE_S`. One thread at a time computes a simulation, outside of the event loop; a call does at most `_MAX_STEPS`
steps.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field

from quire.server.api_errors import ApiError
from quire.server.dependencies import tenant_of
from quire.server.http.bodies import BodyRoute
from quire.server.schemas.common import ERRORS
from quire.server.schemas.strict_body import StrictBody
from quire.simulate.side_by_side import MAX_MODEL_LEN, ComparedRequest, SideBySide

__all__ = ["router"]

router = APIRouter(
    prefix="/window/storages",
    tags=["Live page"],
    dependencies=[Depends(tenant_of)],
    route_class=BodyRoute,
    responses=ERRORS,
)

_MAX_SESSIONS = 16
_IDLE_S = 300.0
_MAX_STEPS = 64
_MAX_OPEN = 256  # requests of one simulation


class Start(StrictBody):
    block_size: Literal[1, 2, 4, 8, 16, 32, 64, 128, 256, 512] = Field(16, description="Of paged storage.")
    reservation: Literal["max", "pow2", "exact"] = Field("max", description="Of contiguous storage.")


class AddRequests(StrictBody):
    count: int = Field(1, ge=1, le=64)
    prompt_tokens: int = Field(ge=1, le=4 * MAX_MODEL_LEN)
    output_tokens: int = Field(ge=1, le=4 * MAX_MODEL_LEN)
    shared_tokens: int = Field(0, ge=0, le=4 * MAX_MODEL_LEN)


class StepBody(StrictBody):
    steps: int = Field(1, ge=1, le=_MAX_STEPS)


class Finish(StrictBody):
    request: int | None = Field(None, ge=0, lt=2**31, description="The request's number; null for all.")


class StorageState(BaseModel):
    """One storage, in bytes; owners, fills: for each cell of its map its request and computed percents."""

    name: str
    missing: str | None
    owners: list[int] = []
    fills: list[int] = []
    running: int = 0
    waiting: int = 0
    done: int = 0
    refused: int = 0
    preemptions: int = 0
    running_mean: float = 0
    reserved: int = 0
    used: int = 0
    cached: int = 0
    external: int = 0
    total: int = 0
    waste_share: float = 0
    generated: int = 0
    prefix_tokens: int = 0
    seconds: float = 0
    requests: list[int] = []


class StoragesState(BaseModel):
    id: str
    steps: int
    asked: int
    open: int
    block_size: int
    reservation: str
    storages: list[StorageState]


@dataclass
class _Session:
    id: str
    simulation: SideBySide
    used: float
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    closed: bool = False


class _Sessions:
    """The simulations of one server."""

    def __init__(self) -> None:
        self._by_id: dict[str, _Session] = {}
        self._making = asyncio.Lock()

    async def make(self, start: Start) -> StoragesState:
        async with self._making:  # keeps simultaneous calls within the limit
            now = time.monotonic()
            for session in sorted(self._by_id.values(), key=lambda session: session.used):
                if len(self._by_id) >= _MAX_SESSIONS or session.used < now - _IDLE_S:
                    await self.close(session.id)
            simulation = await asyncio.to_thread(
                lambda: SideBySide(block_size=start.block_size, reservation=start.reservation)
            )
            session = _Session(secrets.token_urlsafe(12), simulation, time.monotonic())
            self._by_id[session.id] = session
        return await self.use(session.id, lambda simulation: None)

    async def use(self, session_id: str, change: Any) -> StoragesState:
        """Calls `change` with the simulation; returns the state behind it."""
        session = self._by_id.get(session_id)
        if session is None:
            raise ApiError(
                404, "expected the id of an open comparison, got an unknown one", code="no_session"
            )
        session.used = time.monotonic()

        def call() -> dict[str, Any]:
            change(session.simulation)
            return session.simulation.state()

        async with session.lock:
            if session.closed:
                raise ApiError(
                    404, "expected the id of an open comparison, got that of a closed one", code="no_session"
                )
            state = await asyncio.to_thread(call)
        return StoragesState(id=session_id, **state)

    async def close(self, session_id: str) -> None:
        session = self._by_id.pop(session_id, None)
        if session is not None:
            async with session.lock:
                session.closed = True
                await asyncio.to_thread(session.simulation.close)


def _sessions(request: Request) -> _Sessions:
    state = request.app.state
    if getattr(state, "comparison_sessions", None) is None:
        state.comparison_sessions = _Sessions()
    return state.comparison_sessions


@router.post("")
async def make(request: Request, body: Start | None = None) -> StoragesState:
    """Makes a new comparison without requests."""
    return await _sessions(request).make(Start.model_validate({}) if body is None else body)


@router.post("/{session_id}/requests")
async def add(session_id: str, body: AddRequests, request: Request) -> StoragesState:
    """Gives every storage the same requests."""
    added = ComparedRequest(body.prompt_tokens, body.output_tokens, body.shared_tokens)

    def change(simulation: SideBySide) -> None:
        if simulation.num_open + body.count > _MAX_OPEN:
            raise ApiError(429, f"at most {_MAX_OPEN} requests may be open", code="too_many", retry_after_s=1)
        for _ in range(body.count):
            simulation.add(added)

    return await _sessions(request).use(session_id, change)


@router.post("/{session_id}/step")
async def step(session_id: str, body: StepBody, request: Request) -> StoragesState:
    """Does some steps of every storage's engine."""
    return await _sessions(request).use(session_id, lambda simulation: simulation.step(body.steps))


@router.post("/{session_id}/finish")
async def finish(session_id: str, body: Finish, request: Request) -> StoragesState:
    """Ends a request, or all, running or waiting."""

    def change(simulation: SideBySide) -> None:
        if body.request is not None:
            simulation.finish(body.request)
        else:
            simulation.finish_all()

    return await _sessions(request).use(session_id, change)


@router.delete("/{session_id}", status_code=204)
async def close(session_id: str, request: Request) -> None:
    """Removes a comparison; an unknown id is no error."""
    await _sessions(request).close(session_id)
