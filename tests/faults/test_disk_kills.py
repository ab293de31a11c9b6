"""kill -9 of writing processes: acknowledged values are kept, and no torn value is served."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support import unfinished_commit
from support.disk_kills import Kills
from support.tier_values import SHAPE, value

from quire.tiers.disk.disk_tier import DiskTier
from quire.tiers.segment import decode


@pytest.mark.parametrize("rounds", [5, pytest.param(50, marks=pytest.mark.ci)], ids=["10 kills", "100 kills"])
def test_nothing_acknowledged_is_lost_and_nothing_torn_is_served(tmp_path: Path, rounds: int) -> None:
    kills = Kills(tmp_path / "cache")
    while kills.rounds < rounds:
        kills.round()
    assert kills.num_loaded > 10 * rounds
    assert len(kills.acknowledged) > 2 * rounds


def test_a_commit_that_a_killed_process_has_not_told_does_not_come_back_over_what_was_written_since(
    tmp_path: Path,
) -> None:
    def start(where: str) -> subprocess.Popen[str]:
        command = [sys.executable, unfinished_commit.__file__, where, str(tmp_path / "cache")]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    other = start("before")
    assert other.stdout is not None
    assert other.stdout.readline() == "ready\n"
    killed = start("within")
    killed.communicate()
    other.communicate("\n")
    assert killed.returncode == other.returncode == unfinished_commit.DEATH

    tier = DiskTier(tmp_path / "cache", unfinished_commit.CAP)
    tier.check()
    one = value(0, 8)
    assert [entry.key for entry in tier.entries()] == [one.key]
    loaded = tier.load(one.key)
    assert loaded is not None
    decode(loaded, key=one.key, tokens=one.tokens, start=one.start, layout=SHAPE)
    tier.close()
