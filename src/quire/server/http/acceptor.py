"""Accepts connections round-robin by client address.

The system queues connections in the order of their arrival: behind a thousand connections of one client, another
client's would wait until all of those have begun, some tenths of a millisecond each. So all arrived connections are
accepted at once, which costs little, and begin in turns of the addresses: one of each address, `_BEGINS` in one turn
of the event loop.

Not here: the number of open connections (`connections`), and their data (`fair_queue`).

Invariants
    N1  waiting and open connections are together at most `max_connections`, exceeded by one turn's at most; further
        ones stay with the system.

Cost: a system call for each connection and a task where it begins; a turn of the loop while some wait.
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

_BEGINS = 8  # connections that begin in one turn: some milliseconds
_ACCEPTS = 1024  # connections accepted in one turn: some 10 ms
_REST_S = 1.0  # pause after the system had no room for a connection


class Acceptor:
    """Accepts for one listening socket in one event loop, until `close`. The caller closes the socket.

    make_protocol: called for each connection. num_open: the number of connections that have begun and not ended.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        *,
        max_connections: int,
        num_open: Callable[[], int],
    ) -> None:
        self._loop = loop
        self._listener = listener
        self._make_protocol = make_protocol
        self._max_connections = max_connections
        self._num_open = num_open
        self._waiting: dict[str, deque[socket.socket]] = {}  # by address, the next address first
        self._num_waiting = 0
        self._turn: asyncio.Handle | None = None
        self._rest: asyncio.TimerHandle | None = None  # resumes accepting
        self._beginning: set[asyncio.Task[object]] = set()
        self._is_closed = False
        self._fd = listener.fileno()  # known after the socket is closed, too
        loop.add_reader(self._fd, self._accept)

    def close(self) -> None:
        """Accepts no more connections and closes the waiting ones. A second call does nothing."""
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
        """Like `asyncio.Server.wait_closed`."""
        await asyncio.gather(*self._beginning, return_exceptions=True)

    def _accept(self) -> None:
        """Accepts the connections that have arrived."""
        for _ in range(_ACCEPTS):
            if self._num_waiting and self._num_waiting + self._num_open() >= self._max_connections:
                break  # waiting connections go first; the next turn tries again
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                _log.warning("accepting no connections for %g s: %s", _REST_S, error.strerror)
                self._loop.remove_reader(self._fd)
                self._rest = self._loop.call_later(_REST_S, self._resume)
                break
            connection.setblocking(False)
            self._waiting.setdefault(address[0], deque()).append(connection)
            self._num_waiting += 1
        if self._turn is None and self._waiting:
            self._begin_some()

    def _resume(self) -> None:
        self._loop.add_reader(self._fd, self._accept)

    def _begin_some(self) -> None:
        """Begins the connections of one turn."""
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
        except OSError:  # the client has gone
            connection.close()
