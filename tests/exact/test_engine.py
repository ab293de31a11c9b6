"""The engine against `model.generate`: same greedy tokens, logits within 2e-3, on both back ends.

Staggered arrivals, chunked prompts, blocks poisoned with NaN and handed out in shuffled order; once with a pool so
small that sequences are preempted and cached blocks evicted, once with room for prompts that begin alike to share.
"""

from __future__ import annotations

import pytest
import torch
from support.architectures import ALL, CORE
from support.engine_run import EngineRun
from support.generate_oracle import MAX_TOKENS, PROMPTS, expected

from quire import KVSpec


def _check(name: str, backend: str, block_size: int = 4) -> None:
    if backend == "native":
        pytest.importorskip("quire._native")
    model, tokens, logits = expected(name)
    spec = KVSpec.from_config(model.config)
    tight = 1.0 if any(group.retention.kind == "full" for group in spec.groups) else 2.0  # windows never grow
    for room in (tight, 8.0):
        run = EngineRun(model, PROMPTS, MAX_TOKENS, backend=backend, room=room, block_size=block_size)
        with run.llm:
            answers = run.answer()
            stats = run.llm.stats()
        assert [answer.token_ids for answer in answers] == tokens
        for answer, want in zip(answers, logits, strict=True):
            torch.testing.assert_close(answer.logits, want, atol=2e-3, rtol=0)
        if room == tight:
            # At other sizes some requests wait in turn for a pool this small.
            assert stats["num_preemptions"] > 0 or block_size != 4
        else:
            assert sum(answer.num_cached_tokens for answer in answers) > 0


@pytest.mark.parametrize("backend", ["python", "native"])
@pytest.mark.parametrize("name", CORE)
def test_exact(name: str, backend: str) -> None:
    _check(name, backend)


@pytest.mark.ci
@pytest.mark.parametrize("block_size", [1, 4, 7, 16])
@pytest.mark.parametrize("backend", ["python", "native"])
@pytest.mark.parametrize("name", ALL)
def test_exact_at_every_block_size(name: str, backend: str, block_size: int) -> None:
    _check(name, backend, block_size)
