"""One comparison of storages as a page: made, stepped and read with JSON.

    GET  /, /window/FILE        the page
    POST /comparison            starts over; takes a block size and a reservation
    POST /comparison/requests   adds requests
    POST /comparison/step       does steps
    POST /comparison/finish     ends one request, or all

Every POST answers with the state behind it (`SideBySide.state`). The process has one comparison, which all tabs of a
browser share. It listens on 127.0.0.1 and answers only requests under a name of this machine that come from no other
site's page.

Cost: one thread at a time computes the simulation, outside of the event loop; a call does at most `_MAX_STEPS` steps.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import webbrowser
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import resources
from typing import Any, Literal

import uvicorn
from fastapi import FastAPI, Response
from pydantic import BaseModel, ConfigDict, Field

from quire.errors import ArgumentError
from quire.server.api_errors import install_handlers
from quire.server.http.origin_check import OriginCheck
from quire.server.live_page.page_files import LIVE_PAGE, PageFiles
from quire.server.run import bind, url_of
from quire.server.settings import ServerSettings
from quire.simulate.side_by_side import MAX_MODEL_LEN, ComparedRequest, SideBySide

__all__ = ["comparison_app", "open_page"]

_HOST = "127.0.0.1"
_MAX_STEPS = 64
_MAX_OPEN = 256  # requests of the simulation


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ComparisonStart(_Body):
    block_size: Literal[1, 2, 4, 8, 16, 32, 64, 128, 256, 512] = Field(16, description="Of paged storage.")
    reservation: Literal["max", "pow2", "exact"] = Field("max", description="Of contiguous storage.")


class AddedRequests(_Body):
    count: int = Field(1, ge=1, le=64)
    prompt_tokens: int = Field(ge=1, le=4 * MAX_MODEL_LEN)
    output_tokens: int = Field(ge=1, le=4 * MAX_MODEL_LEN)
    shared_tokens: int = Field(0, ge=0, le=4 * MAX_MODEL_LEN)


class ComparisonSteps(_Body):
    steps: int = Field(1, ge=1, le=_MAX_STEPS)


class FinishedRequest(_Body):
    request: int | None = Field(None, ge=0, lt=2**31, description="The request's number; null for all.")


class _Comparison:
    """The simulation, in one thread at a time."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._lock = threading.Lock()
        self._simulation: SideBySide | None = None

    async def start(self, start: ComparisonStart) -> dict[str, Any]:
        def replace() -> dict[str, Any]:
            with self._lock:
                if self._simulation is not None:
                    self._simulation.close()
                    self._simulation = None
                self._simulation = SideBySide(
                    self._names, block_size=start.block_size, reservation=start.reservation
                )
                return self._simulation.state()

        return await asyncio.to_thread(replace)

    async def change(self, change: Callable[[SideBySide], None]) -> dict[str, Any]:
        """The state after a change. *raises:* ArgumentError: there is no simulation yet; as `change`."""

        def call() -> dict[str, Any]:
            with self._lock:
                if self._simulation is None:
                    raise ArgumentError(
                        "expected a comparison that has begun, got none; POST /comparison begins it"
                    )
                change(self._simulation)
                return self._simulation.state()

        return await asyncio.to_thread(call)


def comparison_app(names: Sequence[str]) -> FastAPI:
    """The application. names: of the storages."""
    app = FastAPI(title="Quire: storages side by side", docs_url=None, redoc_url=None)
    install_handlers(app)
    app.add_middleware(OriginCheck, settings=ServerSettings(host=_HOST))
    files = PageFiles(LIVE_PAGE, resources.files("quire.cli.compare_page"))
    comparison = _Comparison(names)

    @app.get("/")
    async def page() -> Response:
        return files.response("index.html")

    @app.get("/window/{name}")
    async def file(name: str) -> Response:
        return files.response(name)

    @app.post("/comparison")
    async def start(body: ComparisonStart) -> dict[str, Any]:
        return await comparison.start(body)

    @app.post("/comparison/requests")
    async def add(body: AddedRequests) -> dict[str, Any]:
        added = ComparedRequest(body.prompt_tokens, body.output_tokens, body.shared_tokens)

        def change(simulation: SideBySide) -> None:
            if simulation.num_open + body.count > _MAX_OPEN:
                raise ArgumentError(f"expected at most {_MAX_OPEN} open requests, got {body.count} more")
            for _ in range(body.count):
                simulation.add(added)

        return await comparison.change(change)

    @app.post("/comparison/step")
    async def step(body: ComparisonSteps) -> dict[str, Any]:
        return await comparison.change(lambda simulation: simulation.step(body.steps))

    @app.post("/comparison/finish")
    async def finish(body: FinishedRequest) -> dict[str, Any]:
        def change(simulation: SideBySide) -> None:
            if body.request is not None:
                simulation.finish(body.request)
            else:
                simulation.finish_all()

        return await comparison.change(change)

    return app


def open_page(names: Sequence[str]) -> None:
    """Serves the page on a free port, shows it in the user's browser, and returns after Ctrl-C."""
    listener = bind(_HOST, 0)
    url = url_of(_HOST, listener.getsockname()[1])
    config = uvicorn.Config(comparison_app(names), log_level="warning", lifespan="off", ws="none")
    print(f"quire: the storages side by side are on {url} until Ctrl-C", file=sys.stderr, flush=True)
    threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()  # a text browser would block
    with suppress(KeyboardInterrupt):  # uvicorn raises it once it has stopped
        uvicorn.Server(config).run(sockets=[listener])
    listener.close()
