"""A quantized checkpoint computed from its codes has the same likelihood of a real text as its dense form."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.real_text import library_text, tokens_of
from support.scorer import model_logprobs, paged_logprobs, perplexity

from quire.model import PreparedModel
from quire.weights import load
from quire.weights.quantized_modules import quantized_weights

NUM_TOKENS = 1024
WITHIN = 5e-4  # of the perplexity of transformers with the widened weights


def test_perplexity_from_codes(checkpoint: Path) -> None:
    """In float32: bfloat16's rounding of activations alone moves it by some 0.1 % either way."""
    loaded = load(checkpoint, dtype="float32")
    if not quantized_weights(loaded.model):
        pytest.skip("a checkpoint without codes")
    tokens = tokens_of(loaded.tokenizer, library_text(), NUM_TOKENS)
    own = perplexity(tokens, model_logprobs(load(checkpoint, dtype="float32", is_dense=True).model))
    prepared = PreparedModel(loaded)
    try:
        found = perplexity(tokens, paged_logprobs(prepared))
    finally:
        prepared.restore()
    print(f"perplexity of {NUM_TOKENS} tokens: {own:.5f} of transformers, widened, {found:.5f} from codes")
    assert abs(found / own - 1) < WITHIN, (own, found)
