"""Modules that compute from codes: same objects, refused if they do not fit, proved and served like others."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from support.cache_case import BACKENDS
from support.quantized_case import random_weight
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from quire import LLM, SamplingParams
from quire.errors import ArgumentError
from quire.model.fingerprint import fingerprint
from quire.model.prepare import PreparedModel
from quire.model.prove.model_probe import run_probe_steps
from quire.model.weight_sizes import measured_weights, planned_weights
from quire.spec.weight_formats import parse_weights
from quire.weights.codes import Factor, QuantizedPanels, QuantizedWeight, multiply
from quire.weights.linear import pack_linears
from quire.weights.load import load
from quire.weights.quantized_modules import (
    bytes_by_format,
    install_quantized,
    planned_forms,
    quantize_model,
    quantized_weights,
)

KIND = "int5:32 with super-blocks and minimums"


def test_a_linear_computes_from_codes() -> None:
    weight, linear = random_weight(KIND, 24, 256), nn.Linear(256, 24, dtype=torch.bfloat16)
    install_quantized(linear, weight, torch.bfloat16)
    x = torch.randn(3, 256, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(linear(x), multiply(x, weight, linear.bias))
    assert torch.equal(linear.weight, weight.dequantize().to(torch.bfloat16))
    assert not linear.weight.requires_grad
    assert type(pickle.loads(pickle.dumps(linear))) is nn.Linear


def test_a_weight_on_meta_is_never_made() -> None:
    with torch.device("meta"):
        linear = nn.Linear(256, 24, bias=False)
    weight = random_weight("int4:128", 24, 256)
    install_quantized(linear, weight, torch.float32)
    assert linear.weight.device.type == "cpu"
    assert linear.__dict__["_lazy_weight"].dense is None
    x = torch.randn(2, 256)
    with torch.no_grad():
        assert torch.equal(linear(x), multiply(x, weight))


def test_a_tied_weight_is_held_once_and_gives_rows() -> None:
    head, embedding = nn.Linear(64, 50, bias=False), nn.Embedding(50, 64)
    weight = random_weight("int8", 50, 64)
    install_quantized([head, embedding], weight, torch.float32)
    assert head.weight is embedding.weight
    ids = torch.tensor([[3, 49], [0, 3]])
    assert torch.equal(embedding(ids), weight.dequantize()[ids])
    assert list(quantized_weights(nn.ModuleList([head, embedding]))) == ["0"]
    with pytest.raises(IndexError, match=r"expected ids in \[0, 50\)"):
        embedding(torch.tensor([50]))


def test_a_transposed_one() -> None:
    layer, weight = Conv1D(24, 64), random_weight("int4:64 with zeros", 24, 64)
    install_quantized(layer, weight, torch.float32)
    assert torch.equal(layer.weight, weight.dequantize().t())
    x = torch.randn(2, 64)
    with torch.no_grad():
        assert torch.equal(layer(x), multiply(x, weight, layer.bias))


def test_who_writes_makes_it_dense() -> None:
    linear = nn.Linear(64, 8, bias=False)
    install_quantized(linear, random_weight("int8", 8, 64), torch.float32)
    with torch.no_grad():
        linear.weight.mul_(2)
        x = torch.randn(3, 64)
        assert torch.equal(linear(x), nn.functional.linear(x, linear.weight))
    assert not quantized_weights(linear)


@pytest.mark.parametrize(
    ("module", "kind", "said"),
    [
        (nn.Linear(64, 9), "int8", "expected a weight of 9 outputs and 64 inputs, got 8 and 64"),
        (nn.LayerNorm(64), "int8", "got LayerNorm"),
        (nn.Embedding(8, 64, max_norm=1.0), "int8", "a plain nn.Embedding"),
    ],
)
def test_what_does_not_fit_is_refused(module: Any, kind: str, said: str) -> None:
    before = module.weight
    with pytest.raises(ArgumentError, match=said):
        install_quantized(module, random_weight(kind, 8, 64), torch.float32)
    assert module.weight is before


def test_a_group_without_panels_is_refused() -> None:
    codes = torch.zeros(4, 96, dtype=torch.uint8)
    odd = QuantizedWeight(codes, 4, 48, Factor(torch.ones(4, 2)), "odd:48")
    with pytest.raises(ArgumentError, match="odd:48: expected a scale for each 16 inputs"):
        QuantizedPanels(odd, torch.float32)


def tiny(tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_a_model_is_rounded_by_pattern() -> None:
    model = tiny()
    released: list[int] = []
    quantize_model(
        model,
        parse_weights({"*.mlp.*": "int4:32", "*.q_proj": "bf16", "*": "int8"}),
        lambda weight: released.append(weight.numel()),
    )
    labels = {name: packed.label for name, packed in quantized_weights(model).items()}
    assert labels["model.layers.0.mlp.down_proj"] == "int4:32"
    assert labels["model.layers.1.self_attn.k_proj"] == "int8"
    assert labels["model.embed_tokens"] == "int8"
    assert "model.layers.0.self_attn.q_proj" not in labels
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert len(released) == len(labels)
    assert set(bytes_by_format(model)) == {"int8", "int4:32", "float32"}
    plain, rounded = fingerprint(tiny()), fingerprint(model)
    assert plain["behaviour"] != rounded["behaviour"]


def test_head_and_embeddings_may_stay() -> None:
    model = tiny(tied=False)
    quantize_model(model, parse_weights("int4", head="bf16"))
    assert "lm_head" not in quantized_weights(model)
    assert "model.embed_tokens" not in quantized_weights(model)


def test_a_pattern_that_fits_nothing_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"model.layers.0.self_attn.q_proj.*got 'mlp' - in `weights`"):
        quantize_model(tiny(), parse_weights({"mlp": "int4", "*": "int8"}))


def test_packing_leaves_it_alone() -> None:
    model = tiny()
    quantize_model(model, parse_weights({"*.mlp.*": "int4"}))
    before = quantized_weights(model)
    undo = pack_linears(model)
    assert quantized_weights(model) == before
    undo()
    assert quantized_weights(model) == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_served(backend: str, tmp_path: Any) -> None:
    tiny().save_pretrained(tmp_path)
    asked = [[1, 2, 3, 4, 5, 6, 7], [9, 8, 7]]
    options: dict[str, Any] = {"weights": "int8", "backend": backend, "kv_memory": "1MiB"}
    params = SamplingParams(max_tokens=4, temperature=0)
    with LLM(str(tmp_path), **options) as llm:
        together = [output.outputs[0].token_ids for output in llm.generate(asked, params)]
        alone = [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt in asked]
        assert "weights int8" in llm.capacity
        assert llm.stats()["weight_bytes"]["int8"] > 0
    assert together == alone


def test_a_plan_knows_what_it_weighs() -> None:
    model, formats = tiny(tied=False), parse_weights({"*.mlp.*": "int4:32", "*.q_proj": "bf16", "*": "int8"})
    with torch.device("meta"):
        unloaded = tiny(tied=False)
    planned = planned_weights(unloaded, form_of=planned_forms(unloaded, formats).get)
    quantize_model(model, formats)
    undo = pack_linears(model)
    held = measured_weights(model)
    undo()
    assert sum(row.num_bytes for row in planned) == sum(row.num_bytes for row in held)


def decode(weights: Any, tmp_path: Any) -> tuple[bool, torch.Tensor]:
    """Whether the whole decoder is fused, and the probe's logits."""
    loaded = load(str(tmp_path), dtype="bfloat16", weights=parse_weights(weights))
    prepared = PreparedModel(loaded, backend="native")
    try:
        return prepared.decoder is not None, run_probe_steps(prepared)
    finally:
        prepared.restore()


@pytest.mark.skipif("native" not in BACKENDS, reason="the kernels are not built here")
def test_fused_layers_take_codes(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny().save_pretrained(tmp_path)
    is_fused, logits = decode("int4:32", tmp_path)
    assert is_fused
    monkeypatch.setattr("quire.model.fused.structure.native_weight", lambda module: None)
    is_fused, by_modules = decode("int4:32", tmp_path)
    assert not is_fused
    assert (logits - by_modules).norm() <= 0.02 * by_modules.norm()


@pytest.mark.skipif("native" not in BACKENDS, reason="the kernels are not built here")
def test_codes_beside_dense_weights_are_not_fused(tmp_path: Any) -> None:
    tiny().save_pretrained(tmp_path)
    assert not decode({"*.q_proj": "bf16", "*": "int8"}, tmp_path)[0]


def test_a_loaded_model_is_not_rounded() -> None:
    with pytest.raises(ArgumentError, match=r"expected a checkpoint, .* - in `weights`"):
        LLM((tiny(), None), weights="int8")
