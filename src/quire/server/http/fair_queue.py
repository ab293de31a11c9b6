"""Whose data is handled next, where more comes at once than one turn of the event loop should take.

A piece of data may begin a request, which is the dearest that one piece can do. Whoever sends on a thousand connections
at once would make turns of the loop that take a thousand of those, and everybody's requests need several turns. So one
turn handles `_PIECES` of them; what is beyond waits, and goes on in the order of addresses: one piece of each that
waits, and again. Behind a proxy all have its address, and go on in the order in which they came.

Not here: what is done with a piece, and when a connection is read (`connections`).

Invariants
    T1  the pieces of one connection are handled in the order in which they came.
    T2  where `most_bytes` wait, what comes of a connection of which nothing waits is handled at once.

Cost: O(1) a piece; one more turn of the loop behind each in which something came.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

__all__ = ["FairQueue"]

_PIECES = 8  # some milliseconds, if each begins a request
_MOST_BYTES = 64 << 20


class Connection(Protocol):
    """A connection, and its client's address. `handle` takes a piece; is_last: nothing of it waits then."""

    address: str
    loop: asyncio.AbstractEventLoop

    def handle(self, data: bytes, *, is_last: bool) -> None: ...


class FairQueue:
    """Of one event loop's connections. num_pieces: that one turn handles; most_bytes: see T2."""

    def __init__(self, num_pieces: int = _PIECES, most_bytes: int = _MOST_BYTES) -> None:
        self._num_pieces = num_pieces
        self._most_bytes = most_bytes
        self._waiting: dict[str, dict[Connection, deque[bytes]]] = {}  # by address, the next one first
        self._num_bytes = 0
        self._num_handled = 0  # in this turn
        self._is_called = False

    def take(self, one: Connection, data: bytes) -> bool:
        """Handles a piece now or later; whether it waits."""
        mine = self._waiting.get(one.address, {}).get(one)
        if mine is None and (
            self._num_bytes >= self._most_bytes
            or (not self._waiting and self._num_handled < self._num_pieces)
        ):
            self._num_handled += 1
            self._call_next(one.loop)
            one.handle(data, is_last=True)
            return False
        if mine is None:
            mine = self._waiting.setdefault(one.address, {}).setdefault(one, deque())
        mine.append(data)
        self._num_bytes += len(data)
        self._call_next(one.loop)
        return True

    def leave(self, one: Connection) -> None:
        """Forgets what waits of a connection that has ended."""
        mine = self._waiting.get(one.address, {})
        for data in mine.pop(one, ()):
            self._num_bytes -= len(data)
        if not mine:
            self._waiting.pop(one.address, None)

    def _call_next(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._is_called:
            self._is_called = True
            loop.call_soon(self._turn, loop)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_called, self._num_handled = False, 0
        while self._waiting and self._num_handled < self._num_pieces:
            address, mine = next(iter(self._waiting.items()))
            one, pieces = next(iter(mine.items()))
            data = pieces.popleft()
            self._num_bytes -= len(data)
            del self._waiting[address]
            if not pieces:
                del mine[one]
            if mine:
                self._waiting[address] = mine
            self._num_handled += 1
            one.handle(data, is_last=not pieces)
        if self._waiting or self._num_handled:  # the next turn counts from 0
            self._call_next(loop)
