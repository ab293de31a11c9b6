"""`/v1/sessions`: what a client can say about the content of its sessions, and what became of their turns.

Sessions count within the caller's tenant; another tenant's is unknown.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from quire.errors import ArgumentError
from quire.scheduler.request_options import MAX_SESSION_CHARS
from quire.server.api_errors import ApiError
from quire.server.dependencies import TheService, TheTenant
from quire.server.http.bodies import BodyRoute
from quire.server.schemas.common import ERRORS
from quire.server.schemas.session_bodies import (
    Receipt,
    SessionCard,
    SessionCommand,
    SessionList,
    SessionTurnList,
)
from quire.server.sessions.session_commands import card_of

__all__ = ["router"]

router = APIRouter(tags=["Sessions"], route_class=BodyRoute, responses=ERRORS)

SessionName = Annotated[str, Path(min_length=1, max_length=MAX_SESSION_CHARS)]


@router.get("/v1/sessions")
async def list_sessions(service: TheService, tenant: TheTenant) -> SessionList:
    """The sessions that the engine knows of this tenant, the least recently used first."""
    engine = service.engine
    found = await engine.between_steps(lambda: engine.sessions.list(tenant=tenant.in_engine))
    return SessionList(data=[card_of(info) for info in found])


@router.post("/v1/sessions/{session:path}/cache")
async def command_cache(
    session: SessionName, body: SessionCommand, service: TheService, tenant: TheTenant
) -> Receipt:
    """Keeps, moves, loads or gives up the content of a session's newest path. The receipt says what was done; of an
    unknown session it is refused."""
    (receipt,) = await service.session_commands.obey(tenant, session, [body])
    return receipt


@router.get("/v1/sessions/{session:path}/cache")
async def describe_cache(session: SessionName, service: TheService, tenant: TheTenant) -> SessionCard:
    """The content of a session, and what holds it."""
    engine = service.engine
    try:
        info = await engine.between_steps(lambda: engine.sessions.get(session, tenant=tenant.in_engine))
    except ArgumentError as error:  # the name has been checked: there is no such session
        raise _unknown(session) from error
    return card_of(info)


@router.get("/v1/sessions/{session:path}/turns")
async def list_turns(session: SessionName, service: TheService, tenant: TheTenant) -> SessionTurnList:
    """The newest turns of a session, oldest first: tokens found, prepared and computed, and why no more were found."""
    turns = service.session_turns.get(tenant.name, session)
    if not turns:
        raise _unknown(session)
    return SessionTurnList(data=turns)


def _unknown(session: str) -> ApiError:
    return ApiError(
        404,
        f"expected the name of a session with a request so far, got {session[:64]!r}; sessions of other keys are "
        "unknown, and of many the one used least recently is forgotten",
        code="session_not_found",
    )
