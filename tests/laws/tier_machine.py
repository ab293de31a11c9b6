"""A stack of three tiers under faults, against a model of what it may give: the machine of `test_tier_laws`."""

from __future__ import annotations

import errno
from functools import partial

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.fake_redis import FAULTS, FakeRedis
from support.tiers_case import SHAPE, SMALL_TURN, Clock, InPlaceTier, chain, payload, with_payloads

from quire.tiers.host import HostTier
from quire.tiers.remote.redis_store import RedisStore
from quire.tiers.remote.remote_tier import RemoteTier
from quire.tiers.stack import TierStack
from quire.tiers.tier import TierError

NUM_CHAINS, LENGTH = 3, 4
CHAINS = [chain(LENGTH, first) for first in range(NUM_CHAINS)]
EXPECTED = {name.hash: payload(name) for names in CHAINS for name in names}
TIMEOUT = 1.0
HOST_BYTES = 3200  # some four segments
DICT_FAULTS = ("raise", "bug", "nothing", "garbage", "cut", "other", "flip")


class TierMachine(RuleBasedStateMachine):
    """Everything inline (workers=0), on a clock of its own; a fault hits every n-th call of one kind until `heal`."""

    @initialize(names=st.sets(st.sampled_from(["host", "disk", "remote"]), min_size=1), promote=st.booleans())
    def start(self, names: set[str], promote: bool) -> None:
        self.clock = Clock()
        # (kind of call, every so many of them, what happens), and how many there were
        self.disk_fault: tuple[str, int, str] | None = None
        self.remote_fault: tuple[str, int, str] | None = None
        self.num_calls = 0
        self.disk = InPlaceTier(fault=self._disk_call)
        self.server = FakeRedis(self.clock, self._remote_call)
        remote = RemoteTier(
            "redis://nowhere",
            timeout=TIMEOUT,
            clock=self.clock,
            make_store=partial(RedisStore, connect=self.server.connect),
            probe_in_background=False,
        )
        every = {"host": HostTier(HOST_BYTES), "disk": self.disk, "remote": remote}
        self.stack = TierStack(
            [tier for name, tier in every.items() if name in names],
            SHAPE,
            workers=0,
            promote=promote,
            clock=self.clock,
            wall_clock=self.clock,
        )
        self.stack._batch_bytes = min(self.stack._batch_bytes, SMALL_TURN)
        self.names = names
        self.stored: set[bytes] = set()  # at any time
        self.sure: set[bytes] = set()  # in the dict tier, whole
        self.doubtful: set[bytes] = (
            set()
        )  # perhaps refused by it: then what continues them is not even offered
        self.disturbed = False  # a fault has hit the dict tier during this call

    def _due(self, fault: tuple[str, int, str] | None, call: str) -> str | None:
        if fault is None or fault[0] != call:
            return None
        self.num_calls += 1
        return None if self.num_calls % fault[1] else fault[2]

    def _disk_call(self, operation: str) -> str | None:
        kind = self._due(self.disk_fault, operation)
        if kind is not None:
            self.disturbed = True
        if kind == "raise":
            raise TierError("no space left") from OSError(errno.ENOSPC, "No space left on device")
        if kind == "bug":
            raise KeyError("a bug of the tier")
        return kind

    def _remote_call(self, call: str) -> str | None:
        return self._due(self.remote_fault, call)

    def _begin(self) -> None:
        self.disturbed = False
        self.began = self.clock.now

    def _end(self) -> None:
        # A trial that succeeds and the call after it that fails: once more than the time-out of one call.
        assert self.clock.now - self.began <= 2 * TIMEOUT

    @rule(
        which=st.integers(0, NUM_CHAINS - 1), first=st.integers(0, LENGTH - 1), count=st.integers(1, LENGTH)
    )
    def store(self, which: int, first: int, count: int) -> None:
        names = CHAINS[which][first : first + count]
        # Kept while the disk lied: what is there is only refreshed, until a load finds it damaged and removes it.
        damaged = set(self.disk.values) - self.sure
        self._begin()
        assert self.stack.store(with_payloads(names), cache_priority=which % 3) == len(names)
        self._end()
        keys = {name.hash for name in names}
        self.stored |= keys
        if self.disturbed:
            self.sure -= keys
            self.doubtful |= keys
        elif first and CHAINS[which][first - 1].hash in self.doubtful:
            self.doubtful |= keys
        elif "disk" in self.names:
            self.sure |= keys - damaged
            self.doubtful -= keys
        assert self.stack.flush(0)

    @rule(
        which=st.integers(0, NUM_CHAINS - 1),
        first=st.integers(0, LENGTH - 1),
        way=st.sampled_from(["kept", "into", "in place", "in place"]),
    )
    def load(self, which: int, first: int, way: str) -> None:
        names = CHAINS[which][first:]
        taken = [np.full_like(EXPECTED[name.hash], 255) for name in names]
        ended = []

        def into(index: int, segment: np.ndarray) -> None:
            taken[index][:] = segment

        def places(index: int) -> list[np.ndarray] | None:
            return None if index == 2 else np.array_split(taken[index], 3)

        self._begin()
        load = self.stack.load(
            names,
            into=None if way == "kept" else into,
            places=places if way == "in place" else None,
            on_done=ended.append,
        )
        self._end()
        assert ended == [load]
        assert load.done.is_set()
        segments = load.payloads if way == "kept" else taken[: load.num_loaded]
        assert len(segments) == load.num_loaded == len(load.tiers)
        assert load.bytes_done == sum(segment.nbytes for segment in segments)
        for name, segment in zip(names, segments, strict=False):
            assert name.hash in self.stored
            assert np.array_equal(segment, EXPECTED[name.hash])
        assert load.outcome == ("complete" if load.num_loaded == len(names) else "missing")
        if self.disturbed:
            self.sure -= {name.hash for name in names}
        else:
            if load.outcome == "missing":  # what was refused is gone
                assert names[load.num_loaded].hash not in self.disk.values
            surely = next((i for i, name in enumerate(names) if name.hash not in self.sure), len(names))
            assert load.num_loaded >= surely

    @rule(which=st.integers(0, NUM_CHAINS - 1), every=st.booleans())
    def lookup(self, which: int, every: bool) -> None:
        names = CHAINS[which]
        self._begin()
        lookup = self.stack.lookup([name.hash for name in names], every_tier=every)
        self._end()
        assert lookup.outcome == "complete"
        assert set(lookup.leading_tiers) <= self.names
        if not self.disturbed and self.remote_fault is None:
            assert all(name.hash in self.stored for name in names[: lookup.num_found])
            surely = next((i for i, name in enumerate(names) if name.hash not in self.sure), len(names))
            assert lookup.num_found >= surely
        if every:
            assert set(lookup.num_leading) == self.names

    @rule(which=st.integers(0, NUM_CHAINS - 1), first=st.integers(0, LENGTH - 1))
    def evict(self, which: int, first: int) -> None:
        keys = [name.hash for name in CHAINS[which][first:]]
        self._begin()
        self.stack.evict(keys)
        self._end()
        self.sure -= set(keys)
        if not self.disturbed and self.names == {"host", "disk"}:
            assert self.stack.load(CHAINS[which][first:]).num_loaded == 0

    @rule(
        operation=st.sampled_from(["contains", "load", "store", "evict", "locate", "read_now", "confirm"]),
        period=st.integers(1, 3),
        kind=st.sampled_from([*DICT_FAULTS, *["cut"] * 3]),
    )
    def break_disk(self, operation: str, period: int, kind: str) -> None:
        self.disk_fault = (operation, period, kind)

    @rule(
        call=st.sampled_from(["connect", "send", "receive"]),
        period=st.integers(1, 5),
        kind=st.sampled_from([*FAULTS, *["hang"] * 6]),
    )
    def break_remote(self, call: str, period: int, kind: str) -> None:
        self.remote_fault = (call, period, kind)

    @rule(seconds=st.sampled_from([0.1, 1.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(which=st.integers(0, NUM_CHAINS - 1))
    def heal(self, which: int) -> None:
        """After the longest pause, without faults, a remote tier keeps and gives again."""
        self.disk_fault = self.remote_fault = None
        self.clock.now += 100
        if "remote" not in self.names:
            return
        self.stack.evict([name.hash for name in CHAINS[which]])  # a fault may have spoilt what is there
        self.stack.store(with_payloads(CHAINS[which]))
        keys = {name.hash for name in CHAINS[which]}
        self.stored |= keys
        if "disk" in self.names:
            self.sure |= keys
        assert self.stack.load(CHAINS[which]).outcome == "complete"

    @invariant()
    def counts_are_right(self) -> None:
        for tier in self.stack.stats().tiers:
            if tier.name == "host":
                assert 0 <= tier.bytes <= HOST_BYTES
            assert tier.waiting_bytes == 0
            assert tier.dropped == 0
        assert self.stack.stats().num_loads_running == 0

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            self.disk_fault = self.remote_fault = None
            assert self.stack.close(0)
