"""Two disk tiers on one folder against a dict, while every n-th call to the system or to SQLite fails."""

from __future__ import annotations

import errno
import shutil
import tempfile
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.faulty_files import FaultyFiles
from support.tier_values import Value, chain

from quire.errors import QuireError
from quire.tiers.disk.disk_tier import DiskTier
from quire.tiers.tier import TierError

CAP = 16 << 20
# Little enough that nothing is evicted but by `prune`: 40 values of 4 to 60 KiB.
VALUES: list[Value] = [one for seed in range(10) for one in chain(seed, 4, 4 + 6 * seed)]
WHICH = st.integers(0, 1)
ONE = st.sampled_from(VALUES)


class DiskMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.files = FaultyFiles()
        self.there: set[bytes] = set()  # surely
        self.unsure: set[bytes] = set()  # a call that would have changed it failed
        self.tiers = [self.open(), self.open()]

    def open(self) -> DiskTier:
        return DiskTier(self.folder, CAP, files=self.files, timeout_s=0.3)

    def teardown(self) -> None:
        self.files.arm(0)
        for tier in self.tiers:
            tier.close()
        shutil.rmtree(self.folder)

    @rule(
        every=st.integers(1, 40),
        error=st.sampled_from([errno.EIO, errno.ENOSPC, errno.ESTALE, errno.EACCES]),
        part=st.sampled_from([1 << 30, 10_000]),
    )
    def arm(self, every: int, error: int, part: int) -> None:
        self.files.arm(every, error, part=part)

    @precondition(lambda self: self.files.every)
    @rule()
    def disarm(self) -> None:
        self.files.arm(0)

    @rule(which=WHICH, one=ONE)
    def store(self, which: int, one: Value) -> None:
        failed = self.files.num_failed
        try:
            kept = self.tiers[which].store(one.key, one.parts, one.info)
        except TierError as error:
            self.is_one_line(error)
            assert self.files.num_failed > failed
            if one.key not in self.there:
                self.unsure.add(one.key)
            return
        if kept:
            self.there.add(one.key)
            self.unsure.discard(one.key)
        else:  # the disk had no room for a first slab
            assert self.files.num_failed > failed

    @rule(which=WHICH, one=ONE)
    def load(self, which: int, one: Value) -> None:
        failed = self.files.num_failed
        try:
            value = self.tiers[which].load(one.key)
        except TierError as error:
            self.is_one_line(error)
            assert self.files.num_failed > failed
            return
        if value is None:
            assert one.key not in self.there
        else:
            assert value == one.whole  # nothing else, ever
            assert one.key in self.there | self.unsure

    @rule(which=WHICH, one=ONE)
    def evict(self, which: int, one: Value) -> None:
        try:
            removed = self.tiers[which].evict(one.key)
        except TierError as error:
            self.is_one_line(error)
            if one.key in self.there:
                self.there.discard(one.key)
                self.unsure.add(one.key)
            return
        assert removed or one.key not in self.there
        assert not removed or one.key in self.there | self.unsure
        self.there.discard(one.key)
        self.unsure.discard(one.key)

    @rule(which=WHICH)
    def contains(self, which: int) -> None:
        try:
            found = self.tiers[which].contains([one.key for one in VALUES])
        except TierError as error:
            return self.is_one_line(error)
        for one, is_there in zip(VALUES, found, strict=True):
            assert is_there or one.key not in self.there
            assert not is_there or one.key in self.there | self.unsure

    @rule(which=WHICH, mebibytes=st.integers(4, 8))
    def prune(self, which: int, mebibytes: int) -> None:
        """Some go; which, the tier says afterwards, and that must be so in both."""
        try:
            self.tiers[which].prune(mebibytes << 20)
        except TierError as error:
            self.is_one_line(error)
        self.unsure |= self.there
        self.there = set()

    @rule(which=WHICH)
    def reopen(self, which: int) -> None:
        self.tiers[which].close()
        try:
            self.tiers[which] = self.open()
        except QuireError as error:
            self.is_one_line(error)
            self.files.arm(0)
            self.tiers[which] = self.open()

    @invariant()
    def holds(self) -> None:
        armed, self.files.every = self.files.every, 0
        self.tiers[0].check()
        keys = {entry.key for entry in self.tiers[1].entries()}
        assert self.there <= keys <= self.there | self.unsure
        num_bytes = sum(path.stat().st_size for path in self.folder.iterdir())
        assert num_bytes <= CAP
        self.files.every = armed

    def is_one_line(self, error: QuireError) -> None:
        assert "\n" not in str(error)
        assert str(self.folder) in str(error)
