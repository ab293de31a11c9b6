"""The stack with threads: loads, cancellation, drops, promotion, measurements, logs and leftovers."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import pytest
from support.tiers_case import (
    SHAPE,
    SMALL_TURN,
    Clock,
    DictTier,
    chain,
    check_cancel_waits,
    filled,
    payload,
    raising,
    with_payloads,
)

from quire.errors import ArgumentError
from quire.tiers.host import HostTier
from quire.tiers.stack import TierStack
from quire.tiers.tier import SegmentInfo, Tier
from quire.tiers.transfer import Load, Lookup

SEGMENT_BYTES = payload(chain(1)[0]).nbytes


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


class GatedTier(DictTier):
    """Its loads and stores wait for `gate`; `reached` is set when one does."""

    def __init__(self, name: str = "disk") -> None:
        super().__init__(name)
        self.gate, self.reached = threading.Event(), threading.Event()

    def load(self, key: bytes) -> memoryview | None:
        self._wait()
        return super().load(key)

    def store(self, key: bytes, value: Sequence[memoryview], info: SegmentInfo) -> bool:
        self._wait()
        return super().store(key, value, info)

    def _wait(self) -> None:
        self.reached.set()
        assert self.gate.wait(30)


@pytest.mark.parametrize("workers", [0, 1, 2, 5])
def test_loads_what_was_stored(workers: int) -> None:
    names = chain(9)
    stack = filled(TierStack([HostTier(1 << 20), DictTier()], SHAPE, workers=workers), names[:7])
    ended: list[Load] = []
    load = stack.load(names, on_done=ended.append)
    assert load.wait(30)
    assert (load.outcome, load.num_loaded, load.num_tokens) == ("missing", 7, 28)
    assert load.tiers == ["host"] * 7
    assert (load.bytes_done, load.bytes_total) == (7 * SEGMENT_BYTES, 9 * SEGMENT_BYTES)
    for name, found in zip(names, load.payloads, strict=False):
        assert np.array_equal(found, payload(name))
        assert not found.flags.writeable
    whole = stack.load(names[2:5])
    assert whole.wait(30)
    assert whole.outcome == "complete"
    assert stack.load([]).wait(30)
    assert stack.close()
    assert ended == [load]


def test_without_tiers_there_is_nothing_and_no_error() -> None:
    stack = TierStack([], SHAPE, workers=0)
    names = chain(2)
    assert stack.store(with_payloads(names)) == 0
    assert stack.lookup([name.hash for name in names]).leading_tiers == ()
    assert stack.load(names).outcome == "missing"
    assert stack.flush()
    assert stack.close()


def test_many_loads_at_once() -> None:
    chains = [chain(8, which) for which in range(12)]
    stack = TierStack([DictTier("host"), DictTier()], SHAPE, workers=3)
    for names in chains:
        filled(stack, names)
    taken: list[dict[int, np.ndarray]] = [{} for _ in chains]

    def into(which: int, index: int, found: np.ndarray) -> None:
        assert index not in taken[which]
        taken[which][index] = found

    loads = [
        stack.load(names, into=lambda index, found, which=which: into(which, index, found))
        for which, names in enumerate(chains)
    ]
    for load, found, names in zip(loads, taken, chains, strict=True):
        assert load.wait(30)
        assert load.outcome == "complete"
        assert all(np.array_equal(found.pop(index), payload(name)) for index, name in enumerate(names))
        assert not found
    assert stack.close()


def test_a_load_has_as_many_segments_under_way_as_there_are_workers() -> None:
    stack = filled(TierStack([DictTier()], SHAPE, workers=3), chain(6))
    meet = threading.Barrier(3)
    load = stack.load(chain(6), into=lambda index, found: meet.wait(30) and None)
    assert load.wait(30)
    assert (load.outcome, load.num_loaded, load.bytes_done) == ("complete", 6, load.bytes_total)
    assert stack.close()


class ManyTier(DictTier):
    """Gives several at once; `fails`: how many such calls do."""

    def __init__(self, fails: int = 0) -> None:
        super().__init__()
        self.fails = fails
        self.asked: list[int] = []

    def load_many(self, keys: Sequence[bytes]) -> list[Any]:
        self.asked.append(len(keys))
        if self.fails:
            self.fails -= 1
            raise OSError("made to fail")
        return list(takewhile(lambda found: found is not None, map(self.load, keys)))


@pytest.fixture
def small_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.tiers.stack._BATCH_BYTES", SMALL_TURN)


@pytest.mark.usefixtures("small_turns")
@pytest.mark.parametrize("fails", [0, 1, 100])
def test_a_tier_that_gives_several_at_once_is_asked_for_them(fails: int) -> None:
    tier, names = ManyTier(fails), chain(40)
    taken: dict[int, np.ndarray] = {}
    stack = filled(TierStack([tier], SHAPE, workers=1), names)
    load = stack.load(names, into=taken.__setitem__)
    assert load.wait(30)
    assert (load.outcome, load.num_loaded, load.bytes_done) == ("complete", 40, load.bytes_total)
    assert all(np.array_equal(taken[index], payload(name)) for index, name in enumerate(names))
    assert max(tier.asked) == 20  # half of what is left
    assert min(tier.asked) == 2  # an eighth of a turn
    [counts] = stack.stats().tiers
    assert (counts.hits, counts.misses, counts.failures) == (40, 0, min(fails, len(tier.asked)))
    assert stack.close()


@pytest.mark.usefixtures("small_turns")
@pytest.mark.parametrize("missing", [0, 1, 5, 13, 39])
@pytest.mark.parametrize("damaged", [False, True])
def test_several_at_once_end_at_the_first_that_is_not_there(missing: int, damaged: bool) -> None:
    tier, names = ManyTier(), chain(40)
    stack = filled(TierStack([tier], SHAPE, workers=2), names)
    key = names[missing].hash
    if damaged:
        tier.values[key] = bytes(len(tier.values[key]))
    else:
        tier.evict(key)
    load = stack.load(names, into=lambda index, found: None)
    assert load.wait(30)
    assert (load.outcome, load.num_loaded) == ("missing", missing)
    [counts] = stack.stats().tiers
    assert counts.damaged == damaged
    assert counts.misses >= 1
    assert stack.close()


@pytest.mark.parametrize("kept", [False, True])
def test_what_lies_behind_a_missing_segment_counts_for_nothing(kept: bool) -> None:
    behind = threading.Event()
    names = chain(5)

    class HolesTier(DictTier):
        def load(self, key: bytes) -> object | None:
            if key == names[4].hash:
                behind.set()
            if key == names[2].hash:
                assert behind.wait(30)
                return None
            return super().load(key)

    stack = filled(TierStack([HolesTier()], SHAPE, workers=2), names)
    taken: list[int] = []
    load = stack.load(names, into=None if kept else lambda index, found: taken.append(index))
    assert load.wait(30)
    assert (load.outcome, load.num_loaded, len(load.tiers)) == ("missing", 2, 2)
    assert len(load.payloads) == (2 if kept else 0)
    assert load.bytes_done == sum(payload(name).nbytes for name in names[:2])
    assert kept or {0, 1, 3} <= set(taken)
    assert stack.close()


def test_lookup_says_where_each_segment_is() -> None:
    host, disk = DictTier("host"), DictTier("disk")
    stack = filled(TierStack([host, disk], SHAPE), chain(6))
    keys = [name.hash for name in chain(6)]
    host.evict(keys[1])
    host.evict(keys[2])
    disk.evict(keys[4])
    host.evict(keys[4])
    ended: list[Lookup] = []
    lookup = stack.lookup(keys, on_done=ended.append)
    assert lookup.wait(30)
    assert lookup.leading_tiers == ("host", "disk", "disk", "host")
    assert lookup.tiers == ("host", "disk", "disk", "host", None, "host")
    assert lookup.num_found == 4
    assert lookup.num_leading == {"host": 1, "disk": 4}
    short = stack.lookup(keys[:1])
    assert short.wait(30)
    assert short.num_leading == {"host": 1}  # the disk was not asked
    every = stack.lookup(keys[:1], every_tier=True)
    assert every.wait(30)
    assert every.num_leading == {"host": 1, "disk": 1}
    assert stack.close()
    assert ended == [lookup]


@pytest.mark.parametrize("promote", [False, True])
def test_what_a_lower_tier_gives_is_promoted(promote: bool) -> None:
    host, disk = DictTier("host"), DictTier("disk")
    stack = filled(TierStack([host, disk], SHAPE, promote=promote), chain(3))
    host.values.clear()
    host.infos.clear()
    load = stack.load(chain(3), cache_priority=2, owner="tenant")
    assert load.wait(30)
    assert load.tiers == ["disk"] * 3
    assert stack.flush(30)
    again = stack.load(chain(3))
    assert again.wait(30)
    assert again.tiers == (["host"] if promote else ["disk"]) * 3
    if promote:
        assert host.infos[chain(3)[1].hash] == chain(3)[1].info(cache_priority=2, owner="tenant")
    assert stack.stats().tiers[0].promoted == (3 if promote else 0)
    assert stack.close()


def test_after_cancel_nothing_is_written_any_more() -> None:
    disk = GatedTier()
    disk.gate.set()
    stack = filled(TierStack([disk], SHAPE), chain(3))
    disk.gate.clear()
    disk.reached.clear()
    taken: list[int] = []
    ended: list[Load] = []
    load = stack.load(chain(3), into=lambda index, found: taken.append(index), on_done=ended.append)
    assert disk.reached.wait(30)
    assert load.cancel()
    assert load.done.is_set()
    assert ended == [load]
    assert not load.cancel()
    disk.gate.set()
    assert stack.close()
    assert taken == []
    assert (load.outcome, load.num_loaded) == ("cancelled", 0)
    assert stack.stats().num_loads_cancelled == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_cancel_waits_for_the_segments_being_written(workers: int) -> None:
    stack = filled(TierStack([DictTier()], SHAPE, workers=workers), chain(3))
    entered, leave = threading.Barrier(workers + 1), threading.Event()
    left: list[int] = []

    def into(index: int, found: np.ndarray) -> None:
        entered.wait(30)
        assert leave.wait(30)
        left.append(index)

    load = stack.load(chain(3), into=into)
    entered.wait(30)
    check_cancel_waits(load, leave)
    assert sorted(left) == list(range(workers))
    assert (load.outcome, load.num_loaded) == ("cancelled", workers)
    assert stack.close()
    assert sorted(left) == list(range(workers))


def test_a_load_may_cancel_itself_and_be_waited_for_nowhere() -> None:
    stack = filled(TierStack([DictTier()], SHAPE, workers=1), chain(4))
    loads: list[Load] = []
    started = threading.Event()

    def into(index: int, found: np.ndarray) -> None:
        assert started.wait(30)
        if index == 1:
            loads[0].cancel()

    loads.append(stack.load(chain(4), into=into))
    started.set()
    assert loads[0].wait(30)
    assert (loads[0].outcome, loads[0].num_loaded) == ("cancelled", 1)
    assert stack.close()


def test_a_callback_that_raises_ends_its_load_alone(caplog: pytest.LogCaptureFixture) -> None:
    stack = filled(TierStack([DictTier()], SHAPE), chain(3))

    def into(index: int, found: np.ndarray) -> None:
        raise RuntimeError("no such block")

    def on_done(load: Load) -> None:
        raise RuntimeError("nor this")

    load = stack.load(chain(3), into=into, on_done=on_done)
    assert load.wait(30)
    assert load.outcome == "failed"
    assert isinstance(load.error, RuntimeError)
    good = stack.load(chain(3))
    assert good.wait(30)
    assert good.outcome == "complete"
    assert stack.close()
    assert "no such block" in caplog.text


def test_a_full_queue_drops_and_never_waits() -> None:
    slow, quick = GatedTier("remote"), DictTier("disk")
    names = chain(10)
    stack = TierStack([quick, slow], SHAPE, max_bytes_in_flight=4 * SEGMENT_BYTES)
    num_queued = 0
    for pair in with_payloads(names):
        num_queued += stack.store([pair])
        assert stack._tiers[0].writer.wait(30)
    assert num_queued == 10  # the quick one took them all
    assert slow.reached.wait(30)
    disk, remote = stack.stats().tiers
    assert (disk.stored, disk.dropped) == (10, 0)
    assert (remote.stored, remote.dropped, remote.waiting_bytes) == (0, 6, 4 * SEGMENT_BYTES)
    assert not stack.flush(0.01)
    slow.gate.set()
    assert stack.flush(30)
    assert list(slow.values) == [name.hash for name in names[:4]]
    assert stack.stats().tiers[1].waiting_bytes == 0
    assert stack.close()


def test_what_waits_to_be_stored_is_found_and_loaded() -> None:
    slow, above = GatedTier("remote"), DictTier("disk")
    names = chain(4)
    keys = [name.hash for name in names]
    stack = TierStack([above, slow], SHAPE, max_bytes_in_flight=3 * SEGMENT_BYTES)
    stack.store(with_payloads(names[:3]))
    assert stack._tiers[0].writer.wait(30)
    above.values.clear()
    assert slow.reached.wait(30)
    lookup = stack.lookup(keys[:3])
    assert lookup.wait(30)
    assert lookup.leading_tiers == ("remote",) * 3
    load = stack.load(names[:3])
    assert load.wait(30)
    assert (load.outcome, load.tiers) == ("complete", ["remote"] * 3)
    assert all(
        np.array_equal(found, payload(name)) for name, found in zip(names, load.payloads, strict=False)
    )
    assert not any(found.flags.writeable for found in load.payloads)
    assert stack._tiers[0].writer.wait(30)
    assert list(above.values) == keys[:3]  # promoted
    assert stack.estimate_seconds(SEGMENT_BYTES, "remote") == 0  # nothing was measured
    slow.gate.set()
    assert stack.flush(30)
    assert slow.values == above.values
    assert stack.stats().tiers[1].hits == 3
    assert stack.close()


def test_what_a_tier_refuses_is_gone_when_its_turn_came() -> None:
    slow = GatedTier()
    slow.fault = lambda operation: "nothing" if operation == "store" else None
    stack = TierStack([slow], SHAPE)
    stack.store(with_payloads(chain(2)))
    lookup = stack.lookup([name.hash for name in chain(2)])
    assert lookup.wait(30)
    assert lookup.num_found == 2
    slow.gate.set()
    assert stack.flush(30)
    load = stack.load(chain(2))
    assert load.wait(30)
    assert (load.outcome, load.num_loaded) == ("missing", 0)
    assert stack.close()


def test_what_waits_already_is_not_queued_again() -> None:
    slow = GatedTier()
    stack = TierStack([slow], SHAPE, max_bytes_in_flight=2 * SEGMENT_BYTES)
    (pair,) = with_payloads(chain(1))
    for _ in range(5):
        assert stack.store([pair]) == 1
    assert stack.stats().tiers[0].waiting_bytes == SEGMENT_BYTES
    slow.gate.set()
    assert stack.close()
    assert (stack.stats().tiers[0].stored, stack.stats().tiers[0].dropped) == (1, 0)


def test_a_tier_too_small_for_a_chain_keeps_its_head() -> None:
    names = chain(12)
    value_bytes = 800  # more than one, less than two values
    stack = filled(TierStack([HostTier(5 * value_bytes)], SHAPE, workers=0), names)
    num_kept = stack.lookup([name.hash for name in names]).num_found
    assert num_kept >= 5
    assert stack.stats().tiers[0].segments == num_kept
    assert stack.stats().tiers[0].refused == 12 - num_kept


def test_what_was_refused_once_and_is_kept_later_may_be_continued() -> None:
    answers = iter(["nothing"])
    tier = DictTier("disk", lambda operation: next(answers, None) if operation == "store" else None)
    stack = TierStack([tier], SHAPE, workers=0)
    names = chain(2)
    stack.store(with_payloads(names[:1]))
    assert not tier.values
    stack.store(with_payloads(names))
    assert stack.lookup([name.hash for name in names]).num_found == 2


def test_damage_is_a_miss_counted_and_removed_and_the_next_tier_is_asked() -> None:
    host, disk = DictTier("host"), DictTier("disk")
    names = chain(3)
    stack = filled(TierStack([host, disk], SHAPE, workers=0), names)
    key = names[1].hash
    host.values[key] = host.values[key][:-1] + bytes([host.values[key][-1] ^ 1])
    load = stack.load(names)
    assert (load.outcome, load.tiers) == ("complete", ["host", "disk", "host"])
    assert stack.stats().tiers[0].damaged == 1
    assert host.values[key] == disk.values[key]  # removed, and promoted again
    host.values[key] = disk.values[key] = b"QUIRESEG and nothing else"
    load = stack.load(names)
    assert (load.outcome, load.num_loaded) == ("missing", 1)
    assert key not in host.values
    assert key not in disk.values


def test_another_segments_value_is_refused() -> None:
    tier = DictTier()
    names = chain(2)
    stack = filled(TierStack([tier], SHAPE, workers=0), names)
    tier.values[names[0].hash] = tier.values[names[1].hash]
    assert stack.load(names).num_loaded == 0


def test_a_payload_of_the_wrong_size_is_not_stored(caplog: pytest.LogCaptureFixture) -> None:
    tier = DictTier()
    stack = TierStack([tier], SHAPE, workers=0)
    stack.store([(chain(1)[0], payload(chain(1)[0])[:-1])])
    assert not tier.values
    assert stack.stats().tiers[0].failures == 1
    assert "expected 256 bytes of 4 tokens, got 255" in caplog.text


def test_failures_are_counted_and_each_kind_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    tier = DictTier(fault=raising(errno=errno.ENOSPC, text="no space left\nin the folder", at="store"))
    stack = TierStack([DictTier("host"), tier], SHAPE, workers=0)
    with caplog.at_level(logging.WARNING, "quire"):
        filled(stack, chain(5))
        tier.fault = raising(errno=errno.EACCES, at="store", text="not allowed")
        filled(stack, chain(5, 1))
        tier.fault = raising(at="contains", text="locked")
        stack.lookup([name.hash for name in chain(6)])
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == [
        "disk tier: store failed: no space left in the folder",
        "disk tier: store failed: not allowed",
        "disk tier: contains failed: locked",
    ]
    assert stack.stats().tiers[1].failures == 11
    assert stack.load(chain(5)).outcome == "complete"  # service goes on
    tier.fault = lambda operation: None
    filled(stack, chain(5))
    assert stack.stats().tiers[1].stored == 5


def test_estimates_follow_what_was_measured() -> None:
    clock = Clock()

    class SlowTier(DictTier):
        def load(self, key: bytes) -> memoryview | None:
            clock.now += 0.5
            return super().load(key)

        def contains(self, keys: Sequence[bytes]) -> list[bool]:
            clock.now += 0.25
            return super().contains(keys)

    slow, quick = SlowTier("disk"), DictTier("host")
    stack = TierStack([quick, slow], SHAPE, workers=0, promote=False, clock=clock)
    assert stack.estimate_seconds(1 << 20) == 0
    filled(stack, chain(2))
    quick.values.clear()
    stack.lookup([name.hash for name in chain(2)])
    stack.load(chain(2))
    assert stack.estimate_seconds(10 * SEGMENT_BYTES, "disk") == pytest.approx(0.25 + 5.0)
    assert stack.estimate_seconds(10 * SEGMENT_BYTES) == pytest.approx(0.25 + 5.0)
    assert stack.estimate_seconds(10 * SEGMENT_BYTES, "host") == 0
    assert stack.stats().tiers[1].bytes_per_s == pytest.approx(2 * SEGMENT_BYTES)
    assert stack.stats().tiers[1].latency_s == pytest.approx(0.25)


def test_evict_comes_after_what_was_stored_before() -> None:
    tier = GatedTier()
    stack = TierStack([tier], SHAPE)
    names = chain(3)
    stack.store(with_payloads(names))
    stack.evict([name.hash for name in names[1:]])
    tier.gate.set()
    assert stack.flush(30)
    assert list(tier.values) == [names[0].hash]
    assert stack.close()


def test_close_ends_what_is_under_way_and_stores_what_waits() -> None:
    tier = GatedTier()
    stack = TierStack([tier], SHAPE)
    stack.store(with_payloads(chain(3)))
    load = stack.load(chain(3, 1))  # not of the queue: it hangs in the tier
    assert tier.reached.wait(30)
    threading.Timer(0.05, tier.gate.set).start()
    assert stack.close(30)
    assert load.outcome == "closed"
    assert len(tier.values) == 3
    assert tier.closed
    assert stack.close()
    assert stack.store(with_payloads(chain(1, 1))) == 0
    late = stack.load(chain(1))
    assert (late.outcome, stack.lookup([chain(1)[0].hash]).outcome) == ("closed", "closed")


def test_close_gives_up_on_a_tier_that_hangs_and_says_so() -> None:
    tier = GatedTier()
    stack = TierStack([tier], SHAPE)
    stack.store(with_payloads(chain(3)))
    assert tier.reached.wait(30)
    assert not stack.close(0.05)
    assert stack.stats().tiers[0].dropped == 2
    tier.gate.set()
    for thread in stack._tiers[0].writer._threads:
        thread.join(30)


def test_tiers_of_one_name_are_refused() -> None:
    with pytest.raises(ArgumentError, match="tiers of different names"):
        TierStack([DictTier(), DictTier()], SHAPE)
    with pytest.raises(ArgumentError, match="got -1 and 67108864"):
        TierStack([], SHAPE, workers=-1)


def test_all_tiers_keep_the_contract_s_names() -> None:
    tiers: list[Tier] = [HostTier(1), DictTier()]
    assert [tier.name for tier in tiers] == ["host", "disk"]


def test_behind_a_damaged_value_all_others_that_are_damaged_go_at_once() -> None:
    disk = DictTier("disk")
    names = chain(6)
    stack = filled(TierStack([disk], SHAPE, workers=0), names)
    broken = [names[at].hash for at in (1, 3, 4)]
    for key in broken:
        disk.values[key] = disk.values[key][:-1] + bytes([disk.values[key][-1] ^ 1])
    load = stack.load(names)
    assert (load.outcome, load.num_loaded) == ("missing", 1)
    assert set(disk.values) == {name.hash for name in names} - set(broken)
    assert stack.stats().tiers[0].damaged == 3
    assert stack.stats().tiers[0].misses == 1  # only one was asked for
    filled(stack, names)
    assert stack.load(names).outcome == "complete"


def test_without_damage_nothing_behind_a_miss_is_read() -> None:
    disk = DictTier("disk")
    names = chain(4)
    stack = filled(TierStack([disk], SHAPE, workers=0), names)
    del disk.values[names[1].hash]
    asked: list[bytes] = []
    load = disk.load
    disk.load = lambda key: asked.append(key) or load(key)  # type: ignore[method-assign]
    assert stack.load(names).outcome == "missing"
    assert asked == [names[0].hash, names[1].hash]
