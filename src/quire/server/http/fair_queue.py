"""Handles the connections' data round-robin by client address.

A piece of data may begin a request, the most expensive work that one piece can cause. Data of a thousand connections
at once would make turns of the event loop with a thousand requests each, while every client's requests need several
turns. So one turn handles `_PIECES` pieces; the others wait and follow in turns of the addresses: one piece of each
address. Behind a proxy all connections have its address; their order is that of arrival.

Not here: the handling of a piece, and when a connection is read (`connections`).

Invariants
    T1  the pieces of one connection are handled in the order of their arrival.
    T2  once `max_bytes` wait, a piece of a connection without waiting pieces is handled at once.

Cost: O(1) for each piece; one more turn of the loop after each turn with data.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

__all__ = ["FairQueue"]

_PIECES = 8  # some milliseconds, if each begins a request
_MAX_BYTES = 64 << 20


class Connection(Protocol):
    """A connection with its client's address. `handle` gets a piece; is_last: no further piece of it waits."""

    address: str
    loop: asyncio.AbstractEventLoop

    def handle(self, data: bytes, *, is_last: bool) -> None: ...


class FairQueue:
    """The queue of one event loop. num_pieces: pieces that one turn handles; max_bytes: see T2."""

    def __init__(self, num_pieces: int = _PIECES, max_bytes: int = _MAX_BYTES) -> None:
        self._num_pieces = num_pieces
        self._max_bytes = max_bytes
        self._waiting: dict[str, dict[Connection, deque[bytes]]] = {}  # by address, the next address first
        self._num_bytes = 0
        self._num_handled = 0  # in this turn
        self._is_called = False

    def put(self, connection: Connection, data: bytes) -> bool:
        """Handles a piece now or later; whether it waits."""
        pieces = self._waiting.get(connection.address, {}).get(connection)
        if pieces is None and (
            self._num_bytes >= self._max_bytes or (not self._waiting and self._num_handled < self._num_pieces)
        ):
            self._num_handled += 1
            self._call_next(connection.loop)
            connection.handle(data, is_last=True)
            return False
        if pieces is None:
            pieces = self._waiting.setdefault(connection.address, {}).setdefault(connection, deque())
        pieces.append(data)
        self._num_bytes += len(data)
        self._call_next(connection.loop)
        return True

    def remove(self, connection: Connection) -> None:
        """Drops the waiting pieces of a connection that has ended."""
        same_address = self._waiting.get(connection.address, {})
        for data in same_address.pop(connection, ()):
            self._num_bytes -= len(data)
        if not same_address:
            self._waiting.pop(connection.address, None)

    def _call_next(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._is_called:
            self._is_called = True
            loop.call_soon(self._turn, loop)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_called, self._num_handled = False, 0
        while self._waiting and self._num_handled < self._num_pieces:
            address, same_address = next(iter(self._waiting.items()))
            connection, pieces = next(iter(same_address.items()))
            data = pieces.popleft()
            self._num_bytes -= len(data)
            del self._waiting[address]
            if not pieces:
                del same_address[connection]
            if same_address:
                self._waiting[address] = same_address
            self._num_handled += 1
            connection.handle(data, is_last=not pieces)
        if self._waiting or self._num_handled:  # the next turn counts from 0
            self._call_next(loop)
