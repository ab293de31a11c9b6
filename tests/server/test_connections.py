"""Connections at their limits, on a simulated transport and clock."""

from __future__ import annotations

import asyncio
import itertools
import json
import resource
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from uvicorn.server import ServerState

from quire.server import run
from quire.server.http import connections
from quire.server.http.client_address import TrustedProxies
from quire.server.http.connections import Connections, GuardedProtocol, raise_file_limit
from quire.server.http.fair_queue import FairQueue
from quire.server.run import uvicorn_config
from quire.server.settings import ServerLimits

LIMITS = ServerLimits(
    max_body_bytes=1 << 20,
    max_connections=4,
    max_connections_per_address=3,
    max_header_bytes=1000,
    max_header_seconds=10,
    max_body_seconds=60,
    max_send_seconds=30,
)
WHOLE = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
HALF = b"GET / HTTP/1.1\r\nHost: a\r\n"
POST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n"


class Transport(asyncio.Transport):
    def __init__(self, address: str) -> None:
        super().__init__({"peername": (address, 1), "sockname": ("127.0.0.1", 80)})
        self.written = b""
        self.is_aborted = self.is_closed = self.is_paused = False

    def write(self, data: bytes) -> None:  # type: ignore[override]
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_aborted = self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    @property
    def status(self) -> int:
        return int(self.written.split(b" ", 2)[1]) if self.written else 0


class House:
    """A server's connections without a server. Requests are answered once `answering` is set."""

    def __init__(self, limits: ServerLimits = LIMITS) -> None:
        self.now = 0.0
        self.guard = Connections(limits, lambda: self.now)
        self.guard.queue = FairQueue(10_000)  # all that comes is handled at once
        self.answering = asyncio.Event()
        self.made: list[GuardedProtocol] = []

        self.num_begun = 0

        async def app(scope: Any, receive: Any, send: Any) -> None:
            self.num_begun += 1
            await self.answering.wait()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})

        self.config = uvicorn_config(app, limits)
        self.config.load()
        self.state = ServerState()

    def connect(self, address: str = "192.0.2.1") -> tuple[GuardedProtocol, Transport]:
        one = self.guard.protocol(self.config, self.state, {}, asyncio.get_running_loop())
        transport = Transport(address)
        one.connection_made(transport)
        self.made.append(one)
        return one, transport

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.guard.sweep()


def in_loop(test: Callable[[House], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        async def main() -> None:
            house = House()
            try:
                await test(house)
            finally:
                for one in house.made:
                    one.connection_lost(None)

        asyncio.run(main())

    run.__name__ = test.__name__
    return run


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@in_loop
async def test_headers_beyond_their_bytes_are_refused_as_they_come(house: House) -> None:
    for data, status in (
        (b"GET /" + b"a" * 2000, 414),
        (b"GET /" + b"a" * 2000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 414),
        (HALF + b"A: " + b"b" * 2000, 431),
        (HALF + b"A: b\r\n" * 400, 431),
        (HALF + b"A: b\r\n" * 400 + b"\r\n", 431),
    ):
        one, transport = house.connect()
        for at in range(0, len(data), 300):
            one.data_received(data[at : at + 300])
        assert transport.status == status
        assert transport.is_closed
        error = json.loads(transport.written.partition(b"\r\n\r\n")[2])["error"]
        assert "1000 bytes" in error["message"]
        length = len(transport.written)
        one.data_received(data)  # what still came is not looked at
        assert len(transport.written) == length
        one.connection_lost(None)
    one, transport = house.connect()
    one.data_received(HALF + b"A: b\r\n" * 400 + b"\r\n")  # all at once
    assert (transport.status, house.state.tasks) == (431, set())
    one.connection_lost(None)
    assert len(house.guard) == 0


@in_loop
async def test_headers_behind_a_body_are_bounded_too(house: House) -> None:
    one, transport = house.connect()
    one.data_received(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(1000):  # 6 bytes each, one of them body
        one.data_received(b"1\r\na\r\n")
    assert not transport.is_closed
    one, transport = house.connect()
    one.data_received(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(10):
        one.data_received(b"1;" + b"x" * 300 + b"\r\na\r\n")
    assert transport.is_closed


@in_loop
async def test_halves_of_requests_have_their_time(house: House) -> None:
    nothing, half, body = house.connect(), house.connect(), house.connect()
    half[0].data_received(HALF)
    body[0].data_received(POST)
    house.pass_time(10)
    assert not any(one[1].is_closed for one in (nothing, half, body))
    half[0].data_received(b"A: b\r\n")  # a little more does not help
    house.pass_time(1)
    assert nothing[1].status == half[1].status == 408
    assert nothing[1].is_closed
    assert not body[1].is_closed
    house.pass_time(49)
    body[0].data_received(b"x" * 99)
    house.pass_time(1)
    assert body[1].is_closed
    assert body[1].written == b""  # its answer was under way


@in_loop
async def test_what_has_come_whole_has_no_such_time(house: House) -> None:
    one, transport = house.connect()
    one.data_received(WHOLE + HALF)  # and the next one's beginning
    house.pass_time(1000)
    assert not transport.is_closed
    house.answering.set()
    await settled()
    assert transport.status == 200
    assert not transport.is_closed
    house.pass_time(11)  # from the answer on, the next one's time
    assert transport.is_closed


@in_loop
async def test_an_idle_connection_is_left_to_uvicorns_time(house: House) -> None:
    house.answering.set()
    one, transport = house.connect()
    one.data_received(WHOLE)
    await settled()
    house.pass_time(70)
    assert not transport.is_closed
    one.data_received(HALF)
    house.pass_time(9)
    assert not transport.is_closed
    house.pass_time(2)
    assert transport.is_closed


@in_loop
async def test_the_longest_waited_for_gives_its_place(house: House) -> None:
    first, second, third = (house.connect() for _ in range(3))
    first[0].data_received(WHOLE)  # is being answered
    fourth = house.connect()  # of an address that has all it may
    assert [one[1].is_aborted for one in (first, second, third)] == [False, True, False]
    other = house.connect("192.0.2.2")
    another = house.connect("192.0.2.3")  # all places are taken: the oldest, whosever it is
    assert [one[1].is_aborted for one in (third, fourth, other, another)] == [True, False, False, False]
    assert len(house.guard) == 4
    second[0].connection_lost(None)
    assert len(house.guard) == 4
    for one in (fourth, other, another):
        one[0].data_received(WHOLE)
    refused = house.connect("192.0.2.4")
    assert refused[1].status == 503
    assert refused[1].is_closed
    refused[0].connection_lost(None)
    house.answering.set()
    await settled()
    assert all(one[1].status == 200 for one in (first, fourth, other, another))
    assert not house.connect("192.0.2.4")[1].is_closed  # the first one's place: it was answered first
    assert first[1].is_aborted
    assert len(house.guard) == 4


@in_loop
async def test_an_answer_that_nobody_reads_is_dropped(house: House) -> None:
    (slow, slow_transport), (gone, gone_transport) = house.connect(), house.connect()
    slow.data_received(WHOLE)
    gone.data_received(WHOLE)
    slow.pause_writing()
    gone.pause_writing()
    house.pass_time(20)
    slow.resume_writing()  # it has read some
    slow.pause_writing()
    house.pass_time(11)
    assert (slow_transport.is_aborted, gone_transport.is_aborted) == (False, True)
    _, closing_transport = house.connect()
    closing_transport.close()  # with something left to write
    house.pass_time(1)
    house.pass_time(31)
    assert closing_transport.is_aborted


@in_loop
async def test_a_body_that_comes_behind_its_answer_is_not_read_for_ever(house: House) -> None:
    house.answering.set()
    one, transport = house.connect()
    one.data_received(POST.replace(b"100", b"9000000"))
    await settled()
    assert transport.status == 200
    for _ in range(20):
        one.data_received(b"x" * 50_000)
    assert not transport.is_closed
    for _ in range(2):
        one.data_received(b"x" * 50_000)
    assert transport.is_closed


@in_loop
async def test_requests_that_came_at_once_over_one_connection_have_their_turns_too(house: House) -> None:
    house.guard.queue = FairQueue(1)
    house.answering.set()
    several = [house.connect(f"192.0.2.{number}") for number in range(4)]
    for one, _ in several:
        one.data_received(WHOLE * 3)
    begun = [house.num_begun]
    for _ in range(60):
        await asyncio.sleep(0)
        begun.append(house.num_begun)
    assert begun[-1] == 12
    assert max(after - before for before, after in itertools.pairwise(begun)) == 1
    assert [transport.written.count(b"HTTP/1.1 200") for _, transport in several] == [3] * 4


@in_loop
async def test_a_trusted_proxy_has_as_many_as_there_are(house: House) -> None:
    house.guard = Connections(LIMITS, lambda: house.now, TrustedProxies(["192.0.2.1"]))
    proxies = [house.connect() for _ in range(4)]
    assert not any(transport.is_aborted for _, transport in proxies)
    house.connect("192.0.2.2")  # all places are taken: the oldest goes
    assert [transport.is_aborted for _, transport in proxies] == [True, False, False, False]


@in_loop
async def test_what_waits_for_its_turn_is_not_read_on(house: House) -> None:
    house.guard.queue = FairQueue(1)
    first, second, gone = (house.connect() for _ in range(3))
    for one, _ in (first, second, gone):
        one.data_received(WHOLE)
    assert [transport.is_paused for _, transport in (first, second, gone)] == [False, True, True]
    assert len(house.state.tasks) == 1
    gone[0].connection_lost(None)
    await asyncio.sleep(0)
    assert not second[1].is_paused
    await settled()
    assert len(house.state.tasks) == 2
    house.answering.set()
    await settled()
    assert [transport.status for _, transport in (first, second, gone)] == [200, 200, 0]


@in_loop
async def test_the_end_of_a_connection_is_told_while_something_is_left_to_write(house: House) -> None:
    """asyncio calls a connection lost once all is written, which a slow reader puts off. What is under way and what
    waits behind it hear of the end before."""
    heard: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while True:
            heard.append((await receive())["type"])
            if heard[-1] == "http.disconnect":
                return

    house.config.loaded_app = app
    for data in (WHOLE, WHOLE * 2):
        heard.clear()
        one, _ = house.connect()
        one.data_received(data)
        await settled()
        assert heard == ["http.request"]
        one.pause_writing()
        assert not one.eof_received()
        await settled()
        assert heard == ["http.request", "http.disconnect"]


@in_loop
async def test_a_connection_is_read_on_until_two_requests_wait(house: House) -> None:
    one, transport = house.connect()
    one.data_received(WHOLE)
    await settled()
    one.data_received(WHOLE)
    assert not transport.is_paused
    one.data_received(WHOLE)
    assert transport.is_paused
    house.answering.set()
    await settled()
    assert (transport.written.count(b"HTTP/1.1 200"), transport.is_paused) == (3, False)


def test_many_wait_with_the_system_until_they_are_accepted() -> None:
    told: list[int] = []

    class Listener(socket.socket):
        def listen(self, backlog: int = 0, /) -> None:
            told.append(backlog)
            super().listen(backlog)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError

    async def main() -> None:
        with Listener() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.setblocking(False)
            server = run.ApiServer(app, LIMITS)
            server.should_exit = True  # once it has started
            await server.serve([listener])
            for one in server.servers:
                one.close()

    asyncio.run(main())
    assert told[-1] >= 1024


@pytest.mark.parametrize(
    ("soft", "hard", "becomes", "num_connections"),
    [
        (1024, resource.RLIM_INFINITY, 4352, 4096),
        (1024, 1 << 20, 4352, 4096),
        (1 << 20, 1 << 20, None, 4096),
        (1024, 2000, 2000, 2000 - 256),
        (100, 300, 300, 150),
    ],
)
def test_the_limit_of_files_is_raised_as_far_as_it_goes(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, becomes: int | None, num_connections: int
) -> None:
    raised: list[Any] = []
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(connections.resource, "setrlimit", lambda _, both: raised.append(both))
    assert raise_file_limit(ServerLimits()).max_connections == num_connections
    assert raised == ([] if becomes is None else [(becomes, hard)])
