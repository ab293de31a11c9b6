"""Mirror rings under the real engine: prompts and answers of many windows, chunks, samples, preemptions."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from support.architectures import VOCAB_SIZE, tiny
from support.cache_case import LONG_BACKENDS
from support.engine_run import EngineRun
from support.generate_oracle import generate
from support.virtual_run import VirtualRun
from transformers import PreTrainedModel

from quire import KVSpec
from quire.memory.placement import unsupported_reason
from quire.memory.virtual.window_ring import WindowRing

if (_reason := unsupported_reason()) is not None:
    pytest.skip(f"no virtual storage here: {_reason}", allow_module_level=True)

MAX_TOKENS = 60
# Windows are 8 tokens, blocks of 4 KiB 32: rings are 64 tokens, and the longest sequence goes round four times.
_RANDOM = random.Random(3)
PROMPTS = [[_RANDOM.randrange(2, VOCAB_SIZE) for _ in range(length)] for length in (190, 3, 70, 130)]


@cache
def expected(name: str) -> tuple[PreTrainedModel, list[list[int]], list[torch.Tensor]]:
    model = tiny(name)
    answers = [generate(model, prompt, MAX_TOKENS) for prompt in PROMPTS]
    return model, [tokens for tokens, _ in answers], [logits for _, logits in answers]


def ring_run(model: PreTrainedModel, num_blocks: int, backend: str) -> VirtualRun:
    run = VirtualRun(
        model,
        PROMPTS,
        MAX_TOKENS,
        backend=backend,
        num_blocks=num_blocks,
        prefix_caching=False,
        step_tokens=11,
    )
    rings = [isinstance(places, WindowRing) for places in run.storage._places]
    kinds = [group.span.kind for group in KVSpec.from_config(model.config).groups]
    assert rings == [kind == "window" for kind in kinds]
    assert any(rings)
    return run


@pytest.mark.parametrize("backend", LONG_BACKENDS)
@pytest.mark.parametrize("name", ["gemma2", "mistral", "gpt_oss"])
def test_tokens_are_those_of_generate(name: str, backend: str) -> None:
    model, tokens, logits = expected(name)
    num_groups = len(KVSpec.from_config(model.config).groups)
    for num_blocks in (5 + 5 * num_groups, 40 * num_groups):  # few: requests wait and are preempted
        run = ring_run(model, num_blocks, backend)
        try:
            answers = run.answer()
            run.storage.check()
        finally:
            run.close()
        assert [answer.token_ids for answer in answers] == tokens
        for answer, want in zip(answers, logits, strict=True):
            torch.testing.assert_close(answer.logits, want, atol=2e-3, rtol=0)


@pytest.mark.parametrize("name", ["gemma2", "mistral"])
def test_bits_are_those_of_the_paged_storage(name: str) -> None:
    pytest.importorskip("quire._native")
    model, _, _ = expected(name)
    run = ring_run(model, 12 * len(KVSpec.from_config(model.config).groups), "native")
    try:
        ours = run.answer()
    finally:
        run.close()
    paged = EngineRun(model, PROMPTS, MAX_TOKENS, backend="native", room=3.0, prefix_caching=False)
    with paged.llm:
        theirs = paged.answer()
    for one, other in zip(ours, theirs, strict=True):
        assert one.token_ids == other.token_ids
        assert torch.equal(one.logits, other.logits)
