"""Whose connection begins next, where more come at once than one turn of the event loop should begin.

The system keeps connections that nobody has accepted in the order in which they came: behind a thousand of one client's
another's would wait until all of those have begun, some tenths of a millisecond each. So what has come is accepted at
once, which costs little, and begins in the order of addresses: one that waits of each, and again; `_BEGINS` a turn.

Not here: how many may be open (`connections`), and what comes over them (`turns`).

Invariants
    N1  what waits here and what is open are together at most `most`, but for one turn's; more stay with the system.

Cost: a system call a connection, and a task where it begins; a timer's turn while some wait.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections import deque
from collections.abc import Callable

__all__ = ["Acceptor"]

_log = logging.getLogger("quire.server")

_BEGINS = 8  # that one turn begins: some milliseconds
_ACCEPTS = 1024  # that one turn accepts: some 10 ms
_REST_S = 1.0  # behind a turn in which the system had no room for one more


class Acceptor:
    """Of one listening socket, in one event loop, until `close`; the socket is its owner's.

    make_protocol: called for each connection. num_open: how many have begun and not ended.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        *,
        most: int,
        num_open: Callable[[], int],
    ) -> None:
        self._loop = loop
        self._listener = listener
        self._make_protocol = make_protocol
        self._most = most
        self._num_open = num_open
        self._waiting: dict[str, deque[socket.socket]] = {}  # by address, the next one first
        self._num_waiting = 0
        self._turn: asyncio.Handle | None = None
        self._rest: asyncio.TimerHandle | None = None
        self._beginning: set[asyncio.Task[object]] = set()
        self._is_closed = False
        self._fd = listener.fileno()  # closed or not
        loop.add_reader(self._fd, self._accept)

    def close(self) -> None:
        """Accepts no more, and closes what waits. Twice does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._fd)
        for handle in (self._turn, self._rest):
            if handle is not None:
                handle.cancel()
        for waiting in self._waiting.values():
            for connection in waiting:
                connection.close()
        self._waiting.clear()

    async def wait_closed(self) -> None:
        """As of `asyncio.Server`."""
        await asyncio.gather(*self._beginning, return_exceptions=True)

    def _accept(self) -> None:
        """What has come."""
        for _ in range(_ACCEPTS):
            if self._num_waiting and self._num_waiting + self._num_open() >= self._most:
                break  # those that wait go first: the next turn looks again
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                _log.warning("no connection is accepted for %g s: %s", _REST_S, error.strerror)
                self._loop.remove_reader(self._fd)
                self._rest = self._loop.call_later(_REST_S, self._go_on)
                break
            connection.setblocking(False)
            self._waiting.setdefault(address[0], deque()).append(connection)
            self._num_waiting += 1
        if self._turn is None and self._waiting:
            self._begin_some()

    def _go_on(self) -> None:
        self._loop.add_reader(self._fd, self._accept)

    def _begin_some(self) -> None:
        """A turn."""
        self._turn = None
        for _ in range(_BEGINS):
            if not self._waiting:
                return
            address = next(iter(self._waiting))
            waiting = self._waiting.pop(address)
            task = self._loop.create_task(self._begin(waiting.popleft()))
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)
            self._num_waiting -= 1
            if waiting:
                self._waiting[address] = waiting
        self._turn = self._loop.call_soon(self._begin_some)

    async def _begin(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, connection)
        except OSError:  # it has gone
            connection.close()
