"""The states of a config's layers; model/test_state_layers compares them with the modules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen3NextConfig

from quire.errors import UnsupportedModelError
from quire.spec.state_spec import state_fields, state_specs


def test_the_bytes_of_a_real_model() -> None:
    specs = state_specs(Qwen3NextConfig())
    # 32 heads of 128 x 128 and 3 inputs of 8192 channels, in float32; three of four layers.
    assert {spec.bytes_per_sequence for spec in specs} == {4 * (32 * 128 * 128 + 3 * 8192)}
    assert [spec.layer for spec in specs] == [layer for layer in range(48) if layer % 4 != 3]


def test_a_model_of_attention_alone_has_none() -> None:
    assert state_specs(LlamaConfig()) == ()
    assert state_fields(Qwen3NextConfig(), 3) == ()
    assert state_fields(Qwen3NextConfig(), 48) == ()


def config(**fields: Any) -> Any:
    text = SimpleNamespace(**fields)
    text.get_text_config = lambda decoder: text
    return text


def test_an_unknown_state_is_refused_by_its_layer() -> None:
    with pytest.raises(UnsupportedModelError, match="model type novel: layer 1 is 'linear_attention'"):
        state_specs(config(model_type="novel", layer_types=["full_attention", "linear_attention"]))


def test_a_config_without_a_size_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="conv_L_cache"):
        state_specs(config(model_type="lfm2", layer_types=["conv"], hidden_size=8))
