"""`ConnectionPool`: connections to a server, kept between calls; each thread has one of its own during a call.

Invariants
    N1  a connection whose call failed is closed: no answer is taken for that of another question.
    N2  a connection that the server has closed, or on which bytes wait that belong to no answer, is not used again.

Cost: a poll of the socket for each call.
"""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quire.tiers.remote.limited_socket import LimitedSocket

__all__ = ["ConnectionPool"]


class ConnectionPool:
    """See the module's text. connect: makes a connection; within the exchange of the call that needs it."""

    def __init__(self, connect: Callable[[], LimitedSocket]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._idle: list[LimitedSocket] = []
        self._is_closed = False

    @contextmanager
    def connection(self) -> Iterator[LimitedSocket]:
        """A connection for one call; it is kept for a later one if the block raises nothing."""
        connection = self._idle_connection() or self._connect()
        is_done = False
        try:
            yield connection
            is_done = True
        finally:
            with self._lock:
                if is_kept := is_done and not self._is_closed:
                    self._idle.append(connection)
            if not is_kept:
                connection.close()

    def close_idle(self) -> None:
        """Closes the connections that no call uses."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def close(self) -> None:
        """Closes them for good; a call under way closes its own connection."""
        with self._lock:
            self._is_closed = True
        self.close_idle()

    def _idle_connection(self) -> LimitedSocket | None:
        while True:
            with self._lock:
                idle = self._idle.pop() if self._idle else None
            if idle is None or not _is_over(idle):
                return idle
            idle.close()


def _is_over(connection: LimitedSocket) -> bool:
    """Whether an idle connection has an end, or bytes that belong to no answer."""
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))
