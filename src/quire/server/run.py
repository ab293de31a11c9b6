"""The server as a process: uvicorn around the application, and an orderly end.

The first SIGTERM or SIGINT stops taking requests and lets those under way finish, for `drain_seconds` at most; a
second one stops at once. The socket is bound before the model is loaded, so that a busy port is said at once.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import uvicorn

from quire.engine.async_engine import AsyncEngine
from quire.engine.llm import LLM
from quire.errors import ArgumentError
from quire.server.app import make_app
from quire.server.http.acceptor import Acceptor
from quire.server.http.client_address import TrustedProxies
from quire.server.http.connections import Connections, raise_file_limit
from quire.server.http.request_log import LOGGER
from quire.server.settings import ServerLimits, ServerSettings

__all__ = ["bind", "serve", "url_of", "uvicorn_config"]

_log = logging.getLogger("quire.server")

_BACKLOG = 2048  # connections that the system keeps until they are accepted


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. *raises:* ArgumentError in one line: the port is taken, the address is not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        where = url_of(host, port).removeprefix("http://")
        raise ArgumentError(
            f"cannot listen on {where}: {error.strerror or error} - in `host`, `port`"
        ) from error
    listener.setblocking(False)
    return listener


class _Server(uvicorn.Server):
    """Draining is ours: uvicorn would end the loop's own signals differently. So is accepting: see `acceptor`.

    limits: as of the configuration.
    """

    def __init__(self, config: uvicorn.Config, limits: ServerLimits) -> None:
        super().__init__(config)
        self._limits = limits

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])  # it would have asyncio accept
        config, state, loop = self.config, self.server_state, asyncio.get_running_loop()

        def protocol() -> asyncio.Protocol:
            kind: Any = config.http_protocol_class
            return kind(config=config, server_state=state, app_state=self.lifespan.state, _loop=loop)

        for listener in sockets or ():
            listener.listen(_BACKLOG)
            most = self._limits.max_connections
            acceptor: Any = Acceptor(
                loop, listener, protocol, most=most, num_open=lambda: len(state.connections)
            )
            self.servers.append(acceptor)

    def install_signal_handlers(self) -> None:
        pass

    def capture_signals(self) -> Any:  # what newer versions call it
        return _NoLock()


class _NoLock:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


def uvicorn_config(app: Any, limits: ServerLimits, proxies: TrustedProxies | None = None) -> uvicorn.Config:
    """How uvicorn serves the application: behind the bounds of `connections`."""
    return uvicorn.Config(
        app,
        http=Connections(limits, proxies=proxies).protocol,  # type: ignore[arg-type]  # called as the class would be
        ws="none",
        log_level="warning",
        access_log=False,
        lifespan="off",
        proxy_headers=False,
        timeout_keep_alive=75,
        backlog=_BACKLOG,
    )


def url_of(host: str, port: int) -> str:
    """An address as a URL has it."""
    return f"http://[{host.replace('%', '%25')}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    llm: LLM, settings: ServerSettings, listener: socket.socket, when_ready: Callable[[], None] = lambda: None
) -> None:
    """Serves until it is told to stop. Closes the engine, not the LLM.

    when_ready: called once nothing in the settings can end the start any more.
    *changes:* the process's garbage collector, see `_collect_requests_only`; its soft limit of open files; the
    logger of requests, if they are logged."""
    asyncio.run(_serve(llm, settings, listener, when_ready))


def _collect_requests_only() -> None:
    """What is there before the first request is not looked at again for garbage.

    Requests leave cycles behind (a connection and its protocol, an error and its frames). Python looks for those among
    the old objects only once they are a quarter as many as all old ones, which the modules' half a million objects put
    off: 80 MiB of them were seen in a busy server, and a collection stopped it for as long as it takes to look at all.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # what counts as old is now nothing


def _log_requests_to_stderr() -> None:
    """One line for each, and nothing else around it."""
    logger = logging.getLogger(LOGGER)
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())
    logger.setLevel(logging.INFO)
    logger.propagate = False


async def _serve(
    llm: LLM, settings: ServerSettings, listener: socket.socket, when_ready: Callable[[], None]
) -> None:
    engine = AsyncEngine(llm)
    try:
        app = make_app(engine, settings)
    except BaseException:  # limits of tenants that cannot be
        await asyncio.to_thread(engine.close)
        raise
    if settings.log_requests:
        _log_requests_to_stderr()
    _collect_requests_only()
    when_ready()
    service = app.state.service
    limits = raise_file_limit(settings.limits)
    server = _Server(uvicorn_config(app, limits, settings.proxies), limits)
    loop = asyncio.get_running_loop()
    num_signals = 0
    told = asyncio.Event()

    def stop() -> None:
        nonlocal num_signals
        num_signals += 1
        service.draining = True
        told.set()
        if num_signals > 1:
            server.force_exit = True
            server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)

    async def drain() -> None:
        await told.wait()
        _log.info("stopping: %d requests under way", service.num_open)
        with suppress(TimeoutError):
            async with asyncio.timeout(settings.drain_seconds):
                while service.num_open and num_signals < 2:
                    await asyncio.sleep(0.02)
                server.should_exit = True  # and uvicorn waits for those who read what is finished
                await asyncio.Event().wait()
        server.force_exit = server.should_exit = True  # else it would wait without end

    draining = asyncio.create_task(drain())
    try:
        await server.serve(sockets=[listener])
    finally:
        draining.cancel()
        service.conversations.close()
        await asyncio.to_thread(engine.close)
        gc.unfreeze()  # what is left at the end is let go as ever
