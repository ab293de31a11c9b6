"""An ASGI application under servers other than Quire's own, in a thread of this process, until the block ends."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import fastapi
import pytest
import uvicorn

from quire.server.run import bind, url_of

__all__ = ["HOSTS", "mounted", "under_hypercorn", "under_uvicorn"]


@contextmanager
def _in_thread(
    serve: Callable[[int, asyncio.Event, Callable[[], None]], Awaitable[None]],
) -> Iterator[str]:
    """The URL of a server. serve(its socket, an event that ends it, a function that it calls once it is ready)"""
    listener = bind("127.0.0.1", 0)
    ready, failures = threading.Event(), []
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    def run() -> None:
        try:
            loop.run_until_complete(serve(listener.fileno(), stop, ready.set))
        except BaseException as error:
            failures.append(error)
        finally:
            ready.set()
            loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    ready.wait(120)
    try:
        if failures:
            raise RuntimeError("the server did not start") from failures[0]
        yield url_of("127.0.0.1", listener.getsockname()[1])
    finally:
        if thread.is_alive():
            loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        listener.close()
    assert not thread.is_alive()


@contextmanager
def under_uvicorn(app: Any) -> Iterator[str]:
    async def serve(file: int, stop: asyncio.Event, set_ready: Callable[[], None]) -> None:
        # Without the timeout an open live page would keep uvicorn from ending.
        config = uvicorn.Config(
            app, fd=os.dup(file), lifespan="on", log_config=None, timeout_graceful_shutdown=2
        )
        server = uvicorn.Server(config)

        async def end() -> None:
            while not server.started and not server.should_exit:
                await asyncio.sleep(0.01)
            set_ready()
            await stop.wait()
            server.should_exit = True

        ending = asyncio.create_task(end())
        try:
            await server.serve()
        finally:
            ending.cancel()

    with _in_thread(serve) as url:
        yield url


@contextmanager
def under_hypercorn(app: Any) -> Iterator[str]:
    hypercorn = pytest.importorskip("hypercorn", reason="pip install hypercorn")
    from hypercorn.asyncio import serve as serve_app

    async def serve(file: int, stop: asyncio.Event, set_ready: Callable[[], None]) -> None:
        config = hypercorn.Config()
        config.bind = [f"fd://{os.dup(file)}"]
        config.errorlog = None
        set_ready()  # the socket listens: a request waits until the lifespan has begun
        await serve_app(app, config, shutdown_trigger=stop.wait)

    with _in_thread(serve) as url:
        yield url


def mounted(apps: dict[str, Any], *, runs_lifespans: bool = True) -> fastapi.FastAPI:
    """A host with a lifespan, a middleware and a route of its own; `apps` by the paths where they are mounted."""

    @asynccontextmanager
    async def lifespan(host: fastapi.FastAPI) -> AsyncIterator[None]:
        if not runs_lifespans:
            yield
            return
        for app in apps.values():
            await stack.enter_async_context(app.router.lifespan_context(app))
        async with stack:
            yield

    stack = AsyncExitStack()
    host = fastapi.FastAPI(lifespan=lifespan)
    for path, app in apps.items():
        host.mount(path, app)

    @host.middleware("http")
    async def mark(request: fastapi.Request, call_next: Any) -> Any:
        response = await call_next(request)
        response.headers["X-Host"] = "host"
        return response

    @host.get("/v1/models")
    async def models() -> dict[str, str]:
        return {"of": "host"}

    return host


@contextmanager
def _mounted_under_uvicorn(app: Any) -> Iterator[str]:
    with under_uvicorn(mounted({"/llm": app})) as url:
        yield f"{url}/llm"


HOSTS = {"uvicorn": under_uvicorn, "hypercorn": under_hypercorn, "mounted": _mounted_under_uvicorn}
