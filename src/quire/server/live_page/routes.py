"""The live page and its data.

    /, /window/FILE                                 the page: fixed files, for every client
    /window/events                                  server-sent events, for clients with a key, if there are keys
    /window/blocks/N, /window/sequences/ID/INDEX    for the administrator

The page contains no key: a user types it in, and it stays in that tab's memory.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import JSONResponse

from quire.server.api_errors import ApiError
from quire.server.dependencies import TheService, administrator, tenant_of
from quire.server.http.sse import EventStream
from quire.server.live_page.details import block_details, readable, sequence_details
from quire.server.live_page.page_files import LIVE_PAGE, PageFiles
from quire.server.live_page.snapshot_feed import SnapshotFeed
from quire.server.schemas.common import ERRORS
from quire.server.service import Service

__all__ = ["router"]

router = APIRouter(tags=["Live page"], responses=ERRORS)

_FILES = PageFiles(LIVE_PAGE)


async def _is_administrator(request: Request, service: Service) -> bool:
    try:
        await administrator(request, service)
    except ApiError:
        return False
    return True


def _feed(request: Request, service: Service) -> SnapshotFeed:
    state = request.app.state
    if getattr(state, "live_page_feed", None) is None:
        state.live_page_feed = SnapshotFeed(service)
    return state.live_page_feed


@router.get("/", include_in_schema=False)
async def page() -> Response:
    return _FILES.response("index.html")


@router.get("/favicon.ico", include_in_schema=False)
async def icon() -> Response:
    return _FILES.response("icon.svg")


@router.get("/window/events", include_in_schema=False)  # an endless stream
async def events(request: Request, service: TheService) -> Response:
    """The page's data as it changes."""
    is_admin = await _is_administrator(request, service)
    if not is_admin:
        await tenant_of(request, service)
    watching = _feed(request, service).monitor(is_admin)
    first = await anext(watching)  # an error here becomes the answer's status
    return EventStream(first, watching, {"X-Quire-Admin": "1" if is_admin else "0"})


@router.get("/window/blocks/{block_id}", dependencies=[Depends(administrator)])
async def block(
    service: TheService, block_id: int = Path(ge=0, lt=2**31), last: int | None = Query(None, ge=0, lt=2**31)
) -> Response:
    """A block of the cache: state, holders and tokens. last: describes a range of tokens or pages."""
    details = await service.engine.between_steps(lambda: block_details(service.engine.view, block_id, last))
    return _shown(details, service)


@router.get("/window/sequences/{request_id:path}/{index}", dependencies=[Depends(administrator)])
async def sequence(service: TheService, request_id: str, index: int = Path(ge=0, lt=2**31)) -> Response:
    """A running sequence: its whole block table and its newest tokens."""
    details = await service.engine.between_steps(
        lambda: sequence_details(service.engine.view, request_id, index)
    )
    return _shown(details, service)


def _shown(details: dict[str, Any], service: Service) -> Response:
    return JSONResponse(readable(details, service.tokenizer), headers={"Cache-Control": "no-store"})


@router.get("/window/{name}", include_in_schema=False)
async def file(name: str) -> Response:
    return _FILES.response(name)
