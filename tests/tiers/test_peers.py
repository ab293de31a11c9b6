"""The host memory of another engine as a tier: content, secrets, and peers that fail in every way."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.redis_server import free_port
from support.tiers_case import SHAPE, Clock, chain, payload, with_payloads
from support.toxic_server import closes, drips, floods, hangs, says, toxic_server
from support.until import until

from quire.errors import ArgumentError
from quire.peer_address import PeerAddress
from quire.tiers.host import HostTier
from quire.tiers.peers.peer_server import PeerServer
from quire.tiers.peers.peer_tier import MAX_NAMED, PeerTier
from quire.tiers.peers.peer_wire import ACCEPTED, FRONT, KEY_BYTES, MAGIC, QUESTION, proof
from quire.tiers.remote.record import checksum
from quire.tiers.remote.signed import SignedTier
from quire.tiers.stack import TierStack
from quire.tiers.tier import DamagedError, TierError, UnavailableError

LOOPBACK = PeerAddress("127.0.0.1", 0)
SECRET = b"sixteen bytes or more"
NAMES = chain(4)
TIMEOUT = 0.3
ENDS_S = 25  # a call that its own time-out ends, on any machine
GREETING = MAGIC + bytes(16)


def host(values: dict[bytes, bytes]) -> HostTier:
    tier = HostTier(64 << 20)
    for key, value in values.items():
        assert tier.store(key, [memoryview(value)], NAMES[0].info())
    return tier


def key_of(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "big")


@contextmanager
def serving(tier: HostTier, secret: bytes | None = None, at: PeerAddress = LOOPBACK) -> Iterator[PeerServer]:
    server = PeerServer(at, tier, secret)
    try:
        yield server
    finally:
        server.close()


def peers(*servers: PeerServer, secret: bytes | None = None, **options: Any) -> PeerTier:
    return PeerTier.of([server.address for server in servers], secret, **{"timeout": ENDS_S, **options})


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_gives_the_values_of_the_host_tier(kind: str, secret: bytes | None, tmp_path: Path) -> None:
    at = LOOPBACK if kind == "tcp" else PeerAddress.parse(f"unix:{tmp_path / 'peer'}")
    values = {key_of(n): os.urandom(n) for n in (0, 1, 4095, 3 << 20)}
    with serving(host(values), secret, at) as server, closing(peers(server, secret=secret)) as inner:
        tier = inner if secret is None else SignedTier(inner, secret)
        keys = [key_of(7), *values, key_of(8)]
        assert tier.contains(keys) == [False, True, True, True, True, False]
        assert tier.contains([]) == []
        for key, value in values.items():
            found = tier.load(key)
            assert found is not None
            assert bytes(found) == value
        assert tier.load(key_of(7)) is None
        assert not tier.store(key_of(7), [memoryview(b"x")], NAMES[0].info())
        assert not tier.evict(key_of(1))
        assert tier.load(key_of(1)) is not None  # the peer has it still
        stats = tier.stats()
        assert (stats.hits, stats.misses, stats.failures) == (5, 1, 0)
        signatures = 0 if secret is None else 5 * 32
        assert server.stats() | {"num_peer_connections": 1} == {
            "num_peer_connections": 1,
            "num_peer_questions": 7,
            "num_peer_values": 5,
            "peer_sent_bytes": sum(map(len, values.values())) + 1 + signatures,
            "num_refused_peers": 0,
        }
    assert not (tmp_path / "peer").exists()


@pytest.mark.parametrize(
    ("ours", "theirs"), [(None, SECRET), (SECRET, None), (b"another secret, as long", SECRET)]
)
def test_another_secret_is_refused_by_name(ours: bytes | None, theirs: bytes | None) -> None:
    with serving(host({key_of(1): b"value"}), theirs) as server, closing(peers(server, secret=ours)) as peer:
        with pytest.raises(TierError, match="it has another remote_secret"):
            peer.load(key_of(1))
        until(lambda: server.stats()["num_refused_peers"] == 1)
        assert server.stats()["num_peer_values"] == 0


def test_a_value_signed_under_another_key_is_damage() -> None:
    with serving(host({key_of(1): b"value"})) as server:  # it signs nothing
        tier = SignedTier(peers(server), SECRET)
        with pytest.raises(DamagedError):
            tier.load(key_of(1))
        tier.close()


def test_a_value_that_is_evicted_while_it_is_sent_arrives_whole() -> None:
    value = os.urandom(8 << 20)  # more than the buffers of a connection take
    tier = host({key_of(1): value})
    with serving(tier) as server, server.address.connect(ENDS_S) as connection:
        connection.sendall(proof(b"", receive(connection, len(GREETING))[len(MAGIC) :]))
        connection.sendall(QUESTION.pack(2, 1) + key_of(1))
        assert receive(connection, 1 + FRONT.size) == ACCEPTED + FRONT.pack(
            len(value), checksum(key_of(1), [value])
        )
        assert tier.evict(key_of(1))
        tier.store(key_of(2), [memoryview(bytes(8 << 20))], NAMES[0].info())
        assert receive(connection, len(value)) == value


def receive(connection: socket.socket, num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes:
        part = connection.recv(num_bytes - len(received))
        assert part
        received += part
    return received


def test_a_client_that_asks_wrongly_is_disconnected() -> None:
    with serving(host({key_of(1): b"value"})) as server:
        for question in (
            QUESTION.pack(0, 1),
            QUESTION.pack(1, 0),
            QUESTION.pack(1, 1 << 31),
            QUESTION.pack(2, 2),
            QUESTION.pack(77, 1),
        ):
            with server.address.connect(ENDS_S) as connection:
                connection.sendall(proof(b"", receive(connection, len(GREETING))[len(MAGIC) :]))
                assert receive(connection, 1) == ACCEPTED
                connection.sendall(question + key_of(1) * 2)
                with suppress(ConnectionResetError):
                    assert connection.recv(1) == b""
        with server.address.connect(ENDS_S) as connection:
            receive(connection, len(GREETING))
            connection.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n    ")
            assert connection.recv(1) == b"-"
        with closing(peers(server)) as peer:  # others are served
            assert peer.contains([key_of(1)]) == [True]
        until(lambda: server.stats()["num_peer_connections"] == 0)


def test_close_ends_connections_and_threads() -> None:
    before = set(threading.enumerate())
    server = PeerServer(LOOPBACK, host({}))
    peer = peers(server)
    assert peer.contains([key_of(1)]) == [False]
    with server.address.connect(ENDS_S):  # never greets
        server.close()
    server.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(TierError):
        peer.contains([key_of(1)])
    peer.close()
    with pytest.raises(UnavailableError):
        peer.contains([key_of(1)])


def test_a_peer_that_was_restarted_is_asked_at_once() -> None:
    tier = host({key_of(1): b"value"})
    with serving(tier) as server, closing(peers(server)) as peer:
        assert peer.contains([key_of(1)]) == [True]
        server.close()
        with serving(tier, at=server.address):
            assert peer.contains([key_of(1)]) == [True]  # not on the connection that the first one had


def test_peers_that_are_named_are_asked_first_the_newest_of_all() -> None:
    value = {key_of(1): b"value"}
    with serving(host({**value, key_of(2): b"other"})) as static, serving(host(value)) as first:
        tier = peers(static, max_value_bytes=1 << 10)
        tier.raise_max_value_bytes(1 << 21)
        with closing(tier), serving(host({**value, key_of(3): bytes(1 << 21)})) as second:
            tier.name_peer(first.address)
            assert tier.contains([key_of(1)]) == [True]
            assert asked(static, first, second) == (0, 1, 0)
            tier.name_peer(second.address)
            assert tier.contains([key_of(1), key_of(3)]) == [True, True]
            assert asked(static, first, second) == (0, 1, 1)
            assert tier.load(key_of(3)) == bytes(1 << 21)  # the limit holds for peers that are named later
            tier.name_peer(first.address)  # again
            assert tier.contains([key_of(1)]) == [True]
            assert asked(static, first, second) == (0, 2, 2)
            assert tier.contains([key_of(2)]) == [True]
            assert asked(static, first, second) == (1, 3, 3)


def asked(*servers: PeerServer) -> tuple[int, ...]:
    """Questions that came to each."""
    return tuple(server.stats()["num_peer_questions"] for server in servers)


def test_the_oldest_peers_that_were_named_are_given_up() -> None:
    with serving(host({key_of(1): b"first"})) as first, serving(host({key_of(2): b"static"})) as static:
        tier = peers(static)
        with closing(tier):
            tier.name_peer(first.address)
            assert tier.contains([key_of(1)]) == [True]
            gone = free_port()
            for number in range(MAX_NAMED):
                tier.name_peer(PeerAddress(f"127.0.1.{number}", gone))
            assert tier.contains([key_of(1), key_of(2)]) == [False, True]
            until(lambda: first.stats()["num_peer_connections"] == 0)
            tier.name_peer(first.address)
            assert tier.contains([key_of(1)]) == [True]


def test_a_socket_file_is_taken_over_only_from_the_dead(tmp_path: Path) -> None:
    at = PeerAddress.parse(f"unix:{tmp_path / 'peer'}")
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(at.path)
    dead.close()
    with serving(host({}), at=at):
        assert Path(at.path).stat().st_mode & 0o777 == 0o600
        with pytest.raises(OSError, match="in use"):
            PeerServer(at, host({}))
    Path(at.path).write_text("a file of somebody")
    with pytest.raises(OSError, match="in use"):
        PeerServer(at, host({}))
    assert Path(at.path).read_text() == "a file of somebody"


HABITS = {
    "hangs": hangs,
    "closes": closes,
    "drips": drips,
    "floods": floods,
    "http": says(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "binary": says(bytes(range(256)) * 10),
    "refuses": says(GREETING + b"-"),
    "neither": says(GREETING + b"?"),
    "no answer": says(GREETING + ACCEPTED),
    "huge": says(GREETING + ACCEPTED + FRONT.pack(1 << 50, bytes(8))),
    "one byte more": says(GREETING + ACCEPTED + FRONT.pack((5 << 20) + 1, bytes(8))),
    "two to everything": says(GREETING + ACCEPTED + b"\2" * 100),
    "too short": says(GREETING + ACCEPTED + FRONT.pack(1000, bytes(8)) + bytes(400)),
}


@pytest.mark.parametrize("habit", HABITS)
def test_a_toxic_peer_costs_its_time_out_once(habit: str) -> None:
    with toxic_server(HABITS[habit]) as url:
        at = PeerAddress.parse(urlsplit(url).netloc)
        tier = PeerTier.of([at], None, timeout=TIMEOUT, max_value_bytes=4 << 20, first_pause_s=60)
        stack = TierStack([HostTier(1 << 20), tier], SHAPE, read_only=("peers",))
        stack.store(with_payloads(NAMES[:2]))
        began = time.monotonic()
        for _ in range(20):
            load = stack.load(NAMES[:3])
            assert load.wait(ENDS_S)
            assert (load.outcome, load.num_loaded) == ("missing", 2)
        assert time.monotonic() - began < ENDS_S
        mine = stack.stats().tiers[1]
        assert (mine.failures, mine.damaged, mine.hits) == (1, 0, 0)
        assert stack.close(10)


@pytest.mark.parametrize("num_bytes", range(0, 60, 7))
def test_a_peer_that_dies_at_any_byte_is_a_miss(num_bytes: int) -> None:
    """Cut in the greeting, in the answer's length, in the value."""
    value = os.urandom(30)
    sent = GREETING + ACCEPTED + FRONT.pack(len(value), checksum(key_of(1), [value])) + value
    cut = sent[: min(len(sent) - 1, num_bytes)]

    def dies(connection: socket.socket, stopped: threading.Event) -> None:
        connection.sendall(cut)

    with toxic_server(dies) as url:
        tier = PeerTier.of([PeerAddress.parse(urlsplit(url).netloc)], None, timeout=TIMEOUT)
        with closing(tier), pytest.raises(TierError):
            tier.load(key_of(1))


def test_the_other_peers_are_asked_where_one_fails(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "quire")
    with serving(host({key_of(1): b"one"})) as first, serving(host({key_of(2): b"two"})) as second:
        gone = PeerAddress("127.0.0.1", free_port())
        tier = PeerTier.of([gone, first.address, second.address], None, clock=Clock())
        for _ in range(3):
            assert tier.contains([key_of(n) for n in range(4)]) == [False, True, True, False]
            assert tier.load(key_of(2)) == b"two"
            assert tier.load(key_of(1)) == b"one"
        tier.ping()
        assert tier.load(key_of(3)) is None
        assert tier.stats().failures == 1
        assert [record.message for record in caplog.records if "other peers" in record.message] == [
            caplog.records[0].message
        ]
        first.close()
        second.close()
        with pytest.raises(TierError):
            tier.contains([key_of(1)])
        tier.close()


def test_a_fetched_segment_is_promoted_and_checked() -> None:
    there = TierStack([HostTier(1 << 20)], SHAPE)
    there.store(with_payloads(NAMES))
    assert there.flush(ENDS_S)
    with serving(there._tiers[0].tier) as server:  # type: ignore[arg-type]
        here = HostTier(1 << 20)
        stack = TierStack([here, peers(server)], SHAPE, read_only=("peers",), check_finite=())
        load = stack.load(NAMES)
        assert load.wait(ENDS_S)
        assert (load.outcome, load.tiers) == ("complete", ["peers"] * 4)
        assert [bytes(found) for found in load.payloads] == [bytes(payload(name)) for name in NAMES]
        assert stack.flush(ENDS_S)
        assert here.contains([name.hash for name in NAMES]) == [True] * 4
        assert stack.stats().tiers[1].stored == 0
        stack.close()
    there.close()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("there:7000", PeerAddress("there", 7000)),
        ("[::1]:7000", PeerAddress("::1", 7000)),
        ("unix:/run/peer", PeerAddress("", 0, "/run/peer")),
        ("unix:///run/peer", PeerAddress("", 0, "/run/peer")),
    ],
)
def test_addresses(text: str, address: PeerAddress) -> None:
    assert PeerAddress.parse(text) == address
    assert PeerAddress.parse(str(address)) == address


@pytest.mark.parametrize(
    "text", ["", "there", ":7000", "there:", "there:seven", "there:70000", "http://there:7", "unix:"]
)
def test_other_addresses_are_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"expected HOST:PORT, \[IPv6\]:PORT or unix:PATH, got"):
        PeerAddress.parse(text)


@pytest.mark.parametrize(
    ("text", "is_local"),
    [("127.0.0.1:1", True), ("[::1]:1", True), ("localhost:1", True), ("unix:/x", True), ("0.0.0.0:1", False),
     ("10.0.0.1:1", False), ("[::]:1", False), ("there:1", False)],
)  # fmt: skip
def test_local_addresses(text: str, is_local: bool) -> None:
    assert PeerAddress.parse(text).is_local == is_local
