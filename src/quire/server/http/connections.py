"""Connections within bounds: how many, whose, how long a request may take to come, how long an answer to be read.

A connection is *waited for* while no whole request has come over it: nothing yet, half of the headers or of the body,
or nothing after an answer. Where there are too many, the one that has been waited for longest goes, so that requests
that come at once find a place whoever holds the others. One that is being answered never goes for that; if all are, a
new one is refused.

While a request is answered its connection is read on, so that its end is seen at once: one more request may come
meanwhile, then reading stops until the answer is written. A client that closes its sending side is gone.

What is too large or too late is answered with 414, 431 or 408, if nothing else is being written, and closed.

Invariants
    H1  what a connection holds of a request that has not come whole is bounded: headers here, bodies by `BodyLimit`.
    H2  never more than `max_connections` are open, nor `max_connections_per_address` of one address that is no
        trusted proxy's.

Cost: O(1) a connection, request and piece of data; once a second a look at each connection.
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
_FRAMING = 16  # bytes of headers of chunks, for each byte of a body, that are taken for no attack
_OTHER_FILES = 256  # descriptors for everything that is no connection


class Connections:
    """Those of one server, for its event loop. `protocol` is what uvicorn makes for each. What comes over
    them is handled in `turns`."""

    def __init__(
        self,
        limits: ServerLimits,
        clock: Callable[[], float] = time.monotonic,
        proxies: TrustedProxies | None = None,
    ) -> None:
        self.limits = limits
        self.clock = clock
        self._proxies = proxies or TrustedProxies()
        self._of: dict[str, dict[GuardedProtocol, None]] = {}  # by address
        self._waited_for: dict[GuardedProtocol, None] = {}  # the longest first
        self._num_open = 0
        self._timer: asyncio.TimerHandle | None = None
        self.turns = FairQueue()

    def __len__(self) -> int:
        return self._num_open

    def protocol(self, *arguments: Any, **options: Any) -> GuardedProtocol:
        """For `uvicorn.Config(http=...)`."""
        return GuardedProtocol(self, *arguments, **options)

    def admit(self, one: GuardedProtocol) -> bool:
        """Whether it has a place; for that another one may have to go."""
        mine = self._of.get(one.address, {})
        is_full = len(mine) >= self.limits.max_connections_per_address and not self._proxies.has(one.address)
        if is_full and not self._make_room(mine):
            return False
        if self._num_open >= self.limits.max_connections and not self._make_room(self._waited_for):
            return False
        self._of.setdefault(one.address, {})[one] = None
        self._num_open += 1
        if self._timer is None:
            self._timer = one.loop.call_later(_SWEEP_S, self._tick, one.loop)
        return True

    def leave(self, one: GuardedProtocol) -> None:
        """Twice does nothing."""
        mine = self._of.get(one.address, {})
        if one not in mine:
            return
        del mine[one]
        if not mine:
            del self._of[one.address]
        self._waited_for.pop(one, None)
        self._num_open -= 1

    def wait_for(self, one: GuardedProtocol) -> None:
        """From now on."""
        self._waited_for.pop(one, None)
        self._waited_for[one] = None
        mine = self._of[one.address]
        mine.pop(one, None)
        mine[one] = None

    def answer(self, one: GuardedProtocol) -> None:
        """A whole request has come."""
        self._waited_for.pop(one, None)

    def sweep(self) -> None:
        """Ends what is overdue."""
        now = self.clock()
        for mine in list(self._of.values()):
            for one in list(mine):
                one.end_if_overdue(now)

    def _make_room(self, among: dict[GuardedProtocol, None]) -> bool:
        for one in among:
            if one in self._waited_for:
                self.leave(one)
                one.give_way()
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
        self._next: Any = None  # the request behind it, which waits for its turn
        self._answered: Any = None  # uvicorn's cycle of the newest request that has begun
        self._num_whole = 0  # requests that have come and are not answered
        self._coming: str | None = "headers"  # what comes of the next one, since when: "headers", "body"
        self._since = guard.clock()
        self._write_paused_at: float | None = None
        self._closing_at: float | None = None
        self._num_bytes = self._num_body_bytes = self._num_discarded = 0  # of the request that comes

    # -- the transport's calls -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        if self._guard.admit(self):
            self._guard.wait_for(self)
        else:
            self._refuse(503, "too many connections; try again", retry_after_s=1)

    def eof_received(self) -> None:
        self._tell_gone()  # the connection is lost only once all is written, which may take a slow reader long

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_over = True
        self._tell_gone()
        self._guard.leave(self)
        self._guard.turns.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._is_over and self._guard.turns.take(self, data):
            self.transport.pause_reading()

    def handle(self, data: bytes, *, is_last: bool) -> None:
        """A piece in its turn, an empty one for the next request that has come already; after the last one the
        connection is read again."""
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
            ):  # a right one is taken: its client reads then
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
            self._guard.answer(self)
        self._expect(None)

    def on_response_complete(self) -> None:
        self._num_whole = max(0, self._num_whole - 1)  # 0 already: answered before it had come whole
        self._is_next = True
        super().on_response_complete()
        self._is_next = False
        self._expect(self._coming)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """uvicorn's. A request that came before the one before it was answered waits for its turn like others."""
        if not self._is_next:
            self._begin(cycle, app)
            return
        self._next = cycle, app
        self._guard.turns.take(self, b"")

    # -- the guard's -----------------------------------------------------------------------------------

    def end_if_overdue(self, now: float) -> None:
        """Refuses a request that takes too long to come, drops an answer that nobody reads."""
        limits = self._limits
        if self.transport.is_closing():
            self._closing_at = now if self._closing_at is None else self._closing_at
        if any(
            since is not None and now - since > limits.max_send_seconds
            for since in (self._write_paused_at, self._closing_at)
        ):
            self.give_way()
        elif self._num_whole or self._is_over:
            pass  # while it is answered, nothing more is read
        elif self._coming == "headers" and now - self._since > limits.max_header_seconds:
            self._refuse(408, f"expected a request's headers within {limits.max_header_seconds} s")
        elif self._coming == "body" and now - self._since > limits.max_body_seconds:
            self._refuse(408, f"expected a request's body within {limits.max_body_seconds} s")

    def give_way(self) -> None:
        """Ends it at once, whatever is under way."""
        self._is_over = True
        self.transport.abort()

    def _expect(self, part: str | None) -> None:
        """That comes from now on; None: nothing until the client begins again, for which uvicorn has a time."""
        self._coming, self._since = part, self._guard.clock()
        if not self._num_whole and not self._is_over:
            self._guard.wait_for(self)

    def _begin(self, cycle: Any, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _tell_gone(self) -> None:
        """The requests under way. uvicorn tells the one that came last, which may wait behind the one it answers."""
        for cycle in (self._answered, self.cycle):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def _refuse_headers(self) -> None:
        most = self._limits.max_header_bytes
        if self.headers:
            self._refuse(431, f"expected headers of at most {most} bytes, got larger ones")
        else:
            self._refuse(414, f"expected an address of at most {most} bytes, got a longer one")

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
    """Has this process open as many files as its connections may take; where the system allows fewer, the limits with
    as many connections as it allows, and a warning.

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
    most = max(allowed // 2, allowed - _OTHER_FILES)
    _log.warning(
        "the system allows %d open files: at most %d connections are taken instead of max_connections=%d; a higher "
        "hard limit (ulimit -Hn) allows more",
        allowed,
        most,
        limits.max_connections,
    )
    return replace(limits, max_connections=most)
