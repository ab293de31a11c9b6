"""Bounds connections: their number, their number by address, the time of a request, the time of reading an answer.

A connection is *idle* while no whole request has come over it: nothing yet, a part of the headers or of the body, or
nothing after an answer. If there are too many connections, the one that has been idle for longest is closed, so that
complete requests find a place. A connection that is being answered is never closed for that; if all are, a new one is
refused.

While a request is answered its connection is still read, so that its end is seen at once: one more request may come
meanwhile, then reading stops until the answer is written. A client that closes its sending side has gone.

A request that is too large or too late is answered with 414, 431 or 408, unless another answer is being written, and
its connection is closed.

Invariants
    H1  the memory of an incomplete request is bounded: headers here, bodies by `BodyLimit`.
    H2  never more than `max_connections` are open, nor `max_connections_per_address` of one address that is not a
        trusted proxy's.

Cost: O(1) for each connection, request and piece of data; once a second a look at each connection.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from quire.server.api_errors import ApiError, error_body
from quire.server.http.client_address import TrustedProxies
from quire.server.http.fair_queue import FairQueue
from quire.server.http.http_versions import Protocol
from quire.server.settings import ServerLimits

__all__ = ["Connections", "GuardedProtocol", "raise_file_limit"]

_log = logging.getLogger("quire.server")

_SWEEP_S = 1.0
_FRAMING = 16  # bytes of chunk headers for each byte of a body, beyond which they count as an attack
_OTHER_FILES = 256  # file descriptors for other purposes than connections


class Connections:
    """The connections of one server, in its event loop. `protocol` makes each for uvicorn. Their data is handled
    through `queue`."""

    def __init__(
        self,
        limits: ServerLimits,
        clock: Callable[[], float] = time.monotonic,
        proxies: TrustedProxies | None = None,
    ) -> None:
        self.limits = limits
        self.clock = clock
        self._proxies = proxies or TrustedProxies()
        self._by_address: dict[str, dict[GuardedProtocol, None]] = {}
        self._idle: dict[GuardedProtocol, None] = {}  # the longest idle first
        self._num_open = 0
        self._timer: asyncio.TimerHandle | None = None
        self.queue = FairQueue()

    def __len__(self) -> int:
        return self._num_open

    def protocol(self, *arguments: Any, **options: Any) -> GuardedProtocol:
        """For `uvicorn.Config(http=...)`."""
        return GuardedProtocol(self, *arguments, **options)

    def admit(self, connection: GuardedProtocol) -> bool:
        """Whether the connection has a place; an idle one may be closed for it."""
        address = connection.address
        same_address = self._by_address.get(address, {})
        is_full = len(same_address) >= self.limits.max_connections_per_address
        if is_full and not self._proxies.has(address) and not self._make_room(same_address):
            return False
        if self._num_open >= self.limits.max_connections and not self._make_room(self._idle):
            return False
        self._by_address.setdefault(address, {})[connection] = None
        self._num_open += 1
        if self._timer is None:
            self._timer = connection.loop.call_later(_SWEEP_S, self._tick, connection.loop)
        return True

    def remove(self, connection: GuardedProtocol) -> None:
        """A second call does nothing."""
        same_address = self._by_address.get(connection.address, {})
        if connection not in same_address:
            return
        del same_address[connection]
        if not same_address:
            del self._by_address[connection.address]
        self._idle.pop(connection, None)
        self._num_open -= 1

    def mark_idle(self, connection: GuardedProtocol) -> None:
        """The connection is idle from now on."""
        self._idle.pop(connection, None)
        self._idle[connection] = None
        same_address = self._by_address[connection.address]
        same_address.pop(connection, None)
        same_address[connection] = None

    def mark_busy(self, connection: GuardedProtocol) -> None:
        """A whole request has come over the connection."""
        self._idle.pop(connection, None)

    def sweep(self) -> None:
        """Ends overdue connections."""
        now = self.clock()
        for same_address in list(self._by_address.values()):
            for connection in list(same_address):
                connection.end_if_overdue(now)

    def _make_room(self, candidates: dict[GuardedProtocol, None]) -> bool:
        for connection in candidates:
            if connection in self._idle:
                self.remove(connection)
                connection.abort()
                return True
        return False

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self.sweep()
        self._timer = loop.call_later(_SWEEP_S, self._tick, loop) if self._num_open else None


class GuardedProtocol(Protocol):
    """One connection."""

    def __init__(self, guard: Connections, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.address = ""
        self._guard = guard
        self._limits = guard.limits
        self._is_over = False  # refused, or closed
        self._is_next = False  # an answer has ended just now
        self._next: Any = None  # the following request, until the queue hands it back
        self._answered: Any = None  # uvicorn's cycle of the newest request that has begun
        self._num_whole = 0  # complete requests that are not answered
        self._coming: str | None = "headers"  # the incomplete part of the next request: "headers", "body"
        self._since = guard.clock()  # start of that part
        self._write_paused_at: float | None = None
        self._closing_at: float | None = None
        self._num_bytes = self._num_body_bytes = self._num_discarded = 0  # of the incomplete request

    # -- the transport's calls -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        if self._guard.admit(self):
            self._guard.mark_idle(self)
        else:
            self._refuse(503, "too many connections; try again", retry_after_s=1)

    def eof_received(self) -> None:
        self._end_cycles()  # `connection_lost` comes only once all is written, which a slow reader delays

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_over = True
        self._end_cycles()
        self._guard.remove(self)
        self._guard.queue.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._is_over and self._guard.queue.put(self, data):
            self.transport.pause_reading()

    def handle(self, data: bytes, *, is_last: bool) -> None:
        """Handles a piece of data; an empty one begins the following request, which has come already. After the last
        queued piece the connection is read again."""
        if self._is_over:
            return
        if is_last and not self.flow.read_paused:
            self.transport.resume_reading()
        if not data:
            (cycle, app), self._next = self._next, None
            self._begin(cycle, app)
            return
        self._num_bytes += len(data)
        super().data_received(data)
        no_body = self._num_bytes - self._num_body_bytes * (1 + _FRAMING)
        if not self._is_over and no_body > self._limits.max_header_bytes:
            self._refuse_headers()

    def pause_writing(self) -> None:
        self._write_paused_at = self._guard.clock()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._write_paused_at = None
        super().resume_writing()

    # -- the parser's calls ----------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect("headers")

    def on_headers_complete(self) -> None:
        if self._is_over:
            return
        num_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if num_bytes > self._limits.max_header_bytes:
            self._refuse_headers()
            return
        super().on_headers_complete()
        if len(self.pipeline) == 1:
            self.flow.resume_reading()
        self._expect("body")

    def on_body(self, body: bytes) -> None:
        if self._is_over:
            return
        self._num_body_bytes += len(body)
        if self.cycle.response_complete:
            self._num_discarded += len(body)
            if (
                self._num_discarded > self._limits.max_body_bytes
            ):  # an accepted request's body is consumed: its client reads the answer afterwards
                self._close()
                return
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_over:
            return
        super().on_message_complete()
        self._num_bytes = self._num_body_bytes = self._num_discarded = 0
        if not self.cycle.response_complete:
            self._num_whole += 1
            self._guard.mark_busy(self)
        self._expect(None)

    def on_response_complete(self) -> None:
        self._num_whole = max(0, self._num_whole - 1)  # already 0 if it was answered before it was complete
        self._is_next = True
        super().on_response_complete()
        self._is_next = False
        self._expect(self._coming)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """Overrides uvicorn's. A request that came before the previous one was answered goes through the queue."""
        if not self._is_next:
            self._begin(cycle, app)
            return
        self._next = cycle, app
        self._guard.queue.put(self, b"")

    # -- the guard's -----------------------------------------------------------------------------------

    def end_if_overdue(self, now: float) -> None:
        """Refuses a request that takes too long to arrive; drops an answer that the client does not read."""
        limits = self._limits
        if self.transport.is_closing():
            self._closing_at = now if self._closing_at is None else self._closing_at
        if any(
            since is not None and now - since > limits.max_send_seconds
            for since in (self._write_paused_at, self._closing_at)
        ):
            self.abort()
        elif self._num_whole or self._is_over:
            pass  # while a request is answered, none is incomplete
        elif self._coming == "headers" and now - self._since > limits.max_header_seconds:
            self._refuse(408, f"expected a request's headers within {limits.max_header_seconds} s")
        elif self._coming == "body" and now - self._since > limits.max_body_seconds:
            self._refuse(408, f"expected a request's body within {limits.max_body_seconds} s")

    def abort(self) -> None:
        """Closes the connection at once."""
        self._is_over = True
        self.transport.abort()

    def _expect(self, part: str | None) -> None:
        """The next part of a request; None: none until the client begins one, for which uvicorn has a timeout."""
        self._coming, self._since = part, self._guard.clock()
        if not self._num_whole and not self._is_over:
            self._guard.mark_idle(self)

    def _begin(self, cycle: Any, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _end_cycles(self) -> None:
        """Ends the open requests. uvicorn ends only the last one, which may wait behind the one being answered."""
        for cycle in (self._answered, self.cycle):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def _refuse_headers(self) -> None:
        limit = self._limits.max_header_bytes
        if self.headers:
            self._refuse(431, f"expected headers of at most {limit} bytes, got larger ones")
        else:
            self._refuse(414, f"expected an address of at most {limit} bytes, got a longer one")

    def _refuse(self, status: int, message: str, retry_after_s: int | None = None) -> None:
        is_free = self.cycle is None or self.cycle.response_complete
        if is_free and not self.transport.is_closing():
            body = json.dumps(error_body(ApiError(status, message))).encode()
            retry = f"Retry-After: {retry_after_s}\r\n" if retry_after_s is not None else ""
            head = (
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n{retry}Connection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self._close()

    def _close(self) -> None:
        self._is_over = True
        self.transport.close()


def raise_file_limit(limits: ServerLimits) -> ServerLimits:
    """Raises this process's limit of open files to that of its connections. If the system allows fewer files, returns
    limits with fewer connections and logs a warning.

    *changes:* the process's soft limit of open files.
    """
    wanted = limits.max_connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return limits
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed == wanted:
        return limits
    max_connections = max(allowed // 2, allowed - _OTHER_FILES)
    _log.warning(
        "the system allows %d open files: at most %d connections are accepted instead of max_connections=%d; a "
        "higher hard limit (ulimit -Hn) allows more",
        allowed,
        max_connections,
        limits.max_connections,
    )
    return replace(limits, max_connections=max_connections)
