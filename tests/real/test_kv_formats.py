"""The cost of formats of K and V on a real text: perplexity against 16 bits, token by token (docs/kv-formats.md)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import exp, sqrt
from pathlib import Path

import pytest
import torch
from support.real_text import MEETINGS, library_text, meeting_text, tokens_of
from support.scorer import paged_logprobs, windows

from quire.errors import ArgumentError
from quire.model import PreparedModel
from quire.model.key_offsets import measure_key_offsets
from quire.spec.kv_dtype import with_kv_dtype
from quire.weights import load

NUM_TOKENS = int(os.environ.get("QUIRE_PERPLEXITY_TOKENS", "3072"))
BY_LAYER = bool(os.environ.get("QUIRE_PERPLEXITY_BY_LAYER"))
# Of the perplexity, beside twice the standard error; int4 is told alone.
WITHIN = {"int8": 0.001, "k8v4": 0.01, "int4": 10.0}


def test_perplexity_of_formats(checkpoint: Path) -> None:
    loaded = load(checkpoint, dtype="bfloat16")
    text = meeting_text() if MEETINGS.exists() else library_text()
    tokens = tokens_of(loaded.tokenizer, text, NUM_TOKENS)
    prepared = PreparedModel(loaded)
    try:
        exact = _logprobs(prepared, tokens, "auto")
        print(f"\n16 bits: perplexity {exp(-exact.mean()):.3f} of {len(tokens)} tokens, windows of 2 048")
        for kv_dtype, bound in WITHIN.items():
            found = _logprobs(prepared, tokens, kv_dtype)
            losses = exact - found
            change, error = float(losses.mean()), float(losses.std()) / sqrt(losses.numel())
            print(
                f"{kv_dtype}: perplexity {exp(-found.mean()):.3f}, {change:+.2%} with a standard error of {error:.2%}; "
                f"offsets in {len(prepared.key_offsets)} layers"
            )
            assert abs(change) <= bound + 2 * error, kv_dtype
    finally:
        prepared.restore()


@pytest.mark.skipif(not BY_LAYER, reason="QUIRE_PERPLEXITY_BY_LAYER=1 asks for it: minutes")
def test_layers_that_stay_in_int8(checkpoint: Path) -> None:
    """Prints what int4 costs with the layers in int8 to which it does most harm, one layer more at a time."""
    loaded = load(checkpoint, dtype="bfloat16")
    text = meeting_text() if MEETINGS.exists() else library_text()
    tokens = tokens_of(loaded.tokenizer, text, NUM_TOKENS)
    few = tokens[: min(NUM_TOKENS, 1025)]
    prepared = PreparedModel(loaded)
    try:
        exact = _logprobs(prepared, few, "auto").mean()
        harm = {
            number: float(exact - _logprobs(prepared, few, {"default": "int8", number: "int4"}).mean())
            for number, layer in enumerate(prepared.spec.layers)
            if layer.stores_kv
        }
        worst = sorted(harm, key=harm.__getitem__, reverse=True)
        print("\nint4 in one layer alone:", ", ".join(f"{number} {harm[number]:+.2%}" for number in worst))
        exact = _logprobs(prepared, tokens, "auto")
        for count in sorted({*range(min(5, len(worst))), len(worst) // 2, len(worst)}):
            kept = sorted(worst[:count])
            losses = exact - _logprobs(prepared, tokens, {"default": "int4"} | dict.fromkeys(kept, "int8"))
            error = float(losses.std()) / sqrt(losses.numel())
            print(f"int8 in layers {kept}: {float(losses.mean()):+.2%} with a standard error of {error:.2%}")
    finally:
        prepared.restore()


def _logprobs(
    prepared: PreparedModel, tokens: list[int], kv_dtype: str | Mapping[str | int, str]
) -> torch.Tensor:
    """float64 [tokens - 1], with K and V in `kv_dtype`."""
    try:
        spec = with_kv_dtype(prepared.spec, kv_dtype)
    except ArgumentError as error:
        pytest.skip(str(error))
    prepared.key_offsets, left_out = {}, frozenset[int]()
    if spec.in_model_dtype is not spec:
        prepared.key_offsets, left_out = measure_key_offsets(prepared, spec)
    score = paged_logprobs(prepared, with_kv_dtype(prepared.spec, kv_dtype, exclude=left_out))
    return torch.cat([score(window, first) for window, first in windows(tokens)]).double()
