"""The example engine runs, stays an example in size, and its answers do not depend on sharing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "engine_loop.py"


def test_the_example_engine(backend: str) -> None:
    environment = {**os.environ, "QUIRE_BACKEND": backend}
    result = subprocess.run(
        [sys.executable, EXAMPLE], capture_output=True, text=True, check=True, env=environment
    )
    assert "the same tokens each time: True" in result.stdout
    assert "preempted" in result.stdout
    assert "14 of its 15 tokens are cached" in result.stdout
    assert len(EXAMPLE.read_text().splitlines()) < 80
