"""Servers that hang, drip, flood, close, talk nonsense or refuse: at most one time-out, never a wrong answer."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import pytest
from support.redis_server import free_port
from support.tiers_case import SHAPE, chain, with_payloads
from support.toxic_server import closes, drips, floods, hangs, says, toxic_server
from support.until import until

from quire.tiers.host import HostTier
from quire.tiers.remote.remote_tier import RemoteTier
from quire.tiers.stack import TierStack
from quire.tiers.tier import TierError, UnavailableError

TIMEOUT = 0.3
ENDS_S = 25  # a call that its own time-out ends, on any machine; a server's habit lasts longer
Habit = Callable[[socket.socket, threading.Event], None]
HABITS: dict[str, Habit] = {
    "hangs": hangs,
    "closes": closes,
    "drips": drips,
    "floods": floods,
    "garbage": says(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "binary": says(bytes(range(256)) * 10),
    "wrong length": says(b"$5\r\nmuch longer than that\r\n"),
    "no number": says(b"$many\r\n"),
    "ok to everything": says(b"+OK\r\n"),
    "one to everything": says(b":1\r\n"),
    "short list": says(b"*1\r\n$1\r\nx\r\n"),
    "wrong value": says(b"*2\r\n$5\r\nvalue\r\n$8\r\n12345678\r\n"),
    "nested": says(b"*1\r\n" * 5000),
    "no password": says(b"-NOAUTH Authentication required.\r\n"),
    "loading": says(b"-LOADING Redis is loading the dataset in memory\r\n"),
}


@pytest.mark.parametrize("habit", HABITS)
def test_costs_its_time_out_once_and_stops_nobody(habit: str) -> None:
    names = chain(3)
    with toxic_server(HABITS[habit]) as url:
        remote = RemoteTier(url, timeout=TIMEOUT, max_value_bytes=4 << 20, first_pause_s=60)
        stack = TierStack([HostTier(1 << 20), remote], SHAPE)
        stack.store(with_payloads(names[:2]))
        assert stack.flush(10)
        for _ in range(20):
            load = stack.load(names)
            assert load.wait(10)
            assert (load.outcome, load.num_loaded) == ("missing", 2)
            lookup = stack.lookup([name.hash for name in names], every_tier=True)
            assert lookup.wait(10)
        mine = stack.stats().tiers[1]
        assert mine.failures + mine.damaged == 1  # 41 other calls were refused without a wait
        assert mine.hits == 0
        assert stack.close(10)


@pytest.mark.parametrize("habit", HABITS)
def test_every_call_ends_in_time_with_one_line(habit: str) -> None:
    with toxic_server(HABITS[habit]) as url:
        for call in ("contains", "load", "store"):
            remote = RemoteTier(url, timeout=TIMEOUT, max_value_bytes=4 << 20)
            began = time.monotonic()
            error = failure(remote, call)
            assert time.monotonic() - began < ENDS_S
            # "One" is a possible answer to both: it is there, it is there already.
            if error is not None:
                assert not isinstance(error, UnavailableError)
                assert "\n" not in str(error)
                assert len(str(error)) < 400
                assert isinstance(failure(remote, call), UnavailableError)
            else:
                assert habit == "one to everything"
                assert call != "load"
            remote.close()


def failure(remote: RemoteTier, call: str) -> TierError | None:
    (name,) = chain(1)
    try:
        match call:
            case "contains":
                remote.contains([name.hash])
            case "load":
                assert remote.load(name.hash) is None
            case "store":
                remote.store(name.hash, [memoryview(b"value")], name.info())
    except TierError as error:
        return error
    return None


def test_nobody_there() -> None:
    remote = RemoteTier(f"redis://127.0.0.1:{free_port()}")
    with pytest.raises(TierError, match=r"a look-up at 127.0.0.1:\d+: .*refused"):
        remote.contains([b"key"])
    remote.close()


def test_a_server_that_is_down_costs_no_request_a_second_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the pause it is the tier's own thread that tries, and waits."""
    with toxic_server(hangs) as url:
        remote = RemoteTier(url, timeout=TIMEOUT, first_pause_s=0.05, max_pause_s=0.1)
        with pytest.raises(TierError, match=r"no answer within 0.3 s"):
            remote.load(b"key")
        tried_by: list[threading.Thread] = []
        try_server = remote._probe_server
        monkeypatch.setattr(
            remote,
            "_probe_server",
            lambda trial: (tried_by.append(threading.current_thread()), try_server(trial)),
        )

        def refused_until_tried() -> bool:
            with pytest.raises(UnavailableError):
                remote.load(b"key")
            return len(tried_by) >= 3

        until(refused_until_tried)
        assert threading.current_thread() not in tried_by
        remote.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("quire-tier")]
