"""The remote tier on a real server: its content, sharing, and the cost of a full or a strict server."""

from __future__ import annotations

import builtins
import contextlib
import json
import re
import subprocess
import sys
import textwrap
import time
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fake_redis import FakeRedis
from support.redis_server import redis_server
from support.tiers_case import ROOT, SHAPE, Clock, chain, payload, with_payloads

from quire.errors import ArgumentError, BackendError
from quire.tiers.remote.redis_store import RedisStore
from quire.tiers.remote.remote_tier import RemoteTier
from quire.tiers.remote.store_protocol import Record
from quire.tiers.segment import Segment, encode
from quire.tiers.stack import TierStack
from quire.tiers.tier import DamagedError, TierError, UnavailableError

NAME = chain(1)[0]
INFO = NAME.info(cache_priority=2, owner="somebody")
BIG = np.random.default_rng(0).integers(0, 256, 3 << 20, np.uint8)


def parts(value: bytes) -> list[memoryview]:
    return [memoryview(value[:3]), memoryview(value[3:])]


def client(url: str) -> Any:
    import redis

    return redis.Redis.from_url(url)


def test_keeps_and_gives_values(redis_url: str) -> None:
    tier = RemoteTier(redis_url)
    assert tier.contains([b"a", b"b"]) == [False, False]
    assert tier.load(b"a") is None
    assert tier.store(b"a", parts(b"some value"), INFO)
    assert tier.contains([b"b", b"a"]) == [False, True]
    assert tier.contains([]) == []
    value = tier.load(b"a")
    assert value is not None
    assert bytes(value) == b"some value"
    assert tier.evict(b"a")
    assert not tier.evict(b"a")
    assert tier.load(b"a") is None
    stats = tier.stats()
    assert (stats.num_values, stats.hits, stats.misses, stats.stored) == (-1, 1, 2, 1)
    tier.close()
    tier.close()
    with pytest.raises(UnavailableError):
        tier.load(b"a")


def test_large_values_and_many_keys(redis_url: str) -> None:
    tier = RemoteTier(redis_url, timeout=20)
    assert tier.store(b"big", [BIG.data], INFO)
    value = tier.load(b"big")
    assert value is not None
    assert np.array_equal(np.frombuffer(value, np.uint8), BIG)
    keys = [i.to_bytes(32, "little") for i in range(3000)]
    assert tier.contains([*keys, b"big"]) == [False] * 3000 + [True]
    assert not RemoteTier(redis_url, max_value_bytes=1000).store(b"other", [BIG.data], INFO)
    tier.close()


def test_what_is_on_the_server(redis_url: str) -> None:
    tier = RemoteTier(redis_url)
    tier.store(NAME.hash, parts(b"value"), INFO)
    with client(redis_url) as other:
        (name,) = other.keys("*")
        fields = other.hgetall(name)
        assert other.ttl(name) == -1
    assert name == b"quire:kv:1:" + NAME.hash.hex().encode()
    assert fields[b"v"] == b"value"
    entry = json.loads(fields[b"i"])
    assert entry["root"] == ROOT.hex()
    assert (entry["start"], entry["cache_priority"], entry["owner"]) == (0, 2, "somebody")
    tier.close()


def test_a_value_that_is_there_is_refreshed_not_sent(redis_url: str) -> None:
    tier = RemoteTier(redis_url, ttl_s=1000)
    assert tier.store(b"a", parts(b"value"), INFO)
    with client(redis_url) as other:
        other.pexpire("quire:kv:1:" + b"a".hex(), 5000)
        assert tier.store(b"a", parts(b"another"), INFO)
        assert 900_000 < other.pttl("quire:kv:1:" + b"a".hex()) <= 1_000_000
    value = tier.load(b"a")
    assert value is not None
    assert bytes(value) == b"value"
    assert tier.stats().stored == 1
    tier.close()


@pytest.mark.parametrize("damage", ["other bytes", "cut", "another key's", "no checksum", "no hash"])
def test_damage_is_found_removed_and_given_a_rest(redis_url: str, damage: str) -> None:
    tier = RemoteTier(redis_url)
    a, b = "quire:kv:1:" + (b"a" * 32).hex(), "quire:kv:1:" + (b"b" * 32).hex()
    tier.store(b"a" * 32, parts(b"some value"), INFO)
    tier.store(b"b" * 32, parts(b"other value"), INFO)
    with client(redis_url) as other:
        match damage:
            case "other bytes":
                other.hset(a, "v", b"some vaLue")
            case "cut":
                other.hset(a, "v", b"some")
            case "another key's":
                other.copy(b, a, replace=True)
            case "no checksum":
                other.hdel(a, "x")
            case "no hash":
                other.set(a, b"text")
        with pytest.raises(TierError) as caught:
            tier.load(b"a" * 32)
        assert isinstance(caught.value, DamagedError) == (damage != "no hash")
        assert other.exists(a) == (damage == "no hash")
    tier.close()


def test_two_processes_share_a_server_bit_for_bit(redis_url: str) -> None:
    names = chain(6)
    script = f"""
        from support.tiers_case import SHAPE, chain, with_payloads
        from quire.tiers.remote.remote_tier import RemoteTier
        from quire.tiers.stack import TierStack
        stack = TierStack([RemoteTier({redis_url!r}, timeout=10)], SHAPE)
        assert stack.store(with_payloads(chain(6))) == 6
        assert stack.flush(30) and stack.stats().tiers[0].stored == 6 and stack.close()
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        check=True,
        timeout=120,
        env={"PYTHONPATH": ":".join([str(Path(__file__).parents[1]), *sys.path])},
    )
    stack = TierStack([RemoteTier(redis_url, timeout=10)], SHAPE)
    lookup = stack.lookup([name.hash for name in names])
    assert lookup.wait(10)
    assert lookup.leading_tiers == ("remote",) * 6
    load = stack.load(names)
    assert load.wait(30)
    assert load.outcome == "complete"
    for name, found in zip(names, load.payloads, strict=True):
        assert np.array_equal(found, payload(name))
    other_model = stack.load(chain(6, root=b"another fingerprint".ljust(32)))
    assert other_model.wait(10)
    assert other_model.num_loaded == 0
    assert stack.close()


def test_a_full_server_is_still_read_and_tried_again(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--maxmemory", "4mb", "--maxmemory-policy", "noeviction") as url:
        tier = RemoteTier(url, timeout=10, first_pause_s=0.2)
        assert tier.store(b"first", parts(b"value"), INFO)
        big = BIG[: 1 << 20].data
        with pytest.raises(TierError, match=r"a store at .*maxmemory.*; give the server a maxmemory-policy"):
            all(tier.store(bytes([i]), [big], INFO) for i in range(10))
        with pytest.raises(UnavailableError, match="refused to store"):
            tier.store(b"more", parts(b"value"), INFO)
        value = tier.load(b"first")
        assert value is not None
        assert bytes(value) == b"value"
        with client(url) as other:
            other.flushall()
        time.sleep(0.25)
        assert tier.store(b"more", parts(b"value"), INFO)
        tier.close()


def test_a_server_that_evicts_keeps_to_its_cap(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--maxmemory", "6mb", "--maxmemory-policy", "allkeys-lru") as url:
        tier = RemoteTier(url, timeout=10)
        for i in range(20):
            assert tier.store(bytes([i]), [BIG.data[: 1 << 20]], INFO)
        found = tier.contains([bytes([i]) for i in range(20)])
        assert found[19]
        assert 1 <= sum(found) < 6
        tier.close()


def test_a_password_is_asked_for_and_never_shown(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--requirepass", "sesame") as url:
        for wrong in (url, url.replace("redis://", "redis://:wrong-secret@")):
            tier = RemoteTier(wrong, timeout=10)
            with pytest.raises(TierError, match="give the password in the URL") as caught:
                tier.load(b"a")
            assert "wrong-secret" not in str(caught.value)
            tier.close()
        tier = RemoteTier(url.replace("redis://", "redis://:sesame@"), timeout=10)
        assert tier.store(b"a", parts(b"value"), INFO)
        tier.close()


def test_comes_back_when_the_server_does(tmp_path: Path) -> None:
    with redis_server(tmp_path) as url:
        tier = RemoteTier(url, timeout=5, first_pause_s=0.05)
        assert tier.store(b"a", parts(b"value"), INFO)
    with pytest.raises(TierError):
        tier.load(b"a")
    port = int(url.split(":")[2].split("/")[0])
    with redis_server(tmp_path, port=port):
        deadline = time.monotonic() + 20
        while True:
            try:
                assert tier.load(b"a") is None  # it kept nothing over its end
                break
            except UnavailableError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        assert tier.store(b"a", parts(b"value"), INFO)
        tier.close()


def test_bad_arguments_and_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ArgumentError,
        match=r"expected a store's scheme, one of \['folder', 'mooncake', 'redis', .*got 'http'",
    ):
        RemoteTier("http://somewhere")
    with pytest.raises(ArgumentError, match=r"expected redis://\[\[USER"):
        RemoteTier("redis://somewhere:port")
    with pytest.raises(ArgumentError, match="above 0, got 0"):
        RemoteTier("redis://somewhere", timeout=0)
    real_import = builtins.__import__

    def no_redis(name: str, *rest: Any) -> Any:
        if name.split(".")[0] == "redis":
            raise ImportError(name)
        return real_import(name, *rest)

    monkeypatch.setattr(builtins, "__import__", no_redis)
    with pytest.raises(BackendError, match=r'pip install "quire-kv\[redis\]"'):
        RemoteTier("redis://somewhere")


def test_a_segment_comes_back_from_the_server(redis_url: str) -> None:
    tier = RemoteTier(redis_url)
    segment = Segment(NAME.hash, NAME.parent, 0, NAME.tokens, payload(NAME))
    value = encode(segment, SHAPE, made_at=0)
    tier.store(NAME.hash, value, INFO)
    loaded = tier.load(NAME.hash)
    assert loaded is not None
    assert bytes(loaded) == b"".join(value)
    assert with_payloads([NAME])[0][1].tobytes() in bytes(loaded)
    tier.close()


def test_the_documents_name_the_commands_that_a_server_needs() -> None:
    seen: set[str] = set()

    class Listening(FakeRedis):
        def answer(self, command: list[bytes]) -> bytes:
            seen.add(command[0].decode().upper())
            if command[0].upper() in (b"AUTH", b"SELECT", b"MULTI"):
                return b"+OK\r\n"
            if command[0].upper() in (b"PEXPIRE", b"EXEC"):
                return b":1\r\n" if command[0].upper() == b"PEXPIRE" else b"*0\r\n"
            return super().answer(command)

    for ttl_s in (None, 5.0):
        fake = Listening(Clock())
        tier = RemoteTier(
            "redis://:pass@h/3", ttl_s=ttl_s, make_store=partial(RedisStore, connect=fake.connect)
        )
        tier.ping()
        tier.contains([NAME.hash])
        with contextlib.suppress(TierError):  # this server knows no transactions
            tier.store(NAME.hash, [memoryview(b"value")], INFO)
        tier.load(NAME.hash)
        tier.evict(NAME.hash)
        tier.close()
    told = (Path(__file__).parents[2] / "docs" / "tiers.md").read_text()
    needed = told[told.index("It needs the commands") :].partition("```")[0]
    named = set(re.findall(r"`([A-Z]+)(?: [A-Z]+)?`", needed))
    assert seen == named
    acl = told[told.index("ACL SETUSER") :].partition("\n")[0]
    plain = {"PING", "EXISTS", "HMGET", "TOUCH", "HSET", "DEL", "SELECT"}
    assert {word[1:].upper() for word in acl.split() if word[0] == "+"} == {*plain, "CLIENT|SETINFO"}


@pytest.mark.parametrize(
    "url",
    [
        "redis://:12345/sesame@host", "redis://:sesame/x@host", "redis://:ses#ame@host", "redis://:sesame?x@host:1",
        "redis://u:1/sesame@host/0", "redis://u:p@host:sesame", "rediss://:[sesame@host", "sesame://:sesame@host",
        "unix://:se?sesame@/run/redis",
    ],
)  # fmt: skip
def test_a_password_that_ends_early_is_not_shown(url: str) -> None:
    with pytest.raises(ArgumentError, match="as %2F") as caught:
        RemoteTier(url, make_store=RedisStore)
    assert "sesame" not in "".join(traceback.format_exception(caught.value))
    assert "12345" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis://host/x", "expected redis://"),
        ("redis://host/-1", "expected redis://"),
        ("redis://host/1/2", "expected redis://"),
        ("redis://host/1#2", "expected redis://"),
        ("redis://host/0?db=3", "got db - in `remote_cache`"),
        ("valkey://host?socket_timeout=5", "got socket_timeout - in `remote_cache`"),
        (
            "rediss://host?ssl_ca_cert=f",
            "expected options ssl_ca_certs, .*got ssl_ca_cert - in `remote_cache`",
        ),
        ("unix:///run/redis?db=2&ssl_keyfile=f", "got ssl_keyfile - in `remote_cache`"),
    ],
)
def test_a_database_or_an_option_that_no_server_would_see_is_refused(url: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        RemoteTier(url, make_store=RedisStore)


@pytest.mark.parametrize(
    "url",
    [
        "redis://host", "redis://host/", "valkey://u:p@host:1/12?ttl_s=3", "unix:///run/redis?db=2",
        "rediss://h/1?ssl_cert_reqs=none",
    ],
)  # fmt: skip
def test_a_url_of_a_redis_server_is_taken(url: str) -> None:
    RemoteTier(url, make_store=RedisStore).close()


def test_a_server_that_repeats_the_password_is_not_quoted() -> None:
    class Echoing(FakeRedis):
        def answer(self, command: list[bytes]) -> bytes:
            args = b" ".join(b"'%b'" % word for word in command[1:])
            return b"-ERR unknown command 'AUTH', with args beginning with: %b\r\n" % args

    tier = RemoteTier(
        "redis://:open%20sesame@h", make_store=partial(RedisStore, connect=Echoing(Clock()).connect)
    )
    with pytest.raises(TierError, match="with args beginning with") as caught:
        tier.ping()
    tier.close()
    assert "sesame" not in str(caught.value)


class CountingStore(RedisStore):
    """num_gets: calls of `get`. slow_from: so many keys of one `get` take too long."""

    num_gets = 0
    slow_from = 1 << 30

    def get(self, keys: Sequence[bytes]) -> list[Record | None]:
        self.num_gets += 1
        if len(keys) >= self.slow_from:
            raise TimeoutError
        return super().get(keys)


def counting_tier() -> tuple[RemoteTier, CountingStore]:
    make = partial(CountingStore, connect=FakeRedis(Clock()).connect)
    pauses = {"first_pause_s": 1e-6, "max_pause_s": 1e-6, "probe_in_background": False}
    tier = RemoteTier("redis://h", make_store=make, **pauses)
    assert isinstance(tier._store, CountingStore)
    return tier, tier._store


def test_a_load_of_many_segments_takes_few_calls() -> None:
    tier, store = counting_tier()
    names = chain(64)
    stack = TierStack([tier], SHAPE, workers=2)
    stack.store(with_payloads(names))
    assert stack.flush(30)
    load = stack.load(names)
    assert load.wait(30)
    assert (load.outcome, load.num_loaded) == ("complete", 64)
    assert store.num_gets == 1  # up to 8 MiB in each
    assert stack.close()


def test_a_store_too_slow_for_several_values_is_asked_for_one_at_a_time() -> None:
    tier, store = counting_tier()
    keys = [name.hash for name in chain(3)]
    for key in keys:
        assert tier.store(key, parts(b"some value"), INFO)
    store.slow_from = 2
    with pytest.raises(TierError, match="no answer within"):
        tier.load_many(keys)
    assert store.num_gets == 1
    time.sleep(1e-5)  # the pause
    assert tier.load_many(keys) == []
    assert store.num_gets == 1
    value = tier.load(keys[0])
    assert value is not None
    assert bytes(value) == b"some value"
    tier.close()
