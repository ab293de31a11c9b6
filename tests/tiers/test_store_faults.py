"""Every shared store under the same faults: a failure is a miss, counted and logged once; no wrong byte is used."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.store_cases import STORES, FolderCase, MooncakeCase, StoreCase, store_case
from support.tiers_case import SHAPE, chain, filled, payload, with_payloads
from support.toxic_server import closes, drips, floods, hangs, says, toxic_server
from support.until import until

from quire.errors import ArgumentError
from quire.tiers.remote.folder_store import FolderStore
from quire.tiers.remote.record import pack
from quire.tiers.remote.remote_tier import RemoteTier
from quire.tiers.remote.signed import SignedTier
from quire.tiers.remote.store_protocol import Record
from quire.tiers.stack import TierStack
from quire.tiers.tier import DamagedError, TierError, UnavailableError

NAMES = chain(3)
KEYS = [name.hash for name in NAMES]
INFO = NAMES[0].info(owner="somebody")
VALUE = bytes(range(200)) * 10


@pytest.fixture(params=STORES)
def case(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StoreCase]:
    with store_case(request.param, tmp_path, monkeypatch) as one:
        yield one


def parts(value: bytes = VALUE) -> list[memoryview]:
    return [memoryview(value[:3]), memoryview(value[3:])]


def content(value: memoryview | None) -> bytes | None:
    return None if value is None else bytes(value)


def stack_of(tier: Any, **arguments: Any) -> TierStack:
    return TierStack([tier], SHAPE, **arguments)


def loaded(stack: TierStack) -> list[np.ndarray]:
    """The payloads of the leading segments; each is the one that was stored, whatever the store does."""
    load = stack.load(NAMES)
    assert load.wait(30)
    assert load.outcome in ("complete", "missing")
    for name, found in zip(NAMES, load.payloads, strict=False):
        assert np.array_equal(found, payload(name))
    return load.payloads


def test_a_store_keeps_and_gives_values(case: StoreCase) -> None:
    tier = case.tier()
    tier.ping()
    assert tier.contains([]) == []
    assert tier.contains(KEYS) == [False] * 3
    assert tier.load(KEYS[0]) is None
    assert tier.store(KEYS[0], parts(), INFO)
    assert tier.store(KEYS[1], [], INFO)
    assert tier.contains(KEYS) == [True, True, False]
    other = case.tier()
    assert content(other.load(KEYS[0])) == VALUE
    assert content(other.load(KEYS[1])) == b""
    assert {item.key for item in other._store.scan()} == set(KEYS[:2])
    assert tier.store(KEYS[0], parts(b"ignored, for the key is there"), INFO)
    assert content(tier.load(KEYS[0])) == VALUE
    assert tier.stats().stored == 2
    assert (other.evict(KEYS[0]), other.evict(KEYS[0])) == (True, False)
    assert tier.load(KEYS[0]) is None
    for one in (tier, other):
        one.close()
        one.close()
        with pytest.raises(UnavailableError):
            one.contains(KEYS)


def test_large_values_and_many_keys(case: StoreCase) -> None:
    big = np.random.default_rng(0).integers(0, 256, 3 << 20, np.uint8)
    tier = case.tier(timeout=60)
    assert tier.store(KEYS[0], [big.data], INFO)
    assert content(tier.load(KEYS[0])) == big.tobytes()
    keys = [number.to_bytes(32, "little") for number in range(100)]
    assert tier.contains([*keys, KEYS[0]]) == [False] * 100 + [True]
    tier.close()


@pytest.mark.parametrize("is_signed", [False, True])
def test_several_values_are_loaded_at_once_up_to_one_that_is_missing_or_damaged(
    case: StoreCase, is_signed: bool
) -> None:
    tier = SignedTier(case.tier(), b"s" * 16) if is_signed else case.tier()
    values = [VALUE, VALUE[::-1], b"short"]
    for key, value in zip(KEYS, values, strict=True):
        assert tier.store(key, parts(value), INFO)
    assert list(map(content, tier.load_many([*KEYS, b"x" * 32]))) == values
    assert list(map(content, tier.load_many(KEYS[1:]))) == values[1:]
    assert tier.load_many([]) == []
    assert tier.evict(KEYS[1])
    assert list(map(content, tier.load_many(KEYS))) == values[:1]
    case.copy_value(KEYS[2], KEYS[0])
    assert tier.load_many(KEYS) == []
    assert tier.contains(KEYS) == [True, False, True]  # `load` removes it, with the reason
    with pytest.raises(DamagedError):
        tier.load(KEYS[0])
    assert tier.stats().hits == 6
    tier.close()


@pytest.mark.parametrize("damage", ["wrong bytes", "half-written", "another key's", "empty"])
def test_a_lying_store_is_found_out_and_its_value_removed(case: StoreCase, damage: str) -> None:
    stack = filled(stack_of(case.tier()), NAMES)
    raw = case.raw(KEYS[1])
    match damage:
        case "wrong bytes":
            case.write_raw(KEYS[1], raw[:-1] + bytes([raw[-1] ^ 1]))
        case "half-written":
            case.write_raw(KEYS[1], raw[: len(raw) // 2])
        case "another key's":
            case.copy_value(KEYS[0], KEYS[1])
        case "empty":
            case.write_raw(KEYS[1], b"")
    assert len(loaded(stack)) == 1
    assert stack.stats().tiers[0].damaged == 1
    assert stack.close()
    with_rest = case.tier()
    assert with_rest.contains(KEYS) == [True, False, True]
    with_rest.close()


def test_a_store_that_is_down_is_left_alone_and_found_again(
    case: StoreCase, caplog: pytest.LogCaptureFixture
) -> None:
    tier = case.tier(first_pause_s=0.1)
    stack = filled(stack_of(tier), NAMES)
    case.stop()
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            assert loaded(stack) == []
    stats = stack.stats().tiers[0]
    assert stats.failures >= 1
    told = [one.getMessage() for one in caplog.records]
    assert 1 <= len(told) == len(set(told)) <= 2  # a connection that ends, one that is refused
    case.start()

    def is_back() -> bool:
        lookup = stack.lookup(KEYS)
        assert lookup.wait(30)
        failures = stack.stats().tiers[0].failures + stack.stats().tiers[0].skipped
        time.sleep(0.02)
        lookup = stack.lookup(KEYS)
        assert lookup.wait(30)
        after = stack.stats().tiers[0]
        return after.failures + after.skipped == failures

    until(is_back)
    if not case.keeps:
        filled(stack, NAMES)
    assert len(loaded(stack)) == 3
    assert stack.close()


def test_a_full_store_is_still_read_and_tried_again(case: StoreCase) -> None:
    tier = case.tier()
    assert tier.store(KEYS[0], parts(), INFO)
    case.set_full(True)
    with pytest.raises(TierError, match=case.remedy_full) as caught:
        tier.store(KEYS[1], parts(), INFO)
    assert not isinstance(caught.value, UnavailableError)
    assert content(tier.load(KEYS[0])) == VALUE
    case.set_full(False)

    def is_stored() -> bool:
        try:
            return tier.store(KEYS[1], parts(), INFO)
        except UnavailableError:
            return False

    until(is_stored)
    assert content(tier.load(KEYS[1])) == VALUE
    tier.close()


def test_a_value_over_the_limit_is_refused_and_counted(case: StoreCase) -> None:
    stack = stack_of(case.tier("value_limit=500B"))
    stack.store(with_payloads(NAMES))
    assert stack.flush(30)
    stats = stack.stats().tiers[0]
    assert (stats.refused, stats.failures, stats.stored) == (3, 0, 0)
    assert stack.close()
    large = case.tier()
    assert large.store(KEYS[0], parts(), INFO)
    small = case.tier("value_limit=500B")
    small.raise_max_value_bytes(1 << 20)
    assert not small.store(KEYS[1], parts(), INFO)
    large.close()
    small.close()


@pytest.mark.parametrize("skew_s", [-86400.0, 0.0, 86400.0])
def test_values_expire_by_the_clock_of_the_store(case: StoreCase, skew_s: float) -> None:
    if isinstance(case, MooncakeCase):
        pytest.skip("Mooncake has no time to live by key; its URL refuses ttl_s")
    case.skew(skew_s)
    tier = case.tier("ttl_s=3600")
    tier.ping()
    assert tier.store(KEYS[0], parts(), INFO)
    assert tier.contains(KEYS[:1]) == [True]
    case.age(KEYS[0], 3000)
    assert content(tier.load(KEYS[0])) == VALUE
    assert tier.store(KEYS[0], parts(), INFO)  # begins the time anew
    case.age(KEYS[0], 3000)
    assert content(tier.load(KEYS[0])) == VALUE
    case.age(KEYS[0], 700)
    until(lambda: tier.contains(KEYS[:1]) == [False])
    assert tier.load(KEYS[0]) is None
    tier.close()


def test_a_wrong_login_is_said_without_a_secret(case: StoreCase, monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(case, MooncakeCase):
        pytest.skip("Mooncake has no login; its URL refuses one")
    tier = case.without_login(monkeypatch)
    with pytest.raises(TierError, match=case.remedy_login) as caught:
        tier.load(KEYS[0])
    for secret in ("wrong-secret", "sesame", "secret-key"):
        assert secret not in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(UnavailableError):
        tier.load(KEYS[0])
    tier.close()


def test_a_signed_value_of_another_secret_is_removed(case: StoreCase) -> None:
    ours, theirs = (SignedTier(case.tier(), secret) for secret in (b"o" * 16, b"t" * 16))
    assert ours.store(KEYS[0], parts(), INFO)
    assert content(ours.load(KEYS[0])) == VALUE
    with pytest.raises(DamagedError, match="remote_secret"):
        theirs.load(KEYS[0])
    assert ours.contains(KEYS[:1]) == [False]
    ours.close()
    theirs.close()


def test_a_value_with_nan_is_damaged(case: StoreCase) -> None:
    writer = stack_of(case.tier())
    bad = payload(NAMES[0]).copy()
    bad.view(np.float32)[5] = np.nan
    writer.store([(NAMES[0], bad)])
    assert writer.flush(30)
    assert writer.close()
    reader = stack_of(case.tier(), check_finite=("remote",))
    assert loaded(reader) == []
    assert reader.stats().tiers[0].damaged == 1
    assert reader.close()


HABITS = {
    "hangs": hangs,
    "closes": closes,
    "drips": drips,
    "floods": floods,
    "drips in a line": lambda connection, stop: (
        connection.sendall(b"HTTP/1.1 200 OK\r\nX: "),
        drips(connection, stop),
    ),
    "floods a body": lambda connection, stop: (
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n"),
        floods(connection, stop),
    ),
    "garbage": says(bytes(range(256)) * 10),
    "moved": says(b"HTTP/1.1 301 Moved\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"),
    "slow down": says(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n"),
    "no XML": says(b"HTTP/1.1 400 Bad\r\nContent-Length: 5\r\n\r\nno <x"),
}


@pytest.mark.parametrize("habit", HABITS)
def test_a_toxic_s3_server_costs_its_time_out_once(habit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("boto3", reason="boto3 is not installed: pip install boto3")
    from support.store_cases import use_credentials

    use_credentials(monkeypatch)
    with toxic_server(HABITS[habit]) as url:
        endpoint = url.replace("redis://", "http://")
        tier = RemoteTier(
            f"s3://quire-kv?endpoint={endpoint}&timeout_s=0.3", max_value_bytes=4 << 20, first_pause_s=60
        )
        began = time.monotonic()
        with pytest.raises(TierError) as caught:
            tier.load(KEYS[0])
        assert time.monotonic() - began < 25
        assert not isinstance(caught.value, UnavailableError)
        assert "\n" not in str(caught.value)
        for call in (
            lambda: tier.load(KEYS[0]),
            lambda: tier.contains(KEYS),
            lambda: tier.store(KEYS[0], [], INFO),
        ):
            with pytest.raises(UnavailableError):
                call()
        tier.close()


def test_a_folder_that_hangs_costs_its_time_out_once(tmp_path: Path) -> None:
    case, leave = FolderCase(tmp_path), threading.Event()
    tier = case.tier("timeout_s=0.2", first_pause_s=60)
    store = tier._store
    assert isinstance(store, FolderStore)
    assert tier.store(KEYS[0], parts(), INFO)
    case.files.fault = lambda operation: (leave.wait(60), None)[1] if operation == "read" else None
    with pytest.raises(TierError, match=r"no answer within 0\.2 s"):
        tier.load(KEYS[0])
    with pytest.raises(UnavailableError):
        tier.load(KEYS[0])
    leave.set()
    tier.close()
    assert not [thread for thread in store._calls._threads if thread.is_alive()]


@pytest.mark.parametrize("at", ["make", "write", "rename"])
def test_a_writer_that_fails_leaves_no_file(tmp_path: Path, at: str) -> None:
    case = FolderCase(tmp_path)
    tier = case.tier()
    assert tier.store(KEYS[0], parts(), INFO)

    def fault(operation: str) -> None:
        if operation == at:
            raise OSError(5, "Input/output error")

    case.files.fault = fault
    with pytest.raises(TierError, match="Input/output"):
        tier.store(KEYS[1], parts(), INFO)
    files = [path for path in case.folder.rglob("*") if path.is_file()]
    assert files == [case.path(KEYS[0])]
    tier.close()


def test_an_unknown_option_of_a_url_is_refused(tmp_path: Path) -> None:
    for url, told in (
        (
            f"folder://{tmp_path}?sizes=1GiB",
            "expected options size, ttl_s, timeout_s, value_limit .*, got sizes",
        ),
        (f"folder://{tmp_path}?size=1MiB", "a size of at least 16MiB, got 1MiB"),
        (f"folder://{tmp_path}?ttl_s=soon", "seconds above 0 for ttl_s"),
        (f"folder://{tmp_path}?ttl_s=1&ttl_s=2", "expected ttl_s once"),
        (f"folder://{tmp_path}?value_limit=much", "for value_limit, got another value"),
        ("folder://relative/path", "folder:///PATH with an absolute path"),
    ):
        with pytest.raises(ArgumentError, match=told):
            RemoteTier(url)


def test_a_record_that_is_cut_has_no_valid_checksum() -> None:
    from quire.tiers.remote.record import checksum, unpack

    record = Record(parts(), checksum(KEYS[0], parts()), b'{"start": 7}')
    whole = b"".join(pack(record))
    again = unpack(whole)
    assert (bytes(again.parts[0]), again.checksum, again.info) == (VALUE, record.checksum, record.info)
    for end in range(0, len(whole), 37):
        cut = unpack(whole[:end])
        assert cut.checksum != checksum(KEYS[0], cut.parts)
