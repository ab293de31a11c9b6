"""The recipe of a format: one file that registers it, and it works from the spec to the disk tier."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import tiny

from quire import LLM, SamplingParams
from quire.errors import ArgumentError
from quire.spec import KVSpec
from quire.spec.kv_formats import KVFormat, register, unregister

PROMPT = [(7 * i) % 60 + 2 for i in range(400)]
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def copy() -> Iterator[KVFormat]:
    """Registered for these tests alone: others say which formats there are."""
    from recipes.format_copy import COPY

    register(COPY)
    yield COPY
    unregister(COPY.name)


def test_a_name_is_taken_once(copy: KVFormat) -> None:
    register(copy)  # the same again is nothing new
    with pytest.raises(ArgumentError, match="expected a new name for a format, got 'bfloat16-copy'"):
        register(KVFormat(copy.name, "float16", 2))


def test_the_spec_counts_it(copy: KVFormat) -> None:
    shape: dict[str, int] = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8}
    assert KVSpec.uniform(**shape, dtype=copy.name).bytes_per_token == KVSpec.uniform(**shape).bytes_per_token


@pytest.mark.parametrize("backend", ["python", "native"])
@pytest.mark.parametrize("storage", ["paged", "virtual"])
def test_it_serves_the_tokens_of_the_original_and_is_kept_by_a_tier(
    storage: str, backend: str, tmp_path: Path, copy: KVFormat
) -> None:
    if backend == "native":
        pytest.importorskip("quire._native")
    model = tiny("qwen3").to(torch.bfloat16)
    answers = []
    for number, dtype in enumerate(["auto", copy.name, copy.name]):
        options: dict[str, Any] = {"disk_cache": tmp_path / ("copy" if number else "original")}
        if storage == "virtual":
            options["max_model_len"] = 512
        with LLM(
            (model, None), dtype=dtype, storage=storage, backend=backend, kv_memory="8MiB", **options
        ) as llm:
            [answer] = llm.generate([PROMPT], PARAMS)
            assert llm._opened.storage.dtype is torch.bfloat16
            answers.append((answer.outputs[0].token_ids, answer.num_cached_tokens))
    original, first, from_disk = answers
    assert original[0] == first[0] == from_disk[0]
    assert original[1] == first[1] == 0
    # A block of virtual storage is longer than this prompt.
    assert from_disk[1] > 0 or storage == "virtual"
