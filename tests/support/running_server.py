"""A server on a free loopback port, in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from quire import LLM, AsyncEngine
from quire.server.app import create_app
from quire.server.run import ApiServer, bind, url_of
from quire.server.settings import ServerSettings
from quire.server.warm_prompts import compute_all


@contextmanager
def running(llm: LLM, settings: ServerSettings) -> Iterator[tuple[str, object]]:
    """(base URL, application) of a server that serves until the block ends."""
    listener = bind(settings.host, 0)
    engine = AsyncEngine(llm)
    app = create_app(engine, settings)
    server = ApiServer(app, settings.limits, settings.proxies)

    async def serve() -> None:
        warming = asyncio.create_task(compute_all(app.state.service, app.state.warm_prompts))
        await server.serve(sockets=[listener])
        warming.cancel()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    try:
        yield url_of(settings.host, listener.getsockname()[1]), app
    finally:
        server.should_exit = True
        thread.join(10)
        app.state.service.close()
        listener.close()
