"""The recipe of a storage: one file that registers it, and an engine keeps K and V there, with hits, swap and tiers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.architectures import tiny

from quire import LLM, SamplingParams
from quire.engine.open_storage import register, unregister
from quire.errors import ArgumentError

PROMPTS = [[(7 * i + j) % 60 + 2 for i in range(60 + 9 * j)] for j in range(4)]
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def name() -> Iterator[str]:
    """Registered for these tests alone: others say which storages there are."""
    from recipes.tensor_per_layer import NAME, make

    register(NAME, make, shares_blocks=True)  # the same again after the import: nothing new
    yield NAME
    unregister(NAME)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text"])
@pytest.mark.parametrize("backend", ["python", "native"])
def test_the_tokens_of_paged(backend: str, architecture: str, tmp_path: Path, name: str) -> None:
    """Twice the same prompts, in a pool that is too small for all at once, and once more after a restart."""
    if backend == "native":
        pytest.importorskip("quire._native")
    model, answers = tiny(architecture), {}
    for storage in ("paged", name):
        options: dict[str, Any] = {"storage": storage, "block_size": 4, "preemption": "swap"}
        found = answers[storage] = []
        for _ in range(2):
            with LLM(
                (model, None),
                backend=backend,
                kv_memory="128KiB",
                max_model_len=128,
                swap_memory="1MiB",
                disk_cache=tmp_path / storage,
                **options,
            ) as llm:
                for _ in range(2):
                    found.append([answer.outputs[0].token_ids for answer in llm.generate(PROMPTS, PARAMS)])
    assert answers["paged"] == answers[name]
    assert all(found == answers[name][0] for found in answers[name])


def test_a_name_is_taken_once_and_gone_when_unregistered(name: str) -> None:
    from recipes.tensor_per_layer import make

    for taken in (name, "paged", "auto"):
        with pytest.raises(ArgumentError, match=f"expected a new name for a storage, got .{taken}."):
            register(taken, lambda *_: None, shares_blocks=True)  # type: ignore[arg-type, return-value]
    with pytest.raises(ArgumentError, match="expected a new name for a storage"):
        register(name, make, shares_blocks=False)
    unregister(name)
    for gone in (name, "paged"):
        with pytest.raises(ArgumentError, match=rf"storage that was registered, one of \[\], got '{gone}'"):
            unregister(gone)
    with pytest.raises(ArgumentError, match="expected paged, contiguous, growing, virtual or auto, got"):
        LLM(storage=name)
    register(name, make, shares_blocks=True)
