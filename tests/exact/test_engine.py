"""The engine against `model.generate`: same greedy tokens, logits within 2e-3, under pressure, on both back ends.

Staggered arrivals, chunked prompts, a pool so small that sequences are preempted and cached blocks evicted, blocks
poisoned with NaN; a second round finds what the first left in the cache, in blocks of shuffled order.
"""

from __future__ import annotations

import pytest
import torch
from support.architectures import ALL, CORE
from support.engine_run import Answer, EngineRun
from support.generate_oracle import MAX_TOKENS, PROMPTS, expected


def _check(name: str, backend: str, block_size: int = 4, prefix_caching: bool = True) -> EngineRun:
    if backend == "native":
        pytest.importorskip("quire.attention.native", exc_type=ImportError)
    model, tokens, logits = expected(name)
    run = EngineRun(
        model, PROMPTS, MAX_TOKENS, backend=backend, block_size=block_size, prefix_caching=prefix_caching
    )
    with run.llm:
        rounds = [run.answer(), run.answer()]
        preemptions = run.llm.stats()["num_preemptions"]
    for answers in rounds:
        _compare(answers, tokens, logits)
    if block_size == 4:
        assert preemptions > 0
    if prefix_caching:
        assert sum(answer.num_cached_tokens for answer in rounds[1]) > 0
    return run


def _compare(answers: list[Answer], tokens: list[list[int]], logits: list[torch.Tensor]) -> None:
    assert [answer.token_ids for answer in answers] == tokens
    for answer, want in zip(answers, logits, strict=True):
        torch.testing.assert_close(answer.logits, want, atol=2e-3, rtol=0)


@pytest.mark.parametrize("backend", ["python", "native"])
@pytest.mark.parametrize("name", CORE)
def test_exact(name: str, backend: str) -> None:
    _check(name, backend)


@pytest.mark.ci
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("block_size", [1, 4, 7, 16])
@pytest.mark.parametrize("backend", ["python", "native"])
@pytest.mark.parametrize("name", ALL)
def test_exact_in_every_combination(name: str, backend: str, block_size: int, prefix_caching: bool) -> None:
    _check(name, backend, block_size, prefix_caching)
