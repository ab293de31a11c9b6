"""The engine on the virtual storage: the tokens of `model.generate`, and the bits of the paged storage."""

from __future__ import annotations

import pytest
import torch
from support.architectures import ALL
from support.cache_case import LONG_BACKENDS
from support.engine_run import EngineRun
from support.generate_oracle import MAX_TOKENS, PROMPTS, expected
from support.virtual_run import VirtualRun

from quire import KVSpec
from quire.memory.placement import unsupported_reason

if (_reason := unsupported_reason()) is not None:
    pytest.skip(f"no virtual storage here: {_reason}", allow_module_level=True)

# Windows, chunks, sinks, layers that share KV, keys and values of unequal width, latents; the rest in CI.
SOME = ("deepseek_v3", "gemma2", "gemma3n_text", "gpt2", "gpt_oss", "llama4_text", "mimo_v2_flash", "qwen3")


@pytest.mark.parametrize("backend", LONG_BACKENDS)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SOME else [pytest.mark.ci]) for n in ALL])
def test_exact(name: str, backend: str) -> None:
    model, tokens, logits = expected(name)
    num_groups = len(KVSpec.from_config(model.config).groups)
    for num_blocks in (4 * num_groups, 40 * num_groups):  # with preemptions, and with room
        run = VirtualRun(model, PROMPTS, MAX_TOKENS, backend=backend, num_blocks=num_blocks)
        try:
            answers = run.answer()
            run.storage.check()
        finally:
            run.close()
        assert [answer.token_ids for answer in answers] == tokens
        for answer, want in zip(answers, logits, strict=True):
            torch.testing.assert_close(answer.logits, want, atol=2e-3, rtol=0)


@pytest.mark.parametrize("name", ["deepseek_v3", "gemma2", "qwen3"])
def test_the_bits_of_the_paged_storage(name: str) -> None:
    pytest.importorskip("quire._native")
    model, _, _ = expected(name)
    num_groups = len(KVSpec.from_config(model.config).groups)
    virtual = VirtualRun(model, PROMPTS, MAX_TOKENS, backend="native", num_blocks=9 * num_groups)
    try:
        ours = virtual.answer()
    finally:
        virtual.close()
    paged = EngineRun(model, PROMPTS, MAX_TOKENS, backend="native", room=3.0)
    with paged.llm:
        theirs = paged.answer()
    for one, other in zip(ours, theirs, strict=True):
        assert one.token_ids == other.token_ids
        assert torch.equal(one.logits, other.logits)
