"""Limits of one exchange with a server: seconds and bytes in total, whatever the server does.

A socket's own time-out starts again with each packet: a server that sends a byte now and then is never late. And a
server may announce a wrong length.

Invariants
    A1  no call on a `LimitedSocket` lasts beyond the end of the running thread's exchange, or receives more bytes
        than the exchange has left.
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
    """Limits of each thread's current exchange. Outside of `exchange` they are 0."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._exchange = threading.local()

    @contextmanager
    def exchange(self, seconds: float, num_bytes: int) -> Iterator[None]:
        self._exchange.until = self._clock() + seconds
        self._exchange.num_bytes = num_bytes
        try:
            yield
        finally:
            self._exchange.until = 0.0
            self._exchange.num_bytes = 0

    def seconds_left(self) -> float:
        """*raises:* TimeoutError: the time is over."""
        left = getattr(self._exchange, "until", 0.0) - self._clock()
        if left <= 0:
            raise TimeoutError("the time for this exchange is over")
        return left

    def bytes_left(self) -> int:
        return getattr(self._exchange, "num_bytes", 0)

    def count_bytes(self, num_bytes: int) -> None:
        """Counts received bytes. *raises:* OSError: they are more than the exchange has left."""
        self._exchange.num_bytes = getattr(self._exchange, "num_bytes", 0) - num_bytes
        if self._exchange.num_bytes < 0:
            raise OSError("the server sent more bytes than any answer to this has")


class LimitedSocket:
    """A socket within an allowance. Its time-out has two meanings: 0 does not wait, any other value blocks."""

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
        self._set_timeout()
        data = self._inner.recv(size)
        self._allowance.count_bytes(len(data))
        return data

    def recv_into(self, buffer: Any, size: int = 0) -> int:
        self._set_timeout()
        num_bytes = self._inner.recv_into(buffer, size)
        self._allowance.count_bytes(num_bytes)
        return num_bytes

    def _set_timeout(self) -> None:
        self._inner.settimeout(self._allowance.seconds_left() if self._waits else 0.0)
