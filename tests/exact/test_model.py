"""PreparedModel against `model.generate`: same greedy tokens, logits within 2e-3, for every architecture."""

from __future__ import annotations

import pytest
import torch
from support.architectures import ALL, CORE
from support.generate_oracle import MAX_TOKENS, PROMPTS, expected, generate
from support.hand_loop import Loop

from quire.model import PreparedModel
from quire.weights import load


@pytest.mark.parametrize("name", [name for name in ALL if name not in CORE])
def test_tokens_and_logits_are_those_of_generate(name: str) -> None:
    """With the best back end there is; `test_engine` proves the others, on both."""
    _check(name, None)


@pytest.mark.ci
@pytest.mark.parametrize("backend", ["python", "native"])
@pytest.mark.parametrize("name", ALL)
def test_both_back_ends_of_every_architecture(name: str, backend: str) -> None:
    if backend == "native":
        pytest.importorskip("quire._native")
    _check(name, backend)


def _check(name: str, backend: str | None) -> None:
    model, tokens, logits = expected(name)
    prepared = PreparedModel(load((model, None)), backend=backend)
    loop = Loop(prepared, PROMPTS, preempt_at=8)
    got_tokens, got_logits = loop.run(MAX_TOKENS)
    prepared.restore()
    if all(layer.span.kind == "full" for layer in prepared.spec.layers):
        assert loop.num_shared > 0
    assert got_tokens == tokens
    for got, want in zip(got_logits, logits, strict=True):
        torch.testing.assert_close(got, want, atol=2e-3, rtol=0)


@pytest.mark.parametrize("name", ALL)
def test_the_oracle_can_fail(name: str) -> None:
    """Greedy tokens vary, and depend on early tokens: a broken cache could not answer the same."""
    model, tokens, _ = expected(name)
    assert len({token for answer in tokens for token in answer}) >= 8
    assert sum(len(set(answer)) > 2 for answer in tokens) >= 5
    prompt = PROMPTS[5]
    changed = generate(model, [*prompt[:2], (prompt[2] + 50) % 100 + 2, *prompt[3:]])[0]
    assert changed != tokens[5]
