"""The fair queue: a number of pieces for each turn of the loop, one for each address, none lost, none out of order."""

from __future__ import annotations

import asyncio

from quire.server.http.fair_queue import FairQueue


class Connection:
    def __init__(self, address: str, told: list[tuple[str, bytes, bool]]) -> None:
        self.address = address
        self.loop = asyncio.get_running_loop()
        self._told = told

    def handle(self, data: bytes, *, is_last: bool) -> None:
        self._told.append((self.address, data, is_last))


def test_a_turn_handles_so_many_and_each_address_has_its_own() -> None:
    async def main() -> None:
        told: list[tuple[str, bytes, bool]] = []
        turns = FairQueue(2)
        many = [Connection("many", told) for _ in range(6)]
        assert [turns.put(one, b"%d" % number) for number, one in enumerate(many)] == [False] * 2 + [True] * 4
        assert turns.put(Connection("other", told), b"a")
        assert len(told) == 2
        await asyncio.sleep(0)
        assert [(who, data) for who, data, _ in told[2:]] == [("many", b"2"), ("other", b"a")]
        assert turns.put(many[0], b"6"), "nobody overtakes those who wait"
        for num_told in (6, 8, 8):
            await asyncio.sleep(0)
            assert len(told) == num_told
        assert [data for who, data, _ in told if who == "many"] == [b"%d" % number for number in range(7)]
        await asyncio.sleep(0)
        assert not turns.put(many[0], b"7"), "nothing waits any more"

    asyncio.run(main())


def test_the_pieces_of_one_connection_stay_in_order_and_go_with_it() -> None:
    async def main() -> None:
        told: list[tuple[str, bytes, bool]] = []
        turns = FairQueue(1)
        first, second, gone = (Connection(name, told) for name in ("first", "second", "gone"))
        turns.put(first, b"0")
        for one, data in ((second, b"1"), (gone, b"2"), (second, b"3"), (gone, b"4")):
            assert turns.put(one, data)
        turns.remove(gone)
        turns.remove(gone)
        for _ in range(4):
            await asyncio.sleep(0)
        assert told == [("first", b"0", True), ("second", b"1", False), ("second", b"3", True)]

    asyncio.run(main())


def test_what_waits_is_bounded_in_bytes() -> None:
    async def main() -> None:
        told: list[tuple[str, bytes, bool]] = []
        turns = FairQueue(1, max_bytes=10)
        connections = [Connection("one", told) for _ in range(4)]
        assert [turns.put(one, b"12345678") for one in connections] == [False, True, True, False]
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(told) == 4
        assert not turns.put(connections[0], b"9"), "nothing is counted that does not wait"

    asyncio.run(main())
