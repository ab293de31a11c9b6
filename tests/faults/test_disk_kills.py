"""kill -9 of processes that write: what they had acknowledged is there, and nothing torn is served."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.disk_kills import Kills


@pytest.mark.parametrize(
    "rounds", [5, pytest.param(100, marks=pytest.mark.ci)], ids=["10 kills", "200 kills"]
)
def test_nothing_acknowledged_is_lost_and_nothing_torn_is_served(tmp_path: Path, rounds: int) -> None:
    kills = Kills(tmp_path / "cache")
    while kills.rounds < rounds:
        kills.round()
    assert kills.num_loaded > 10 * rounds
    assert len(kills.acknowledged) > 2 * rounds
