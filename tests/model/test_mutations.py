"""F1 and F2: with one wrong constant in fused blocks, no block with it serves.

Weights have the statistics of real ones, the working type is bfloat16 (the constant is decided in float32) or float32.
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache

import pytest
import torch
from support.realistic import realistic

from quire.errors import UnsupportedModelError
from quire.model import PreparedModel
from quire.weights import load
from quire.weights.experts import PackedExperts

pytest.importorskip("quire._native")
from support.mutations import MUTATIONS

# One architecture for each constant, and another type for some: what the default suite asks.
_ONE = {
    "norm never counted from 1": ("gemma3_text",),
    "norm always counted from 1": ("qwen3",),
    "norm counted otherwise in 16 bits": ("gemma3_text", "llama"),
    "mean taken off": ("llama",),
    "epsilon x 100": ("gemma2", "qwen3"),
    "scale 3 % off": ("granite",),
    "cap dropped": ("gemma2",),
    "cap 1 % off": ("gemma2",),
    "window one longer": ("gemma3_text", "mistral"),
    "window one shorter": ("qwen2",),
    "sinks dropped": ("gpt_oss",),
    "rotary base x 1.01": ("llama",),
    "rotary table of the decoder": ("qwen3",),
    "another activation": ("gemma3_text", "starcoder2"),
    "biases dropped": ("qwen2",),
    "biases of the MLP dropped": ("starcoder2",),
    "residual x 1.01": ("granite", "llama"),
    "two norms exchanged": ("gemma2", "qwen3"),
    "a norm left out": ("glm4",),
    "router's weights renormalised": ("qwen3_moe",),
    "router's products 1 % off": ("qwen3_moe",),
    "embedding scaled otherwise": ("gemma",),
}
_FUSED = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "glm4", "granite", "mistral", "olmo2", "olmo3",
          "phi3", "smollm3", "stablelm", "starcoder2", "exaone4", "vaultgemma", "cohere2", "gpt_oss", "qwen3_moe",
          "gpt2", "phi")  # fmt: skip
_TYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def serving(name: str, dtype: torch.dtype) -> dict[str, int]:
    """How many modules of each kind are fused; "windowed" and "turned" attention apart, packed experts
    too; "decoder" and "replaced" (operators made row-invariant) 0 or 1."""
    model = realistic(name, dtype)
    try:
        prepared = PreparedModel(load((model, None)), backend="native")
    except UnsupportedModelError as error:  # refused: nothing serves
        if not re.search("logits of its own forward|to compute the same", str(error)):
            raise
        return defaultdict(int)
    assert prepared.fused is not None
    counts = dict(prepared.fused.counts)
    parts = [part for part in map(prepared.fused.part_of, model.modules()) if hasattr(part, "options")]
    counts["windowed"] = sum(part.options.window > 0 for part in parts)  # type: ignore[union-attr]
    counts["turned"] = sum(part.rotation != "none" for part in parts)  # type: ignore[union-attr]
    counts["decoder"] = int(prepared.decoder is not None)
    counts["experts"] = sum(isinstance(module, PackedExperts) for module in model.modules())
    counts["replaced"] = 1
    prepared.restore()
    return counts


serving_as_it_is = cache(serving)  # of what no mutation has changed


def check(mutation: str, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = MUTATIONS[mutation]
    if serving_as_it_is(name, dtype)[changed.kind] == 0:
        pytest.skip(f"{name} has no fused {changed.kind}")
    changed.apply(monkeypatch)
    assert serving(name, dtype)[changed.kind] == 0


@pytest.mark.parametrize(("mutation", "name"), [(m, name) for m, names in _ONE.items() for name in names])
def test_a_wrong_constant_does_not_serve(mutation: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MUTATIONS[mutation].concerns(realistic(name))
    assert serving(name, torch.bfloat16)[MUTATIONS[mutation].kind], "without it all of them serve"
    MUTATIONS[mutation].apply(monkeypatch)
    assert serving(name, torch.bfloat16)[MUTATIONS[mutation].kind] == 0


@pytest.mark.ci
@pytest.mark.parametrize("dtype", _TYPES)
@pytest.mark.parametrize("name", _FUSED)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_every_constant_on_every_architecture(
    mutation: str, name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not MUTATIONS[mutation].concerns(realistic(name, _TYPES[dtype])):
        pytest.skip(f"{name} has no such constant")
    check(mutation, name, _TYPES[dtype], monkeypatch)


def test_every_mutation_is_asked() -> None:
    assert set(_ONE) == set(MUTATIONS)
