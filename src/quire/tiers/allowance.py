"""What one exchange with a server may take, whatever the server does: so many seconds and so many bytes, in total.

A socket's own time-out counts from each packet anew: a server that sends a byte now and then is never late. And a
length that a server announces is no reason to believe in it.

Invariants
    A1  no call on a `LimitedSocket` lasts beyond the end of the running thread's exchange, or takes in more bytes than
        it has left.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Allowance", "LimitedSocket"]


class Allowance:
    """Each thread has its own. Outside of `exchange` there is none left."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._own = threading.local()

    @contextmanager
    def exchange(self, seconds: float, num_bytes: int) -> Iterator[None]:
        self._own.until = self._clock() + seconds
        self._own.num_bytes = num_bytes
        try:
            yield
        finally:
            self._own.until = 0.0
            self._own.num_bytes = 0

    def seconds_left(self) -> float:
        """*raises:* TimeoutError: none are."""
        left = getattr(self._own, "until", 0.0) - self._clock()
        if left <= 0:
            raise TimeoutError("the time for this exchange is over")
        return left

    def take(self, num_bytes: int) -> None:
        """*raises:* OSError: fewer bytes are left."""
        self._own.num_bytes = getattr(self._own, "num_bytes", 0) - num_bytes
        if self._own.num_bytes < 0:
            raise OSError("the server sent more bytes than any answer to this has")


class LimitedSocket:
    """A socket within an allowance. A time-out set on it means blocking, but for 0, which means not to wait."""

    def __init__(self, inner: Any, allowance: Allowance) -> None:
        self._inner: socket.socket = inner
        self._allowance = allowance
        self._waits = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def settimeout(self, seconds: float | None) -> None:
        self._waits = seconds != 0
        self._inner.settimeout(seconds)

    def sendall(self, data: Any) -> None:
        # The socket's own `sendall` counts its time-out over the whole of the data.
        self._inner.settimeout(self._allowance.seconds_left())
        self._inner.sendall(data)

    def recv(self, size: int) -> bytes:
        self._get_ready()
        data = self._inner.recv(size)
        self._allowance.take(len(data))
        return data

    def recv_into(self, buffer: Any, size: int = 0) -> int:
        self._get_ready()
        num_bytes = self._inner.recv_into(buffer, size)
        self._allowance.take(num_bytes)
        return num_bytes

    def _get_ready(self) -> None:
        self._inner.settimeout(self._allowance.seconds_left() if self._waits else 0.0)
