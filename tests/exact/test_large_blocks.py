"""The real engine on a model with one full layer among many windowed layers, whose blocks have several times as many
tokens."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from support.architectures import VOCAB_SIZE, randomize
from support.cache_case import LONG_BACKENDS
from support.engine_run import EngineRun
from support.generate_oracle import generate
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from quire import KVSpec

MAX_TOKENS = 6
_RANDOM = random.Random(4)
_HEAD = [
    _RANDOM.randrange(2, VOCAB_SIZE) for _ in range(37)
]  # one whole node of 32 tokens, and a part of the next
PROMPTS = [[*_HEAD, *(_RANDOM.randrange(2, VOCAB_SIZE) for _ in range(length))] for length in (11, 2)]


@cache
def model() -> PreTrainedModel:
    config = AutoConfig.for_model(
        "gemma3_text",
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=17,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=8,
        max_position_embeddings=256,
        eos_token_id=None,
        pad_token_id=0,
        layer_types=["sliding_attention"] * 16 + ["full_attention"],
    )
    torch.manual_seed(7)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomize(made)
    return made


@pytest.mark.parametrize("backend", LONG_BACKENDS)
def test_tokens_are_those_of_generate(backend: str) -> None:
    spec = KVSpec.from_config(model().config)
    assert [len(group.layers) for group in spec.groups] == [1, 8, 8]
    assert spec.tokens_per_node(4) == 32
    run = EngineRun(
        model(), PROMPTS, MAX_TOKENS, backend=backend, room=1.3, host_cache="1MiB"
    )  # requests wait, and are preempted
    try:
        answers = run.answer()
        again = run.answer(together=True) if backend == "native" else answers
    finally:
        run.llm.close()
    expected = [generate(model(), prompt, MAX_TOKENS) for prompt in PROMPTS]
    assert [answer.token_ids for answer in answers] == [tokens for tokens, _ in expected]
    for answer, (_, logits) in zip(answers, expected, strict=True):
        torch.testing.assert_close(answer.logits, logits, atol=2e-3, rtol=0)
    for answer, same in zip(answers, again, strict=True):
        assert torch.equal(answer.logits, same.logits), "cold, found and loaded: the same bits"
