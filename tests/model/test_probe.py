"""Models that do not run exactly are refused, with their type and the reason; none gives a wrong answer."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from support.generate_oracle import MAX_TOKENS, generate
from support.hand_loop import Loop
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from quire.errors import UnsupportedModelError
from quire.model import PreparedModel
from quire.model.paged_cache import PagedCache
from quire.weights import load

_TINY: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                         "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 97}  # fmt: skip
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 97}


def _model(model_type: str, **fields: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.2)
    return model


@pytest.mark.parametrize(
    ("model_type", "fields", "reason"),
    [
        ("gpt_neo", {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 97,
                     "attention_types": [[["global", "local"], 1]]}, "do not call"),
        ("falcon", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97,
                    "alibi": True}, "falcon"),
        ("doge", _TINY, "attends with a mask"),
        ("diffllama", _TINY, "K and V are altered"),
        ("jetmoe", {**_TINY, "kv_channels": 8, "num_experts_per_tok": 2, "num_local_experts": 4},
         "K and V are altered"),
        ("deepseek_v32", {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 97,
                          "num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1},
         "1, layer 0 first, that select tokens by an indexer"),
        ("rwkv", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 97}, "keeps its past as state"),
    ],
)  # fmt: skip
def test_refused_with_type_and_reason(model_type: str, fields: dict[str, Any], reason: str) -> None:
    model = _model(model_type, **fields)
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        PreparedModel(load((model, None)), backend="python")
    assert f"model type {model_type}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("model_type", ["gptj", "codegen"])
def test_exact_where_its_attention_calls_the_interface_and_refused_where_not(model_type: str) -> None:
    """transformers gave these two the interface in 5.24."""
    model = _model(model_type, **_GPT, rotary_dim=8, bos_token_id=1, eos_token_id=None)
    prompts = [[3, 5, 8], [13, 21, 34, 55, 89]]
    want = [generate(model, prompt)[0] for prompt in prompts]
    attention = type(model.get_submodule("transformer.h.0.attn"))
    if "get_interface" in inspect.unwrap(attention.forward).__code__.co_names:
        prepared = PreparedModel(load((model, None)), backend="python")
        assert Loop(prepared, prompts).run(MAX_TOKENS)[0] == want
        return
    with pytest.raises(UnsupportedModelError, match="do not call transformers' attention interface"):
        PreparedModel(load((model, None)), backend="python")


def test_attention_that_differs_is_found_by_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots mixed up: every layer is called, every shape is right, and the logits tell."""
    write = PagedCache.update

    def mixed_up(
        self: PagedCache, key: torch.Tensor, value: torch.Tensor, layer: int, *rest: Any, **more: Any
    ) -> Any:
        tagged = write(self, key, value, layer, *rest, **more)
        view = self.view(layer)
        view.v[5], view.v[1] = view.v[1].clone(), view.v[5].clone()
        return tagged

    monkeypatch.setattr(PagedCache, "update", mixed_up)
    with pytest.raises(
        UnsupportedModelError, match="model type llama: expected the logits of its own forward"
    ):
        PreparedModel(load((_model("llama", **_TINY), None)), backend="python")


def test_an_unknown_keyword_to_attention_is_refused() -> None:
    model = _model("llama", **_TINY)
    attention = type(model.model.layers[0].self_attn)
    forward = attention.forward
    for layer in model.model.layers:
        layer.self_attn.forward = lambda *args, _self=layer.self_attn, **kwargs: forward(
            _self, *args, **kwargs, position_bias=torch.zeros(1)
        )
    with pytest.raises(UnsupportedModelError, match=r"layer 0 \(LlamaAttention\) passes position_bias="):
        PreparedModel(load((model, None)), backend="python")


def test_a_window_the_config_does_not_know_is_refused() -> None:
    loaded = load((_model("mistral", **_TINY, sliding_window=None), None))
    loaded.model.config.sliding_window = 8  # after the spec was read
    with pytest.raises(
        UnsupportedModelError, match="a window of 8 tokens, where its config says full attention"
    ):
        PreparedModel(loaded, backend="python")
