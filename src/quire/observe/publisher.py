"""KV events over ZeroMQ, as vLLM's consumers read them: PUB with sequence numbers, ROUTER for missed batches.

    PUB      [topic, sequence number, payload]                    numbers: 8 bytes, big endian, from 0
    ROUTER   asked   [empty, first number wanted]                 (a REQ or DEALER socket)
             answers [empty, number, payload] for each batch kept from there on, then [empty, -1, empty]

The payload is msgpack (`kv_events.to_wire`). A thread of its own sends and answers; the engine's only appends to a
queue. A batch that finds the queue full is dropped for good: its number is missing.

Needs pyzmq and msgpack (`pip install "quire-kv[events]"`). Cost: nothing for the engine but the queue.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections import deque
from contextlib import suppress
from typing import Any

from quire.errors import ArgumentError, BackendError
from quire.observe.kv_events import EventBatch, to_wire

__all__ = ["KVEventPublisher"]

_END = (-1).to_bytes(8, "big", signed=True)


class KVEventPublisher:
    """A subscriber (`publisher(batch)`) that sends each batch.

    endpoint: PUB's address, "tcp://127.0.0.1:5557"; replay_endpoint: ROUTER's, None for no replay; both attributes have
    the bound address (port 0 or "*" takes a free one). max_batches: kept for replay; max_waiting: in the queue.
    *raises:* BackendError: a package is missing. ArgumentError: an endpoint that cannot be bound.
    """

    def __init__(
        self,
        endpoint: str = "tcp://127.0.0.1:5557",
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        max_batches: int = 10_000,
        max_waiting: int = 10_000,
        data_parallel_rank: int | None = None,
    ) -> None:
        try:
            self._zmq: Any = importlib.import_module("zmq")
            self._pack = importlib.import_module("msgpack").Packer().pack
        except ImportError as error:
            raise BackendError(
                f"expected pyzmq and msgpack to publish KV events, got {error}; pip install 'quire-kv[events]'"
            ) from error
        self._topic = topic.encode()
        self._rank = data_parallel_rank
        self._max_waiting = max_waiting
        self._waiting: deque[tuple[int, EventBatch]] = deque()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=max_batches)
        self._next = 0
        self.num_dropped = 0
        self._is_closing = False
        self._pub = self._replay = None
        self._context = self._zmq.Context()
        try:
            self._pub, self.endpoint = self._bound(self._zmq.PUB, endpoint)
            self.replay_endpoint: str | None = None
            if replay_endpoint is not None:
                self._replay, self.replay_endpoint = self._bound(self._zmq.ROUTER, replay_endpoint)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._wakes, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._thread = threading.Thread(target=self._run, name="quire-kv-events", daemon=True)
        self._thread.start()

    def _bound(self, kind: int, endpoint: str) -> tuple[Any, str]:
        socket = self._context.socket(kind)
        try:
            socket.bind(endpoint)
        except self._zmq.ZMQError as error:
            raise ArgumentError(
                f"expected an endpoint that can be bound, got {endpoint!r} ({error}); such as tcp://127.0.0.1:5557"
            ) from error
        return socket, socket.getsockopt_string(self._zmq.LAST_ENDPOINT)

    def __call__(self, batch: EventBatch) -> None:
        number, self._next = self._next, self._next + 1
        if len(self._waiting) >= self._max_waiting:
            self.num_dropped += 1
            return
        self._waiting.append((number, batch))
        self._ring()

    def _ring(self) -> None:
        with suppress(BlockingIOError):  # it has been rung often enough
            os.write(self._wake, b"\0")

    def _run(self) -> None:
        zmq = self._zmq
        poller = zmq.Poller()
        poller.register(self._wakes, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._wakes in ready:
                os.read(self._wakes, 4096)
            while self._waiting:
                number, batch = self._waiting.popleft()
                payload = self._pack(to_wire(batch, self._rank))
                self._kept.append((number, payload))
                self._pub.send_multipart([self._topic, number.to_bytes(8, "big"), payload])  # type: ignore[union-attr]
            if self._replay in ready:
                self._answer(self._replay)
            if self._is_closing:
                return

    def _answer(self, replay: Any) -> None:
        """Answers a replay request; a malformed one gets the end mark only. A client that does not read loses some."""
        client, *rest = replay.recv_multipart()
        request = rest[-1] if rest else b""
        first = int.from_bytes(request, "big") if len(request) == 8 else self._next
        for number, payload in self._kept:
            if number >= first:
                replay.send_multipart([client, b"", number.to_bytes(8, "big"), payload])
        replay.send_multipart([client, b"", _END, b""])

    def close(self) -> None:
        """Sends the waiting batches, closes sockets and thread. A second call does nothing."""
        if not self._is_closing:
            self._is_closing = True
            self._ring()
            self._thread.join(5)
            self._context.destroy(linger=500)
            os.close(self._wakes)
            os.close(self._wake)
