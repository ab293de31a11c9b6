"""K and V in codes: within a format a request has the same bits cold, as a hit of every length, chunked, swapped,
restored from a tier and with other requests (docs/kv-formats.md)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import tiny
from support.engine_run import Answer, EngineRun
from transformers import PreTrainedModel

pytest.importorskip("quire._native")

BLOCK, MAX_TOKENS = 8, 4
BASE = [(7 * i) % 60 + 2 for i in range(460)]
# Every length of 1 to 2 blocks, each a fork of the one before inside a block; a long one, and a fork of it.
PROMPTS = [*(BASE[:n] for n in range(1, 2 * BLOCK + 1)), BASE, [*BASE[:40], 3, 5]]
BY_LAYER = "k8v4,first:1=int4"
MODELS = [
    ("qwen3", torch.bfloat16, "int8"),
    ("qwen3", torch.bfloat16, BY_LAYER),
    pytest.param("qwen3", torch.float32, "int8", marks=pytest.mark.ci),
    pytest.param("qwen3", torch.float32, BY_LAYER, marks=pytest.mark.ci),
    pytest.param("gemma3_text", torch.bfloat16, "int8", marks=pytest.mark.ci),  # windows
    pytest.param("gemma3_text", torch.bfloat16, "int4,window=bf16", marks=pytest.mark.ci),
]
USUAL = "qwen3", torch.bfloat16, "int8"
OTHER = "qwen3", torch.bfloat16, BY_LAYER


@cache
def _model(name: str, dtype: torch.dtype) -> PreTrainedModel:
    return tiny(name).to(dtype=dtype)


def _run(
    name: str, dtype: torch.dtype, kv_dtype: str, prompts: list[list[int]], **options: Any
) -> list[Answer]:
    together, max_tokens = options.pop("together", False), options.pop("max_tokens", MAX_TOKENS)
    given = {"room": 20.0, "block_size": BLOCK, "kv_dtype": kv_dtype, "backend": "native", **options}
    least_preempted = given.pop("least_preempted", 0)
    run = EngineRun(_model(name, dtype), prompts, max_tokens, **given)
    try:
        answers = run.answer(together=together)
        assert run.llm.monitor.stats()["num_preemptions"] >= least_preempted
        return answers
    finally:
        run.llm.close()


@cache
def _alone(name: str, dtype: torch.dtype, kv_dtype: str) -> list[Answer]:
    """In one piece, nothing cached, one at a time."""
    return _run(name, dtype, kv_dtype, PROMPTS, prefix_caching=False, max_num_seqs=1, max_batch_tokens=2048)


def _assert_same(got: list[Answer], want: list[Answer]) -> None:
    for number, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        assert ours.token_ids == theirs.token_ids, number
        assert torch.equal(ours.logits, theirs.logits), number
        assert not ours.logits.isnan().any(), number


@pytest.mark.parametrize(("name", "dtype", "kv_dtype"), MODELS)
def test_found_at_every_length_chunked_and_in_company(name: str, dtype: torch.dtype, kv_dtype: str) -> None:
    got = _run(name, dtype, kv_dtype, PROMPTS * 2, max_batch_tokens=11)
    assert any(answer.num_cached_tokens % BLOCK for answer in got)
    _assert_same(got, _alone(name, dtype, kv_dtype) * 2)


@pytest.mark.parametrize(
    "which", [USUAL, pytest.param(OTHER, marks=pytest.mark.ci)], ids=lambda which: which[2]
)
@pytest.mark.parametrize("preemption", ["swap", pytest.param("recompute", marks=pytest.mark.ci)])
def test_swapped_out_and_in_or_recomputed(preemption: str, which: tuple[str, torch.dtype, str]) -> None:
    prompts = [BASE[start : start + 20] for start in range(4)]
    options = {"preemption": preemption, "room": 2.1, "together": True, "least_preempted": 1}
    got = _run(*which, prompts, max_batch_tokens=64, max_tokens=40, **options)
    want = _run(*which, prompts, max_tokens=40, prefix_caching=False, max_num_seqs=1, max_batch_tokens=2048)
    _assert_same(got, want)


@pytest.mark.ci
@pytest.mark.parametrize("which", [USUAL, OTHER], ids=lambda which: which[2])
def test_restored_from_a_tier(tmp_path: Path, which: tuple[str, torch.dtype, str]) -> None:
    options = {"disk_cache": tmp_path, "cache_write": "through"}
    _assert_same(_run(*which, PROMPTS, **options), _alone(*which))
    restored = _run(*which, PROMPTS, **options)
    assert restored[2 * BLOCK].num_cached_tokens >= len(BASE) - BLOCK
    _assert_same(restored, _alone(*which))
