"""The disk tier under random use by two processes, and under faults at every n-th call."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from laws.disk_machine import DiskMachine
from support.at_length import at_length
from support.faulty_files import FaultyFiles
from support.tier_values import value

from quire.errors import QuireError
from quire.tiers.disk.disk_tier import DiskTier


@pytest.mark.parametrize(
    ("examples", "steps"),
    [(40, 40), pytest.param(at_length(400), 80, marks=pytest.mark.ci)],
    ids=["short", "at length"],
)
def test_laws(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        DiskMachine,
        settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None, derandomize=True),
    )


@pytest.mark.parametrize(
    "error",
    [errno.ENOSPC, *(pytest.param(error, marks=pytest.mark.ci) for error in (errno.EIO, errno.EACCES))],
)
def test_every_single_fault_is_one_line_and_loses_nothing_acknowledged(tmp_path: Path, error: int) -> None:
    """The n-th call of a short life fails, for every n until none does."""
    values = [value(seed, 100 * (seed + 1)) for seed in range(2)]
    n = 0
    while True:
        n += 1
        folder = tmp_path / str(n)
        files = FaultyFiles()
        kept, refusals = [], list[str]()
        files.arm(n, error)
        try:
            tier = DiskTier(folder, 16 << 20, files=files, timeout_s=0.2)
        except QuireError as refusal:
            refusals.append(str(refusal))
        else:
            for one in [*values, values[0]]:
                if files.num_failed:
                    files.arm(0)
                try:
                    if tier.store(one.key, one.parts, one.info):
                        kept.append(one)
                    assert tier.load(one.key) == one.whole
                except QuireError as refusal:
                    refusals.append(str(refusal))
            tier.close()
        assert not any("\n" in refusal for refusal in refusals)
        files.arm(0)
        tier = DiskTier(folder, 16 << 20)
        tier.check()
        for one in kept:
            assert tier.load(one.key) == one.whole
        tier.close()
        if not files.num_failed:
            assert n > 40
            return
