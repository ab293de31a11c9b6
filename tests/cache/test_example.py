"""The example engine runs, ends for any prompts and stays small; its answers do not depend on sharing."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "engine_loop.py"


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("engine_loop", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_engine(backend: str) -> None:
    environment = {**os.environ, "QUIRE_BACKEND": backend}
    result = subprocess.run(
        [sys.executable, EXAMPLE], capture_output=True, text=True, check=True, env=environment, timeout=60
    )
    assert "the same tokens each time: True" in result.stdout
    assert "preempted" in result.stdout
    assert "14 of its 15 tokens are cached" in result.stdout
    assert len(EXAMPLE.read_text().splitlines()) <= 110


@pytest.mark.timeout(60)
@pytest.mark.parametrize("seed", range(20))
def test_it_ends_for_any_prompts(
    example: Any, backend: str, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Few tokens or many kinds, so that beginnings are shared or not; the answers are those of each alone."""
    monkeypatch.setenv("QUIRE_BACKEND", backend)
    rng = np.random.default_rng(seed)
    max_tokens = int(rng.integers(1, 12))
    longest = example.NUM_BLOCKS * example.BLOCK - max_tokens
    prompts = [
        rng.integers(0, (2, example.VOCAB)[seed % 2], int(rng.integers(1, longest + 1))).tolist()
        for _ in range(int(rng.integers(1, 9)))
    ]

    def answers(cache: Any, some: list[list[int]]) -> list[list[int]]:
        return example.generate(cache, some, max_tokens, log=lambda line: None)

    together = answers(example.new_cache(prefix_caching=bool(seed % 3)), prompts)
    assert together == [answers(example.new_cache(), [prompt])[0] for prompt in prompts]


def test_a_prompt_that_never_fits_is_refused(example: Any) -> None:
    with pytest.raises(ValueError, match="never fit"):
        example.generate(example.new_cache(), [[0] * 48], 1)
