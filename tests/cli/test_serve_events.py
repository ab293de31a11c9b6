"""`quire serve --kv-events` as a process: a router receives its events, and a replay after a gap."""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.kv_follower import Follower
from support.serve_process import ServeProcess, serving

zmq = pytest.importorskip("zmq")
msgpack = pytest.importorskip("msgpack")

pytestmark = pytest.mark.ci  # a process takes seconds to start

BLOCK = 16
WAIT_MS = 30_000


@pytest.fixture
def addresses() -> Iterator[tuple[str, str]]:
    """Sockets in a folder: no port that another test may take meanwhile, and a path short enough for one."""
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        yield f"ipc://{Path(folder)}/events", f"ipc://{Path(folder)}/replay"


def complete(server: ServeProcess, prompt: list[int]) -> None:
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200


def number_of(frame: bytes) -> int:
    return int.from_bytes(frame, "big", signed=True)


def replay(context: zmq.Context, address: str, first: int) -> dict[int, bytes]:
    """Every batch from `first` on, as the server kept it."""
    found: dict[int, bytes] = {}
    with context.socket(zmq.DEALER) as asking:
        asking.linger = 0
        asking.connect(address)
        asking.send_multipart([b"", first.to_bytes(8, "big")])
        while asking.poll(WAIT_MS):
            empty, number, payload = asking.recv_multipart()
            assert empty == b""
            if number_of(number) == -1:
                return found
            found[number_of(number)] = payload
    raise AssertionError("the replay did not end")


def test_a_router_hears_every_block_and_gets_again_what_it_missed(addresses: tuple[str, str]) -> None:
    events, asked = addresses
    with (
        zmq.Context() as context,
        context.socket(zmq.SUB) as hearing,
        serving("--kv-memory", "32MiB", "--kv-events", events, "--kv-events-replay", asked) as server,
    ):
        hearing.linger = 0
        hearing.subscribe(b"")
        hearing.connect(events)
        prompts: list[list[int]] = []
        heard: dict[int, bytes] = {}
        end = time.monotonic() + 60
        while len(heard) < 3:  # what is sent before the subscription has arrived is missed
            assert time.monotonic() < end
            prompts.append([10 + len(prompts)] * (2 * BLOCK) + [3])
            complete(server, prompts[-1])
            while hearing.poll(200):
                topic, number, payload = hearing.recv_multipart()
                assert topic == b""
                heard[number_of(number)] = payload
        numbers = sorted(heard)
        assert numbers == list(range(numbers[0], numbers[-1] + 1))

        again = replay(context, asked, 0)
        assert sorted(again) == list(range(numbers[-1] + 1))
        assert {number: again[number] for number in heard} == heard
        assert sorted(replay(context, asked, numbers[-1])) == [numbers[-1]]

        router = Follower()
        for number in sorted(again):
            router.wire(again[number])
        assert router.cleared  # the first batch says that all before is void
        told = [list(tokens) for _, tokens in router.of("CPU").values()]
        assert sorted(told) == sorted([prompt[0]] * BLOCK for prompt in prompts for _ in range(2))
        times = [msgpack.unpackb(again[number])[0] for number in sorted(again)]
        assert times == sorted(times)

        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0


def test_an_address_that_cannot_be_bound_is_said_in_one_line() -> None:
    server = ServeProcess("--port", "0", "--kv-memory", "32MiB", "--kv-events", "tcp://203.0.113.9:5557")
    try:
        assert server.wait(120) == 2
        [line] = server.log().splitlines()
        assert "203.0.113.9" in line
    finally:
        server.close()
