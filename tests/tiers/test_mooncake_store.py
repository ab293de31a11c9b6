"""Mooncake's own faults: memory given to another value, memory that ends with its process, masters that hang."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.mooncake_master import missing
from support.store_cases import MooncakeCase
from support.tiers_case import chain
from support.toxic_server import closes, drips, floods, hangs, says, toxic_server
from support.until import until

from quire.errors import ArgumentError, BackendError
from quire.tiers.remote import mooncake_store
from quire.tiers.remote.mooncake_process import EXISTS
from quire.tiers.remote.mooncake_store import MooncakeStore
from quire.tiers.remote.remote_tier import RemoteTier
from quire.tiers.tier import DamagedError, TierError, UnavailableError

NAMES = chain(3)
KEYS = [name.hash for name in NAMES]
INFO = NAMES[0].info()
VALUE = bytes(range(200)) * 10


@pytest.fixture
def case(tmp_path: Path) -> Iterator[MooncakeCase]:
    one = MooncakeCase(tmp_path)
    yield one
    one.stop()


def store_of(tier: RemoteTier) -> MooncakeStore:
    assert isinstance(tier._store, MooncakeStore)
    return tier._store


def process_of(tier: RemoteTier) -> subprocess.Popen[bytes]:
    process = store_of(tier)._process
    assert process is not None
    return process


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_memory_given_to_another_value_is_found_out(case: MooncakeCase, share: float) -> None:
    """As a reader finds it whose lease ended during its transfer: all of the other value, or the start of it."""
    tier = case.tier()
    for key, value in zip(KEYS, (VALUE, VALUE[::-1]), strict=False):
        assert tier.store(key, [memoryview(value)], INFO)
    other = case.raw(KEYS[1])
    case.write_memory(KEYS[0], other[: round(share * len(other))])
    with pytest.raises(DamagedError):
        tier.load(KEYS[0])
    tier.close()
    tier = case.tier()
    assert tier.contains(KEYS) == [False, True, False]
    value = tier.load(KEYS[1])
    assert value is not None
    assert bytes(value) == VALUE[::-1]
    tier.close()


def test_a_reader_never_gets_bytes_of_another_value(tmp_path: Path) -> None:
    """Leases of 20 ms, which are not waited for, and a writer whose values take the memory of those that are read."""
    case = MooncakeCase(tmp_path, "--default_kv_lease_ttl=20")
    values = [np.full(1 << 20, number, np.uint8).data for number in range(40)]
    keys = [number.to_bytes(32, "little") for number in range(40)]
    writer, reader = (
        case.tier(first_pause_s=1e-3, max_pause_s=1e-3, probe_in_background=False) for _ in range(2)
    )
    stop = threading.Event()
    stored: deque[int] = deque([0], maxlen=3)

    def write() -> None:
        for number in cycle(range(40)):
            if stop.is_set():
                return
            with suppress(TierError):
                writer.store(keys[number], [values[number]], INFO)
                stored.append(number)
                writer.evict(keys[number - 3])

    def read() -> int:
        numbers = list(stored)
        with suppress(TierError):  # a lease that ended, a value that failed its check
            found = reader.load_many([keys[number] for number in numbers])
            assert found == [values[number] for number in numbers[: len(found)]]
            return len(found)
        return 0

    thread = threading.Thread(target=write)
    thread.start()
    try:
        num_loaded = 0
        while num_loaded < 20:
            num_loaded += until(read, pause_s=0)
    finally:
        stop.set()
        thread.join()
        writer.close()
        reader.close()
        case.stop()


def test_values_end_with_the_process_of_their_memory(case: MooncakeCase) -> None:
    tier = case.tier()
    assert tier.store(KEYS[0], [memoryview(VALUE)], INFO)
    case.kill_owner()
    with pytest.raises(TierError, match="the process with its memory has ended"):
        tier.load(KEYS[0])

    def is_gone() -> bool:
        with suppress(UnavailableError):
            return tier.contains(KEYS[:1]) == [False]
        return False

    until(is_gone)  # after the master's --client_ttl
    assert tier.load(KEYS[0]) is None
    with pytest.raises(TierError, match="no memory is free"):
        tier.store(KEYS[0], [memoryview(VALUE)], INFO)
    tier.close()


def test_a_writer_that_dies_halfway_leaves_nothing_to_read(case: MooncakeCase) -> None:
    script = f"""
        import os
        from mooncake.store import MooncakeDistributedStore
        client = MooncakeDistributedStore()
        assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", "{case.owner.where}") == 0
        assert client.batch_put_session_start(["{case.owner._name(KEYS[0])}"], [5000]) == [0]
        os._exit(0)
    """
    environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env=environment, check=True, capture_output=True
    )
    tier = case.tier()
    assert tier.contains(KEYS[:1]) == [False]
    assert tier.load(KEYS[0]) is None
    assert not tier.evict(KEYS[0])
    assert list(tier.items()) == []
    tier.close()


def test_a_client_that_crashes_is_started_again(case: MooncakeCase) -> None:
    tier = case.tier()
    assert tier.store(KEYS[0], [memoryview(VALUE)], INFO)
    first = process_of(tier)
    first.kill()
    first.wait()

    def load() -> Any:
        with suppress(TierError):
            return tier.load(KEYS[0])
        return None

    assert bytes(until(load)) == VALUE
    assert process_of(tier).pid != first.pid
    last = process_of(tier)
    tier.close()
    assert last.poll() is not None


def test_a_client_ends_with_its_engine(case: MooncakeCase) -> None:
    script = f"""
        import sys
        from quire.tiers.remote.remote_tier import RemoteTier
        tier = RemoteTier("{case.url}&segment=16MiB")
        tier.ping()
        print(tier._store._process.pid, flush=True)
        sys.stdin.read()
    """
    engine = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert engine.stdin is not None
    assert engine.stdout is not None
    with engine, engine.stdin, engine.stdout:
        client = int(engine.stdout.readline())
        assert Path(f"/proc/{client}").exists()
        engine.kill()
        engine.wait()
        until(lambda: not Path(f"/proc/{client}").exists() or "Z" in _state(client))


def _state(process: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    return "Z"


@pytest.mark.parametrize(
    "habit",
    [hangs, closes, drips, floods, says(bytes(range(256)) * 10)],
    ids=["hangs", "closes", "drips", "floods", "garbage"],
)
def test_a_toxic_master_costs_its_time_out_once(habit: Any) -> None:
    if reason := missing():
        pytest.skip(reason)
    with toxic_server(habit) as url:
        tier = RemoteTier(url.replace("redis://", "mooncake://") + "?timeout_s=0.5", first_pause_s=60)
        began = time.monotonic()
        with pytest.raises(TierError) as caught:
            tier.load(KEYS[0])
        assert time.monotonic() - began < 25
        assert not isinstance(caught.value, UnavailableError)
        for call in (lambda: tier.load(KEYS[0]), lambda: tier.contains(KEYS)):
            with pytest.raises(UnavailableError):
                call()
        assert store_of(tier)._process is None  # no client waits for it
        tier.close()


@pytest.mark.ci
def test_memory_joins_a_master_that_was_started_again(case: MooncakeCase) -> None:
    tier = case.tier()
    assert tier.store(KEYS[0], [memoryview(VALUE)], INFO)
    case.restart_master()
    until(case.is_owner_known)

    def store() -> bool:
        with suppress(TierError):  # the first call finds that the former master is gone
            return tier.store(KEYS[0], [memoryview(VALUE)], INFO)
        return False

    until(store)
    value = tier.load(KEYS[0])
    assert value is not None
    assert bytes(value) == VALUE
    tier.close()


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("mooncake://host?ttl_s=60", "Mooncake has no time to live by key"),
        ("mooncake://user:sesame@host", "Mooncake has no login"),
        ("mooncake://user:ses?ame@host", "Mooncake has no login"),
        ("mooncake://host?metrics=-1", "ports of 1 to 65535"),
        ("mooncake://", r"expected mooncake://HOST\[:PORT\]"),
        ("mooncake://host:port", r"expected mooncake://HOST\[:PORT\]"),
        ("mooncake://host/with space", r"expected mooncake://HOST\[:PORT\]"),
        ("mooncake://host?metrics=x", "ports of 1 to 65535"),
        ("mooncake://host?size=1GiB", "expected options segment, buffer, .*, got size"),
        ("mooncake://host?protocol=ib", "protocol of tcp or rdma, got 'ib'"),
        ("mooncake://host?devices=mlx5_0", "devices with protocol=rdma"),
        ("mooncake://host?segment=1MiB", "at least 16MiB"),
        ("mooncake://host?buffer=1MiB", "at least 16MiB"),
        ("mooncake://host?buffer=much", "for buffer, got another value"),
    ],
)  # fmt: skip
def test_a_wrong_url_is_refused_by_name(url: str, told: str) -> None:
    with pytest.raises(ArgumentError, match=told) as caught:
        RemoteTier(url)
    assert "sesame" not in str(caught.value)
    assert "user:" not in str(caught.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_store, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match=r'pip install "quire-kv\[mooncake\]"'):
        RemoteTier("mooncake://host")


def test_the_buffer_limits_a_value(case: MooncakeCase) -> None:
    tier = case.tier("buffer=16MiB")
    assert not tier.store(KEYS[0], [memoryview(bytes((4 << 20) + 1))], INFO)
    assert tier.store(KEYS[0], [memoryview(bytes(3 << 20))], INFO)
    assert case.ask(EXISTS, case.owner._name(KEYS[0])) == 1
    tier.close()


def test_a_list_has_all_values_in_pages(case: MooncakeCase) -> None:
    tier = case.tier()
    keys = {number.to_bytes(32, "little") for number in range(250)}
    for key in keys:
        assert tier.store(key, [memoryview(VALUE)], INFO)
    other = RemoteTier(case.url.replace("/tests", "/other"))
    assert other.store(KEYS[0], [memoryview(VALUE)], INFO)
    items = list(tier.items())
    assert {item.key for item in items} == keys
    assert all(item.num_bytes > len(VALUE) for item in items)
    assert [item.key for item in other.items()] == KEYS[:1]
    tier.close()
    other.close()
    case.stop()
    with pytest.raises(TierError, match="metrics=PORT"):
        list(tier.items())
