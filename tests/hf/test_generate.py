"""`model.generate` on QuireCache against DynamicCache, token for token, in every mode."""

from __future__ import annotations

import pytest
import torch
from support.architectures import ALL
from support.cache_argument import CACHE
from support.hf_case import MODES, OTHERS, STORAGES, as_lists, expected, model_of, modes_of, quire_cache
from transformers import DynamicCache, TextIteratorStreamer, pipeline

from quire.weights import load

# Full, sliding, chunked, shared and latent layers, sinks, soft caps, states beside and within attention layers.
QUICK = (
    "llama", "mistral", "qwen3", "gemma2", "gemma3_text", "gemma3n_text", "gpt2", "gpt_oss", "llama4_text",
    "mimo_v2_flash",
    *OTHERS,
)  # fmt: skip


@pytest.mark.parametrize("name", QUICK)
def test_every_mode_on_virtual_memory(name: str) -> None:
    """Every other mode of a model, the others of the next; all of each below."""
    _check(name, "virtual", slice(QUICK.index(name) % 2, None, 2))


@pytest.mark.parametrize("storage", STORAGES[1:])
@pytest.mark.parametrize("name", ["gemma3_text", "mimo_v2_flash"])
def test_every_mode_on_plain_memory(name: str, storage: str) -> None:
    _check(name, storage)


@pytest.mark.ci
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", [*ALL, *OTHERS])
def test_every_architecture_on_every_memory(name: str, storage: str) -> None:
    _check(name, storage)


def _check(name: str, storage: str, modes: slice = slice(None)) -> None:
    model = model_of(name)
    for mode in modes_of(name)[modes]:
        got = as_lists(MODES[mode](model, lambda: quire_cache(model, storage)))
        assert got == expected(name, mode), mode


@pytest.mark.parametrize("mode", MODES)
def test_the_twin_can_differ(mode: str) -> None:
    """Tokens depend on early ones: a cache that loses the past, or mixes rows, could not answer the same."""
    answers = expected("llama", mode)
    assert len({token for answer in answers for row in answer for token in row[21:]}) >= 4


def test_iteration_and_length_are_those_of_a_dynamic_cache() -> None:
    model = model_of("gemma3_text")
    ids = torch.randint(3, 131, (2, 17))
    ours, theirs = quire_cache(model), DynamicCache(config=model.config)
    for cache in (ours, theirs):
        model.generate(ids, **{CACHE: cache}, max_new_tokens=5, do_sample=False)
    assert len(ours) == len(theirs) == 3
    assert ours.get_seq_length() == theirs.get_seq_length()
    assert ours.is_sliding == theirs.is_sliding
    for (k, v, window), (k_twin, v_twin, window_twin) in zip(ours, theirs, strict=True):
        assert torch.equal(k, k_twin)
        assert torch.equal(v, v_twin)
        assert (window is None) == (window_twin is None)


def test_streaming_and_pipeline_on_the_embedded_model() -> None:
    loaded = load()
    model, tokenizer = loaded.model, loaded.tokenizer
    inputs = tokenizer("Once upon a time", return_tensors="pt")
    texts = []
    for cache in (quire_cache(model), DynamicCache(config=model.config)):
        streamer = TextIteratorStreamer(tokenizer)
        tokens = model.generate(
            **inputs, **{CACHE: cache}, streamer=streamer, max_new_tokens=8, do_sample=False
        )
        texts.append("".join(streamer))
        assert texts[-1].strip() == tokenizer.decode(tokens[0]).strip()
    assert texts[0] == texts[1]
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
    answers = [
        generate("Once upon a time", **{CACHE: cache}, max_new_tokens=8, do_sample=False)
        for cache in (quire_cache(model), DynamicCache(config=model.config))
    ]
    assert answers[0] == answers[1]
