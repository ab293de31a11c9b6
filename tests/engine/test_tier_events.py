"""KV events of tiers: subscribers' maps equal the content of each tier, in process and over ZeroMQ."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny_llm
from support.fake_engine import FakeEngine

from quire import LLM, AsyncEngine, SamplingParams
from quire.cache.block_hash import namespace_digest
from quire.engine.driver import Mailbox
from quire.engine.monitor import CacheMonitor
from quire.observe.kv_events import BlockStored, EventBatch
from quire.offload.tier_events import TierEvents
from quire.tiers.host import HostTier

zmq = pytest.importorskip("zmq")
pytest.importorskip("msgpack")

from support.kv_follower import Blocks, Follower, blocks_by_key, union  # noqa: E402
from support.until import until  # noqa: E402

ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
PROMPTS = [[(11 * i + j * j) % 200 + 5 for j in range(40 + 7 * i)] for i in range(12)]
SMALL_POOL: dict[str, Any] = {"kv_memory": "128KiB", "max_num_seqs": 2}


class DiskLike(HostTier):
    """A second tier that is told apart by its name."""

    name = "disk"


class Followed:
    """An engine over the fake model, everything inline, and who follows it."""

    def __init__(self, *tiers: HostTier, policy: Any = "eviction", max_segments: int = 65536) -> None:
        self.engine = FakeEngine(num_blocks=12, tiers=tiers, policy=policy, segment_blocks=2)
        stack, stores = self.engine.stack, self.engine.stores
        assert stack is not None
        assert stores is not None
        loads = self.engine.engine._loads
        assert loads is not None
        self.tiers = tiers
        self.events = TierEvents(stack, stores, loads, b"a model", 4, max_segments=max_segments)
        self.monitor = CacheMonitor(self.engine.cache, stores.dispatcher, tier_events=self.events)
        self.engine.engine.monitor = self.monitor
        self.stores = stores
        self.follower = Follower()
        self.served: list[tuple[bytes, Sequence[int]]] = []

    def serve(self, prompt: list[int], namespace: bytes = b"", num_tokens: int = 1) -> None:
        params = SamplingParams(max_tokens=num_tokens)
        name = self.engine.submit(prompt, params, namespace=namespace)
        output = self.engine.run()[name]
        self.served.append((namespace, [*prompt, *output.outputs[0].token_ids]))

    def subscribe(self, follower: Follower) -> Any:
        self.monitor.collect()
        return self.monitor.subscribers.add(follower)

    def expected(self, tier: HostTier) -> Blocks:
        return union(tier._entries, blocks_by_key(self.served, b"a model", 8, 4))

    def check(self) -> None:
        """Told is what is there and whose parents are, wherever."""
        self.monitor.collect()
        mirror = self.monitor.mirror.by_id.values()
        there = {int.from_bytes(block.hash[-8:], "big") for block in mirror if block.is_there}
        held = {
            medium: self.expected(tier)
            for tier, medium in zip(self.tiers, ("CPU_TIER1", "DISK"), strict=False)
        }
        somewhere = there.union(*held.values())
        parents = {
            name: parent
            for blocks in blocks_by_key(self.served, b"a model", 8, 4).values()
            for name, (parent, _) in blocks.items()
        }

        def is_placed(name: int | None) -> bool:
            return name is None or (name in somewhere and is_placed(parents[name]))

        for medium, blocks in held.items():
            assert self.follower.of(medium) == {name: one for name, one in blocks.items() if is_placed(name)}
        assert set(self.follower.of("CPU")) == {name for name in there if is_placed(name)}


def prompt_of(seed: int, length: int) -> list[int]:
    """Those of one seed share a prefix."""
    return [(seed * 31 + j * (seed + 3)) % 90 for j in range(length)]


@settings(max_examples=30, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 4), st.integers(1, 38), st.sampled_from([b"", b"b"]), st.integers(0, 9)),
        min_size=1,
        max_size=14,
    ),
    policy=st.sampled_from(["eviction", "through"]),
    host_bytes=st.integers(1, 40),
    subscribed_at=st.integers(0, 8),
)
def test_who_follows_knows_what_each_tier_has(
    steps: list[tuple[int, int, bytes, int]], policy: str, host_bytes: int, subscribed_at: int
) -> None:
    run = Followed(HostTier(host_bytes << 10), DiskLike(1 << 22), policy=policy)
    run.subscribe(run.follower)
    late = Follower()
    for number, (seed, length, namespace, also) in enumerate(steps):
        if number == subscribed_at:
            run.subscribe(late)
        run.serve(prompt_of(seed, length), namespace, 1 + also)
        if also == 9:
            run.engine.cache.reset()
        elif also == 8:
            run.stores.store_all()
        run.check()
    run.stores.store_all()
    run.check()
    if subscribed_at >= len(steps):
        run.subscribe(late)
    assert {medium: one for medium, one in late.blocks.items() if one} == {
        medium: one for medium, one in run.follower.blocks.items() if one
    }
    assert run.events.num_untold == 0
    assert set(run.follower.digests.values()) <= {"", namespace_digest(b"b")}


@pytest.mark.parametrize("policy", ["eviction", "through"])
def test_the_first_who_comes_late_is_told_what_there_is(policy: str) -> None:
    """Heads in memory, tails in tiers: what a tail continues is known from memory."""
    run = Followed(HostTier(1 << 22), DiskLike(1 << 22), policy=policy)
    run.serve(prompt_of(1, 40), b"b")
    run.serve(prompt_of(2, 16))
    tails = [entry for entry in run.tiers[0]._entries.values() if entry.info.start]
    assert tails
    assert policy == "through" or any(e.info.parent not in run.tiers[0]._entries for e in tails)
    run.subscribe(run.follower)
    run.check()
    assert run.events.num_untold == 0


def test_what_is_gone_is_told_with_the_reason() -> None:
    host, disk = HostTier(1 << 20), DiskLike(1 << 22)
    run = Followed(host, disk)
    run.subscribe(run.follower)
    run.serve(prompt_of(1, 40))
    run.stores.store_all()
    run.check()
    assert len(run.follower.of("DISK")) == 10
    # Others have taken one out of the folder's, and one of host memory is damaged.
    first = min(disk._entries.values(), key=lambda entry: entry.info.start)
    [gone] = [key for key, entry in disk._entries.items() if entry is first]
    disk.evict(gone)
    *damaged, one, other = sorted(host._entries.values(), key=lambda entry: entry.info.start)
    for entry in damaged:
        entry.value = memoryview(bytes(entry.value[:-1]) + bytes([entry.value[-1] ^ 1]))
    num_held = len(host._entries)
    run.engine.cache.reset()
    run.serve(prompt_of(1, 40))
    run.check()
    assert set(map(id, host._entries.values())) == {id(one), id(other)}
    assert len(damaged) == num_held - 2 > 0
    assert ("CPU_TIER1", "damaged") in run.follower.reasons
    assert ("DISK", "missing") in run.follower.reasons
    assert run.follower.cleared == [None, "CPU"], "a clear of memory says nothing of tiers"
    key = next(iter(host._entries))
    assert run.engine.stack is not None
    run.engine.stack.evict([key])
    run.check()
    assert ("CPU_TIER1", "dropped") in run.follower.reasons
    run.engine.stack.close()
    run.monitor.collect()
    assert run.follower.of("CPU_TIER1") == {}
    assert ("CPU_TIER1", "cleared") in run.follower.reasons
    assert run.follower.cleared[2:] == ["CPU_TIER1", "DISK"]


def test_what_is_followed_is_bounded_and_stays_in_balance() -> None:
    run = Followed(HostTier(1 << 22), max_segments=3)
    run.subscribe(run.follower)
    for seed in range(5):
        run.serve(prompt_of(seed, 40))
    run.stores.store_all()
    run.monitor.collect()
    assert len(run.events._segments) == 3
    assert ("CPU_TIER1", "forgotten") in run.follower.reasons
    told = dict(run.follower.of("CPU_TIER1"))
    assert 0 < len(told) <= 6
    assert told.items() <= run.expected(run.tiers[0]).items()
    late = Follower()
    run.subscribe(late)
    assert late.of("CPU_TIER1") == told
    run.engine.cache.reset()
    run.serve(prompt_of(0, 40))
    run.monitor.collect()
    after = run.follower.of("CPU_TIER1")
    assert after != told, "what a load finds is told again"
    assert 0 < len(after) <= 6
    assert after.items() <= run.expected(run.tiers[0]).items()


def test_nobody_listens_and_nothing_is_kept() -> None:
    run = Followed(HostTier(1 << 22))
    assert run.engine.stack is not None
    changes = run.engine.stack.changes
    run.serve(prompt_of(1, 40))
    run.stores.store_all()
    assert changes.mark() == 0
    end = run.subscribe(run.follower)
    run.serve(prompt_of(2, 40))
    run.check()
    assert changes.mark() > 0
    end()
    run.serve(prompt_of(3, 40))
    assert not changes.pop_all()
    assert not run.events._segments
    again = run.follower = Follower()
    run.subscribe(again)
    run.check()


def test_what_was_seen_before_undoes_nothing() -> None:
    """A load that finds nothing, or something, tells of it late: the tier has stored, or evicted, meanwhile."""
    run = Followed(HostTier(1 << 20))
    run.subscribe(run.follower)
    assert run.engine.stack is not None
    changes = run.engine.stack.changes
    run.serve(prompt_of(1, 20))
    before = changes.mark()
    run.stores.store_all()
    [entry, *_] = run.tiers[0]._entries.items()
    changes.add_lost("host", [entry[0]], "missing", before)
    run.check()
    name = run.events._segments[entry[0]].key
    seen = changes.mark()
    run.engine.stack.evict([entry[0]])
    changes.add_stored("host", name, seen)
    run.check()
    changes.add_stored("host", name, changes.mark())
    run.monitor.collect()
    assert run.follower.of("CPU_TIER1") != run.expected(run.tiers[0])


def test_what_a_tier_has_that_nothing_is_known_of_is_counted() -> None:
    """Another engine has stored it, and its beginning is nowhere any more."""
    first = Followed(DiskLike(1 << 22))
    first.serve(prompt_of(1, 40))
    first.stores.store_all()
    disk = first.tiers[0]
    for key in [key for key, entry in disk._entries.items() if entry.info.start == 0]:
        disk.evict(key)
    assert disk._entries
    second = Followed(disk)
    second.subscribe(second.follower)
    assert second.follower.blocks == {}
    assert second.events.num_untold == len(disk._entries)


# -- with threads, files and a socket ------------------------------------------------------------------


def held(llm: LLM, served: list[list[int]], tier: str) -> Blocks:
    """What the tier has, of these sequences of no tenant."""
    assert llm.tiers is not None
    tiers = llm.tiers
    [found] = [one.tier for one in tiers.stack._tiers if one.name == tier]
    by_key = blocks_by_key(
        [(b"", tokens) for tokens in served], tiers.fingerprint, tiers.segment_tokens, llm.block_size
    )
    return union((key for key in by_key if found.contains([key]) == [True]), by_key)


def generate(llm: LLM, served: list[list[int]], prompts: list[list[int]]) -> None:
    for output in llm.generate(prompts, ONE):
        served.append([*output.prompt_token_ids, *output.outputs[0].token_ids])


@pytest.mark.parametrize("small_segments", [True, False])
def test_host_and_disk_below_a_model(
    small_segments: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if small_segments:
        monkeypatch.setattr("quire.tiers.segment.MAX_BYTES", 16 << 10)
    options = SMALL_POOL | {"host_cache": "96KiB", "disk_cache": tmp_path, "disk_cache_size": "64MiB"}
    served: list[list[int]] = []
    follower = Follower()
    with tiny_llm.llm(**options) as llm:
        assert llm.tiers is not None
        assert llm.tiers.segment_tokens == (32 if small_segments else 4096)
        llm.monitor.subscribe(follower)
        generate(llm, served, PROMPTS)
        generate(llm, served, PROMPTS[:4])
        llm.flush()
        assert follower.of("DISK") == held(llm, served, "disk")
        assert follower.of("CPU_TIER1") == held(llm, served, "host")
        assert 0 < len(follower.of("CPU_TIER1")) < len(follower.of("DISK"))
        assert ("CPU_TIER1", "evicted") in follower.reasons
        on_disk = dict(follower.of("DISK"))
    assert follower.of("CPU_TIER1") == {}
    assert ("CPU_TIER1", "cleared") in follower.reasons
    assert follower.of("DISK") == on_disk, "the disk keeps what it has"
    with tiny_llm.llm(**options) as llm:
        again = Follower()
        llm.monitor.subscribe(again)
        assert again.of("DISK") == on_disk, "the first batch says what the folder has"
        generate(llm, served, PROMPTS[:2])
        llm.flush()
        assert again.of("DISK") == held(llm, served, "disk")
        assert again.of("CPU_TIER1") == held(llm, served, "host")


def test_tenants_and_snapshots(tmp_path: Path) -> None:
    follower = Follower()
    with tiny_llm.llm(disk_cache=tmp_path, disk_cache_size="64MiB", tenant_secret=b"0123456789abcdef") as llm:
        llm.tenants.add("a")
        llm.monitor.subscribe(follower)
        llm.generate([PROMPTS[0]], ONE, tenant="a")
        talk = llm.conversation(PROMPTS[1])
        talk.snapshot("here")
        llm.generate([PROMPTS[2]], ONE)  # tells what the snapshot stored
        by_snapshot = dict(follower.of("DISK"))
        llm.flush()
        assert by_snapshot == {name: one for name, one in follower.of("DISK").items() if name in by_snapshot}
        digest = namespace_digest(llm.engine.tenants.namespace("a"))
        assert set(follower.digests.values()) == {"", digest}
        there = dict(follower.of("DISK"))
    with tiny_llm.llm(disk_cache=tmp_path, disk_cache_size="64MiB", tenant_secret=b"0123456789abcdef") as llm:
        llm.tenants.add("a")
        again = Follower()
        llm.monitor.subscribe(again)
        assert again.of("DISK") == there


def test_a_server_that_gives_a_value_up_is_found_out(tmp_path: Path) -> None:
    import redis
    from support.redis_server import redis_server

    served: list[list[int]] = []
    follower = Follower()
    with redis_server(tmp_path) as url, tiny_llm.llm(**SMALL_POOL, remote_cache=url) as llm:
        llm.monitor.subscribe(follower)
        generate(llm, served, PROMPTS[:3])
        llm.flush()
        assert follower.of("REMOTE") == held(llm, served, "remote")
        assert len(follower.of("REMOTE")) >= 6
        redis.Redis.from_url(url).flushall()
        llm.cache.reset()
        generate(llm, served, PROMPTS[:1])
        assert ("REMOTE", "missing") in follower.reasons
        by_key = blocks_by_key([(b"", PROMPTS[0])], b"", 1 << 20, llm.block_size)
        first = set(union(by_key, by_key))
        assert first
        assert not first & set(follower.of("REMOTE"))
        llm.flush()
        assert first <= set(follower.of("REMOTE"))


def test_over_zeromq(tmp_path: Path) -> None:
    """Everything from number 0 on, as a router asks for it: each medium's map is what the tier has."""
    served: list[list[int]] = []
    options = SMALL_POOL | {"host_cache": "64KiB", "disk_cache": tmp_path, "disk_cache_size": "64MiB"}
    with (
        zmq.Context() as context,
        tiny_llm.llm(**options, kv_events="tcp://127.0.0.1:0", kv_events_replay="tcp://127.0.0.1:0") as llm,
    ):
        [(publisher, _)] = llm.monitor._publishers
        in_process = Follower()
        llm.monitor.subscribe(in_process)
        generate(llm, served, PROMPTS)
        llm.flush()
        llm.cache.reset()
        generate(llm, served, PROMPTS[:3])
        llm.flush()
        router = Follower()
        with context.socket(zmq.DEALER) as asks:
            number_of_last = publisher._next - 1
            until(lambda: not publisher._waiting)
            asks.setsockopt(zmq.RCVTIMEO, 30_000)
            asks.connect(publisher.replay_endpoint)
            asks.send_multipart([b"", (0).to_bytes(8, "big")])
            expected = 0
            while True:
                _, number, payload = asks.recv_multipart()
                if int.from_bytes(number, "big", signed=True) == -1:
                    break
                assert int.from_bytes(number, "big") == expected
                expected += 1
                router.wire(payload)
        assert expected == number_of_last + 1
        assert router.cleared == [None], "what memory alone gives up is sent as blocks removed"
        assert in_process.cleared == [None, "CPU"]
        assert router.blocks == in_process.blocks
        assert router.of("DISK") == held(llm, served, "disk")
        assert router.of("CPU_TIER1") == held(llm, served, "host")


def test_an_idle_engine_tells_of_what_is_stored_after_its_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the engine's thread."""
    go = threading.Event()

    class Late(HostTier):
        def store(self, key: bytes, value: Any, info: Any) -> bool:
            assert go.wait(60)
            return super().store(key, value, info)

    monkeypatch.setattr("quire.offload.open_tiers._host_tier", lambda _: Late(1 << 24))
    told = threading.Event()
    threads: set[str] = set()

    def tell(batch: EventBatch) -> None:
        if any(isinstance(event, BlockStored) and event.medium == "CPU_TIER1" for event in batch.events):
            threads.add(threading.current_thread().name)
            told.set()

    monkeypatch.setattr("quire.tiers.segment.MAX_BYTES", 16 << 10)
    with tiny_llm.llm(host_cache="16MiB", cache_write="through") as llm:
        engine = AsyncEngine(llm)
        try:
            engine.submit_between_steps(lambda: llm.monitor.subscribe(tell)).result(60)

            def submit() -> None:
                llm.driver.expect(llm.engine.submit(PROMPTS[0], ONE), Mailbox().put)

            engine.submit_between_steps(submit).result(60)
            while engine.submit_between_steps(lambda: llm.engine.has_work).result(60):
                time.sleep(0.01)
            assert not told.is_set()
            go.set()
            assert told.wait(60)
            assert threads == {"quire-engine"}
        finally:
            go.set()
            engine.close()
