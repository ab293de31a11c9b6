"""Requests of every kind over the embedded model's KV shape: no block is lost, and decisions depend only on the seed.

`scripts/soak requests` runs 100 000 of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support import request_soak

_CHECKED = ("forked", "cancelled", "pinned", "published", "ended")


def test_everything_is_accounted_for_and_decided_alike_under_a_seed(tmp_path: Path) -> None:
    first, second = (
        request_soak.run(tmp_path / str(number), 100, seed=3, threads=False) for number in range(2)
    )
    assert first == second
    other = request_soak.run(tmp_path / "other", 100, seed=4, threads=False)
    assert other["digest"] != first["digest"]
    assert first["num_preemptions"] > 0
    assert first["num_loaded_tokens"] > 0
    assert first["disk"]["stored"] > 0


@pytest.mark.ci
def test_a_longer_one_with_threads_and_a_server(tmp_path: Path) -> None:
    figures = request_soak.soak(tmp_path, 2500, 5, 1500)
    assert all(figures[name] > 0 for name in _CHECKED), figures
    assert figures["num_swapped"] > 0
    assert figures["num_loaded_tokens"] > 0
