"""Connections are accepted round-robin by address: many of one address delay another's by one turn."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from quire.server.http import acceptor
from quire.server.http.acceptor import Acceptor

MANY, FEW = "127.0.0.2", "127.0.0.3"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=256) as made:
        made.setblocking(False)
        yield made


class House:
    """What has begun, by address, in order."""

    def __init__(self, listener: socket.socket, most: int = 1000) -> None:
        self.begun: list[str] = []
        self.open: list[asyncio.BaseTransport] = []
        self.acceptor = Acceptor(
            asyncio.get_running_loop(),
            listener,
            self._protocol,
            max_connections=most,
            num_open=lambda: len(self.open),
        )

    def _protocol(self) -> asyncio.Protocol:
        house = self

        class Accepted(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                house.begun.append(transport.get_extra_info("peername")[0])
                house.open.append(transport)

        return Accepted()

    async def until(self, num_begun: int) -> None:
        async with asyncio.timeout(10):
            while len(self.begun) < num_begun:
                await asyncio.sleep(0)

    async def close(self) -> None:
        self.acceptor.close()
        self.acceptor.close()
        await self.acceptor.wait_closed()
        for transport in self.open:
            transport.close()
        await asyncio.sleep(0)  # they are closed by now


def connect(listener: socket.socket, address: str, number: int = 1) -> list[socket.socket]:
    return [
        socket.create_connection(listener.getsockname(), timeout=5, source_address=(address, 0))
        for _ in range(number)
    ]


def test_addresses_take_turns_however_many_came_before(listener: socket.socket) -> None:
    async def main() -> None:
        many = connect(listener, MANY, 100)
        few = connect(listener, FEW, 2)
        house = House(listener)
        await house.until(102)
        assert house.begun.index(FEW) <= 2
        assert house.begun[:5].count(FEW) == 2
        few += connect(listener, FEW)
        await house.until(103)
        await house.close()
        for one in many + few:
            one.close()

    asyncio.run(main())


def test_what_waits_and_what_is_open_have_a_bound_together(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the bound one begins at a time, so that it can be refused, or take another's place."""
    monkeypatch.setattr(acceptor, "_BEGINS", 1)

    async def main() -> None:
        clients = connect(listener, MANY, 20)
        house = House(listener, most=5)
        most_waiting = 0
        async with asyncio.timeout(10):
            while len(house.begun) < 20:
                await asyncio.sleep(0)
                most_waiting = max(most_waiting, house.acceptor._num_waiting)
        assert most_waiting <= 5
        await house.close()
        for one in clients:
            one.close()

    asyncio.run(main())


def test_what_waits_is_closed_at_the_end(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "_BEGINS", 1)

    async def main() -> None:
        clients = connect(listener, MANY, 5)
        house = House(listener)
        await house.until(1)
        await house.close()
        assert len(house.begun) < 5
        for one in clients:
            assert one.recv(1) == b""
            one.close()

    asyncio.run(main())


def test_where_the_system_has_no_room_it_rests_and_goes_on(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(acceptor, "_REST_S", 0.01)

    class Full:
        """The listener, which has no descriptor left the first time."""

        num_asked = 0

        def fileno(self) -> int:
            return listener.fileno()

        def accept(self) -> tuple[socket.socket, tuple[str, int]]:
            self.num_asked += 1
            if self.num_asked == 1:
                raise OSError(24, "Too many open files")
            return listener.accept()

    async def main() -> None:
        clients = connect(listener, MANY, 3)
        house = House(Full())  # type: ignore[arg-type]
        await house.until(3)
        await house.close()
        for one in clients:
            one.close()

    asyncio.run(main())
    assert "Too many open files" in caplog.text
