"""The server as a process: uvicorn around the application, and an orderly end.

The first SIGTERM or SIGINT stops taking requests and lets open ones finish, for at most `drain_seconds`; a second
signal stops at once. The socket is bound before the model is loaded, so that a busy port is reported at once.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import uvicorn

from quire.engine.async_engine import AsyncEngine
from quire.engine.llm import LLM
from quire.errors import ArgumentError
from quire.server.app import create_app
from quire.server.http.acceptor import Acceptor
from quire.server.http.client_address import TrustedProxies
from quire.server.http.connections import Connections, raise_file_limit
from quire.server.http.request_log import LOGGER
from quire.server.settings import ServerLimits, ServerSettings
from quire.server.warm_prompts import compute_all

__all__ = ["ApiServer", "bind", "log_requests_to_stderr", "serve", "url_of", "uvicorn_config"]

_log = logging.getLogger("quire.server")

_BACKLOG = 2048  # connections that the system queues before they are accepted


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. *raises:* ArgumentError in one line: the port is taken, or no address of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        address = url_of(host, port).removeprefix("http://")
        raise ArgumentError(
            f"cannot listen on {address}: {error.strerror or error}; give another --host or --port"
        ) from error
    listener.setblocking(False)
    return listener


class ApiServer(uvicorn.Server):
    """uvicorn within the limits of `connections`, without its signal handlers. `serve(sockets=[bind(...)])` serves
    until `should_exit` is set. `Acceptor` replaces asyncio's accepting.
    """

    def __init__(self, app: Any, limits: ServerLimits, proxies: TrustedProxies | None = None) -> None:
        super().__init__(uvicorn_config(app, limits, proxies))
        self._limits = limits

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])  # no sockets: asyncio accepts nothing
        config, state, loop = self.config, self.server_state, asyncio.get_running_loop()

        def protocol() -> asyncio.Protocol:
            kind: Any = config.http_protocol_class
            return kind(config=config, server_state=state, app_state=self.lifespan.state, _loop=loop)

        for listener in sockets or ():
            listener.listen(_BACKLOG)
            acceptor: Any = Acceptor(
                loop,
                listener,
                protocol,
                max_connections=self._limits.max_connections,
                num_open=lambda: len(state.connections),
            )
            self.servers.append(acceptor)

    def install_signal_handlers(self) -> None:
        pass

    def capture_signals(self) -> Any:  # the name in newer versions
        return nullcontext()


def uvicorn_config(app: Any, limits: ServerLimits, proxies: TrustedProxies | None = None) -> uvicorn.Config:
    """The configuration that serves the application within the limits of `connections`."""
    return uvicorn.Config(
        app,
        http=Connections(limits, proxies=proxies).protocol,  # type: ignore[arg-type]  # called like the class
        ws="none",
        log_level="warning",
        access_log=False,
        lifespan="off",
        proxy_headers=False,
        timeout_keep_alive=75,
        backlog=_BACKLOG,
    )


def url_of(host: str, port: int) -> str:
    """The URL of an address."""
    return f"http://[{host.replace('%', '%25')}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    llm: LLM, settings: ServerSettings, listener: socket.socket, when_ready: Callable[[], None] = lambda: None
) -> None:
    """Serves until a signal stops it. Closes the engine, not the LLM.

    when_ready: called once no setting can end the start any more. *changes:* the process's garbage collector, see
    `_freeze_startup_objects`; its soft limit of open files; the logger of requests, if they are logged."""
    asyncio.run(_serve(llm, settings, listener, when_ready))


def _freeze_startup_objects() -> None:
    """Exempts the objects that exist before the first request from garbage collection.

    Requests leave cycles behind (a connection and its protocol, an error and its frames). Python collects old objects
    only once new ones are a quarter of all; half a million objects of modules delay that: 80 MiB of cycles were seen
    in a busy server, and a collection stopped it while it looked at all objects.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # resets Python's count of old objects


def log_requests_to_stderr() -> None:
    """Writes one line for each request, without a prefix."""
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
        app = create_app(engine, settings)
    except BaseException:  # such as impossible limits of tenants
        await asyncio.to_thread(engine.close)
        raise
    if settings.log_requests:
        log_requests_to_stderr()
    _freeze_startup_objects()
    when_ready()
    service = app.state.service
    limits = raise_file_limit(settings.limits)
    server = ApiServer(app, limits, settings.proxies)
    loop = asyncio.get_running_loop()
    num_signals = 0
    is_stopping = asyncio.Event()

    def stop() -> None:
        nonlocal num_signals
        num_signals += 1
        service.draining = True
        is_stopping.set()
        if num_signals > 1:
            server.force_exit = True
            server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)

    async def drain() -> None:
        await is_stopping.wait()
        _log.info("stopping: %d open requests", service.num_open)
        with suppress(TimeoutError):
            async with asyncio.timeout(settings.drain_seconds):
                while service.num_open and num_signals < 2:
                    await asyncio.sleep(0.02)
                server.should_exit = True  # uvicorn then waits until clients have read their answers
                await asyncio.Event().wait()
        server.force_exit = server.should_exit = True  # uvicorn would wait without a limit

    draining = asyncio.create_task(drain())
    warming = asyncio.create_task(compute_all(service, app.state.warm_prompts))
    try:
        await server.serve(sockets=[listener])
    finally:
        draining.cancel()
        warming.cancel()
        await asyncio.to_thread(service.close)
        gc.unfreeze()
