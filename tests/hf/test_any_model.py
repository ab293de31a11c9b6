"""A QuireCache under models of every kind: right tokens or a clear error, and the models that `accelerate` leaves
alone."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.architectures import tiny
from support.cache_argument import CACHE
from support.every_type import build, tiny_config
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    EncoderDecoderCache,
)

from quire.errors import ArgumentError
from quire.hf import QuireCache, accelerate, restore, unbound

IDS = torch.randint(3, 131, (3, 21), generator=torch.Generator().manual_seed(11))


def _generate(model: Any, cache: Any = None, num_new: int = 9, **inputs: Any) -> list[list[int]]:
    options = {} if cache is None else {CACHE: cache}
    inputs = inputs or {"inputs": IDS, "attention_mask": torch.ones_like(IDS)}
    return model.generate(
        **inputs, max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False, pad_token_id=0, **options
    ).tolist()


@pytest.mark.parametrize("model_type", ["gpt_neox_japanese", "gptj", "xglm", "bloom", "gpt_neo"])
@pytest.mark.parametrize("num_beams", [1, 2])
def test_attention_that_asks_for_dense_keys_has_them_in_batches(model_type: str, num_beams: int) -> None:
    model: Any = build(
        AutoModelForCausalLM, model_type, **({"rotary_dim": 8} if model_type == "gptj" else {})
    )
    model.generation_config.num_beams = num_beams
    want = _generate(model)
    assert _generate(model, QuireCache(model.config, max_length=128)) == want


@pytest.mark.parametrize(
    ("model_type", "auto_class"),
    [
        ("t5", AutoModelForSeq2SeqLM),
        ("bart", AutoModelForSeq2SeqLM),
        ("marian", AutoModelForSeq2SeqLM),
        ("whisper", AutoModelForSpeechSeq2Seq),
    ],
)
def test_an_encoder_decoder_has_two_caches(model_type: str, auto_class: Any) -> None:
    model = build(auto_class, model_type, decoder_start_token_id=2)
    inputs: dict[str, Any] = {"input_ids": IDS}
    if model_type == "whisper":
        inputs = {"input_features": torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(1))}
    want = _generate(model, **inputs)

    def one() -> QuireCache:
        return QuireCache(model.config, max_length=128)

    assert _generate(model, EncoderDecoderCache(one(), one()), **inputs) == want
    if model_type == "whisper":  # which makes the pair itself
        assert _generate(model, one(), **inputs) == want
        return
    bare = one()
    with pytest.raises(
        ArgumentError, match=r"pass EncoderDecoderCache\(QuireCache\(model\.config\), QuireCache"
    ):
        _generate(model, bare, **inputs)
    assert bare.get_seq_length() == 0


def test_keys_and_values_of_different_widths_at_the_default_piece_size() -> None:
    pytest.importorskip("quire._native")
    model: Any = build(
        AutoModelForCausalLM,
        "mimo_v2_flash",
        head_dim=192,
        v_head_dim=128,
        layer_types=["full_attention"] * 2,
    )
    want = _generate(model, num_new=60)
    for accelerated in (False, True):
        if accelerated:
            assert accelerate(model).level == "whole"
        cache = QuireCache(model.config)  # every default
        assert _generate(model, cache, 60) == want
        rows = [rows for layer in cache.row_layers for rows in layer.rows]
        assert len({one.row_tokens for one in rows}) == 1
        assert len({one.token_bytes for one in rows}) == 2
        assert _generate(model, cache.fork(), 3, inputs=torch.tensor(want))[0][:81] == want[0]
    restore(model)


@pytest.mark.parametrize(
    "name", ["gemma2", "gemma3_text", "vaultgemma", "nanochat", "cohere2", "gpt2", "opt", "granite"]
)
def test_accelerate_leaves_the_signature_and_the_rows_of_logits_alone(name: str) -> None:
    """Models that cap their logits compute an operator of their own: their forward is a replaced one."""
    pytest.importorskip("quire._native")
    model: Any = tiny(name)
    signatures = [inspect.signature(method) for method in (model.forward, model.generate)]
    keeps = model._supports_logits_to_keep()
    assert keeps
    asked: list[int] = []
    accelerate(model)
    for prepared in (True, False):
        assert [inspect.signature(method) for method in (model.forward, model.generate)] == signatures
        assert model._supports_logits_to_keep() is keeps
        hook = model.register_forward_hook(lambda _, __, output: asked.append(output.logits[..., 0].numel()))
        _generate(model, QuireCache(model.config, max_length=64), 3)
        hook.remove()
        assert set(asked) == {len(IDS)}, f"{'accelerated' if prepared else 'restored'}: {asked}"
        restore(model)


def test_every_module_keeps_its_signature() -> None:
    pytest.importorskip("quire._native")
    model: Any = tiny("gemma2")
    before = {name: inspect.signature(module.forward) for name, module in model.named_modules()}
    accelerate(model)
    after = {name: inspect.signature(module.forward) for name, module in model.named_modules()}
    assert {name for name in before if not _takes(before[name], after[name])} == set()
    restore(model)


def _takes(before: inspect.Signature, after: inspect.Signature) -> bool:
    return list(before.parameters) == list(after.parameters)


@pytest.mark.parametrize("model_type", ["paligemma", "gemma"])
def test_attention_to_later_tokens_stays_the_models_own_under_accelerate(model_type: str) -> None:
    if model_type == "paligemma":
        model: Any = build(AutoModelForImageTextToText, model_type)
    else:
        model = build(AutoModelForCausalLM, model_type, use_bidirectional_attention=True)
    want = _generate(model)
    done = accelerate(model)
    assert done.level == "linears"
    pytest.importorskip("quire._native")
    assert "is_causal=False" in (done.reason or "")
    assert _generate(model, QuireCache(model.config.get_text_config(), max_length=64)) == want
    restore(model)


def test_layers_for_an_image_stay_the_models_own_under_accelerate() -> None:
    model: Any = build(AutoModelForImageTextToText, "mllama")
    want = _generate(model)
    done = accelerate(model)
    assert done.level == "linears"
    pytest.importorskip("quire._native")
    assert "layers that attend to an image alone" in (done.reason or "")
    assert _generate(model, QuireCache(model.config.get_text_config(), max_length=64)) == want
    restore(model)


def _indexed() -> Any:
    return tiny_config("deepseek_v32", num_key_value_heads=4)


def test_an_image_s_tiles_go_through_packed_layers() -> None:
    """Whose five dimensions are two more than a text's."""
    vision = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_global_layers": 1,
        "attention_heads": 2, "vision_output_dim": 64, "image_size": 28,
        "intermediate_layers_indices": [1], "max_num_tiles": 4,
    }  # fmt: skip
    model: Any = build(AutoModelForImageTextToText, "mllama", vision_config=vision)
    ones = torch.ones(1, 1, 4, dtype=torch.int64)
    inputs = {
        "input_ids": IDS[:1], "pixel_values": torch.randn(1, 1, 4, 3, 28, 28), "aspect_ratio_mask": ones,
        "aspect_ratio_ids": ones[..., 0], "cross_attention_mask": ones[:, None].expand(1, IDS.shape[1], 1, 4),
    }  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_gate"):  # which lets nothing of an image in as it is made
                parameter.fill_(0.5)
        want = model(**inputs).logits
        accelerate(model)
        torch.testing.assert_close(model(**inputs).logits, want, rtol=1e-4, atol=1e-4)
    restore(model)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (_indexed, r"deepseek_v32: kv_memory does not bind .*an indexer's keys, .* \(layers 0 to 1\)"),
        (lambda: tiny_config("deepseek_v4"), r"deepseek_v4: .*the data of DeepseekV4\w+"),
    ],
)
def test_layers_that_kv_memory_does_not_bind_are_named_once(
    config: Callable[[], Any], said: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unbound, "_warned", set())
    made = config()
    with caplog.at_level(logging.WARNING, "quire"):
        QuireCache(made)
        QuireCache(made)
        for bound in ("llama", "mamba", "qwen3_next", "falcon_h1"):
            QuireCache(tiny_config(bound))
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert re.search(said, messages[0])
