"""KVSpec.from_config against hand calculation, and against the K and V that models really store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import ALL, VOCAB_SIZE, tiny
from support.cache_argument import CACHE
from transformers import AutoConfig, DynamicCache

from quire.errors import ArgumentError, ConfigError, LoadError, UnsupportedModelError
from quire.spec import KVSpec, LayerSpec, Span
from quire.spec.payload import PayloadLayout

QWEN3_4B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16",
    "head_dim": 128, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 40960,
    "max_window_layers": 36, "use_sliding_window": False, "sliding_window": None,
    "rope_theta": 1000000, "tie_word_embeddings": True, "vocab_size": 151936,
}  # fmt: skip


def _spec(model_type: str, **fields: Any) -> KVSpec:
    return KVSpec.from_config({"model_type": model_type, **fields})


def test_qwen3_4b_at_40960_tokens_is_5_625_gib() -> None:
    spec = KVSpec.from_config(QWEN3_4B)
    assert spec.bytes_for(40960) == 5.625 * 2**30
    assert spec.bytes_per_token == 36 * 8 * (128 + 128) * 2
    assert (spec.dtype, spec.max_model_len, spec.vocab_size, spec.name) == (
        "bfloat16",
        40960,
        151936,
        "qwen3",
    )
    assert len(spec.groups) == 1


def test_a_folder_a_file_a_dict_and_an_object_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    fields = {key: value for key, value in QWEN3_4B.items() if key != "model_type"}
    sources = [tmp_path, str(tmp_path), tmp_path / "config.json", AutoConfig.for_model("qwen3", **fields)]
    assert [KVSpec.from_config(source) for source in sources] == [KVSpec.from_config(QWEN3_4B)] * 4
    assert QWEN3_4B["model_type"] == "qwen3"  # the caller's dict is left alone


def test_dtype_is_the_configs_or_the_one_given() -> None:
    assert KVSpec.from_config(QWEN3_4B, dtype="float32").bytes_for(40960) == 2 * 5.625 * 2**30
    assert _spec("gpt2").dtype == "float32"
    assert _spec("llama", dtype="float16").dtype == "float16"


def test_gemma3_keeps_its_windows_only() -> None:
    """Five windows of 1024 to one full layer, as in gemma-3-4b: 34 layers, 29 of them sliding, 5 full."""
    spec = _spec(
        "gemma3",
        text_config={"num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
                     "sliding_window": 1024, "sliding_window_pattern": 6, "hidden_size": 2560},
        dtype="bfloat16",
    )  # fmt: skip
    layer = 4 * (256 + 256) * 2
    assert spec.bytes_per_token == 34 * layer
    assert spec.bytes_for(1000) == 34 * 1000 * layer
    assert spec.bytes_for(32768) == (5 * 32768 + 29 * 1024) * layer
    assert [group.span.kind for group in spec.groups] == ["full"] + ["window"] * 6
    assert [len(group.layers) for group in spec.groups] == [5, 5, 5, 5, 5, 5, 4]


def test_deepseek_v3_keeps_latents_71_times_smaller_than_keys_and_values() -> None:
    """A latent of 512 and 64 turned columns a layer, where 128 heads would have keys of 192 and values of 128."""
    spec = _spec("deepseek_v3", dtype="bfloat16")
    assert spec.bytes_per_token == 61 * (512 + 64) * 2
    expanded = 61 * 128 * (192 + 128) * 2
    assert expanded // spec.bytes_per_token == 71
    (layer,) = set(spec.layers)
    assert layer == LayerSpec(Span(), 1, 576, 512, latent=True)
    assert (layer.elements_per_token, layer.stored_dims, layer.input_dims) == (576, (576,), (512, 64))
    (group,) = spec.groups
    assert group.bytes_per_block(16) == 16 * spec.bytes_per_token == spec.block_bytes(16)
    layout = PayloadLayout.from_spec(spec)
    assert layout.bytes_per_token == spec.bytes_per_token
    assert len(list(layout.rows(3))) == 61


def test_keys_of_an_indexer_are_layers_behind_the_decoders() -> None:
    spec = _spec("deepseek_v32", dtype="bfloat16")
    assert set(spec.layers[:61]) == {LayerSpec(Span(), 1, 576, 512, latent=True)}
    assert spec.layers[61:] == tuple(
        LayerSpec(Span(), 1, 128, 128, latent=True, index_of=layer) for layer in range(61)
    )
    assert spec.has_indexer
    assert spec.bytes_per_token == 61 * (576 + 128) * 2
    assert sum(spec.block_bytes(16) for _ in spec.groups) <= 1.05 * 16 * spec.bytes_per_token


def test_a_layer_that_shares_anothers_choice_keeps_no_keys_of_an_indexer() -> None:
    spec = _spec("glm_moe_dsa", num_hidden_layers=3, indexer_types=["full", "shared", "full"])
    assert [layer.index_of for layer in spec.layers] == [None, None, None, 0, 2]


def test_values_of_a_latent_layer_lie_in_its_keys() -> None:
    with pytest.raises(
        ArgumentError, match="expected a latent layer's values among its keys' 8 columns, got 9"
    ):
        LayerSpec(Span(), 1, 8, 9, latent=True)


def test_mistral_7b_keeps_4096_tokens() -> None:
    fields = {
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
    }
    spec = _spec("mistral", **fields, sliding_window=4096, dtype="bfloat16")
    assert spec.bytes_for(32768) == 32 * 4096 * 8 * 256 * 2
    assert _spec("mistral", **fields, sliding_window=None, dtype="bfloat16").bytes_for(32768) == 4 * 2**30


def test_qwen2_slides_from_max_window_layers_on() -> None:
    fields = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    spec = _spec("qwen2", **fields, sliding_window=128, max_window_layers=3, use_sliding_window=True)
    assert [layer.span for layer in spec.layers] == [Span()] * 3 + [Span("window", 128)]
    spec = _spec("qwen2", **fields, sliding_window=128, max_window_layers=3, use_sliding_window=False)
    assert {layer.span for layer in spec.layers} == {Span()}


def test_llama4_attends_in_chunks() -> None:
    spec = _spec(
        "llama4_text", num_hidden_layers=8, num_attention_heads=40, num_key_value_heads=8, head_dim=128,
        attention_chunk_size=8192, dtype="bfloat16",
    )  # fmt: skip
    chunked = Span("chunked", 8192)
    assert [layer.span for layer in spec.layers] == [chunked, chunked, chunked, Span()] * 2
    assert spec.bytes_for(100_000) == (2 * 100_000 + 6 * 8192) * 8 * 256 * 2


def test_gemma3n_shares_kv_with_the_last_layer_of_the_same_kind() -> None:
    spec = _spec(
        "gemma3n_text", num_hidden_layers=10, num_kv_shared_layers=4, num_attention_heads=8, num_key_value_heads=2,
        head_dim=256, sliding_window=512, intermediate_size=[64] * 10, activation_sparsity_pattern=[0.0] * 10,
        layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 2, dtype="bfloat16",
    )  # fmt: skip
    assert [layer.shares_kv_with for layer in spec.layers] == [None] * 6 + [5, 5, 5, 4]
    assert spec.bytes_per_token == 6 * 2 * 512 * 2
    assert spec.bytes_for(4096) == (1 * 4096 + 5 * 512) * 2 * 512 * 2


def test_heads_by_other_names() -> None:
    gpt2 = _spec("gpt2", n_layer=3, n_head=4, n_embd=64, n_positions=128).layers
    assert {(x.num_kv_heads, x.k_head_dim) for x in gpt2} == {(4, 16)}
    assert len(gpt2) == 3
    bigcode = _spec("gpt_bigcode", n_head=4, n_embd=64, multi_query=True).layers[0]
    assert (bigcode.num_kv_heads, bigcode.k_head_dim) == (1, 16)
    falcon = {"num_attention_heads": 8, "hidden_size": 64, "num_kv_heads": 2}
    assert _spec("falcon", **falcon, multi_query=True).layers[0].num_kv_heads == 1
    assert _spec("falcon", **falcon, new_decoder_architecture=True).layers[0].num_kv_heads == 2
    neox = _spec("gpt_neox", num_attention_heads=8, hidden_size=64).layers[0]
    assert (neox.num_kv_heads, neox.k_head_dim) == (8, 8)


def test_a_type_transformers_does_not_know_is_read_by_its_fields() -> None:
    spec = _spec(
        "brand_new", num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=[1, 2], hidden_size=64,
        max_position_embeddings=99, sliding_window=8, layer_types=["full_attention", "sliding_attention"],
    )  # fmt: skip
    assert [x.num_kv_heads for x in spec.layers] == [1, 2]
    assert [x.span for x in spec.layers] == [Span(), Span("window", 8)]
    assert (spec.max_model_len, spec.name) == (99, "brand_new")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "llama", "num_hidden_layers": 0}, "positive integer as num_hidden_layers .* of llama, got 0"),
        ({"model_type": "llama", "num_attention_heads": "x"}, "num_attention_heads"),
        ({"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 4, "head_dim": 8,
          "hidden_size": 48}, "num_attention_heads to be a multiple of num_key_value_heads .* got 6 and 4"),
        ({"model_type": "brand_new", "num_hidden_layers": 2}, "expected num_attention_heads .* got none"),
        ({"num_attention_heads": 2}, "expected num_hidden_layers in the config of unnamed, got none"),
        ({"model_type": "brand_new", "num_hidden_layers": 2, "num_attention_heads": 3, "hidden_size": 64},
         "hidden_size to be a multiple .* got 64 and 3"),
        ({"model_type": "llama", "dtype": "float8_e4m3fn"}, "dtype of .* got 'float8_e4m3fn'; pass dtype="),
        ({"model_type": "brand_new", "num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 64,
          "sliding_window": None, "layer_types": ["sliding_attention"]}, "positive integer as sliding_window"),
    ],
)  # fmt: skip
def test_a_broken_config_names_its_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        KVSpec.from_config(fields)
    assert "\n" not in str(caught.value)


def test_layer_types_that_lack_layers() -> None:
    config = AutoConfig.for_model("llama", num_hidden_layers=2)
    config.layer_types = ["full_attention"]
    with pytest.raises(ConfigError, match=r"expected 2 entries .* in layer_types of llama, got 1"):
        KVSpec.from_config(config)


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("deepseek_v4", r"model type deepseek_v4: .* \d+ compressed_sparse_attention"),
        ("qwen4_exp_text", "layer 0 is 'linear_attention', with a state that quire does not support"),
        ("fnet", "no attention heads: they store no K and V"),
        ("t5", "model type t5: expected a decoder-only model"),
    ],
)
def test_other_state_than_k_and_v_is_refused(model_type: str, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        _spec(model_type)


def test_what_is_no_config(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"cannot read .*config\.json"):
        KVSpec.from_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="expected JSON"):
        KVSpec.from_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="expected a JSON object"):
        KVSpec.from_config(tmp_path)
    with pytest.raises(ConfigError, match="got int"):
        KVSpec.from_config(3)


class _Recording(DynamicCache):
    """Notes the shapes of what a model stores."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *rest: Any, **more: Any
    ) -> Any:
        self.seen[layer_idx] = (key_states.shape[1], key_states.shape[3], value_states.shape[3])
        return super().update(key_states, value_states, layer_idx, *rest, **more)


@pytest.mark.parametrize("name", ALL)
def test_shapes_are_those_the_model_stores(name: str) -> None:
    model = tiny(name)
    cache = _Recording(config=model.config)
    cache.seen = {}
    with torch.inference_mode():
        model(torch.arange(2, 5)[None] % VOCAB_SIZE, **{CACHE: cache}, use_cache=True)
    stored = {
        index: (layer.num_kv_heads, *layer.input_dims)
        for index, layer in enumerate(KVSpec.from_config(model.config).layers)
        if layer.shares_kv_with is None
    }
    assert stored == cache.seen


def test_the_decoder_of_an_encoder_decoder_has_its_own_layers_and_heads() -> None:
    """transformers' own names (num_hidden_layers, num_attention_heads) are the encoder's in such a config."""
    fields = {"d_model": 64, "encoder_layers": 3, "encoder_attention_heads": 2, "vocab_size": VOCAB_SIZE}
    for model_type in ("bart", "whisper"):
        config = AutoConfig.for_model(model_type, decoder_layers=2, decoder_attention_heads=8, **fields)
        config.is_encoder_decoder = False
        spec = KVSpec.from_config(config)
        assert len(spec.layers) == 2
        assert {(layer.num_kv_heads, layer.k_head_dim) for layer in spec.layers} == {(8, 8)}
        assert config.num_hidden_layers == 3
    assert spec.max_model_len == config.max_target_positions


@pytest.mark.parametrize(
    ("rotary", "length"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),  # Qwen's cards
        ({"type": "yarn", "factor": 1.5, "original_max_position_embeddings": 32768}, 49152),
        ({"type": "yarn", "factor": 1.1, "original_max_position_embeddings": 32768}, 40960),  # it says more
        ({"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": 32768}, 65536),
        ({"rope_type": "linear", "factor": 2.0}, 40960),  # 40960 may be the length before or behind it
        ({"rope_type": "dynamic", "factor": 2.0}, 40960),
        ({"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0}, 40960),
        ({"rope_type": "longrope", "original_max_position_embeddings": 4096, "short_factor": [1.0] * 64,
          "long_factor": [4.0] * 64}, 40960),
        ({"rope_type": "default"}, 40960),
    ],
    ids=lambda value: value.get("rope_type", "yarn") if isinstance(value, dict) else str(value),
)  # fmt: skip
def test_the_length_of_stretched_rotary_embeddings(rotary: dict[str, Any], length: int) -> None:
    assert KVSpec.from_config({**QWEN3_4B, "rope_scaling": dict(rotary)}).max_model_len == length


def test_the_length_is_that_of_layers_that_see_all_tokens() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "rope_theta": 1e6}
    plain = {"rope_type": "default", "rope_theta": 1e4}
    fields = {"max_position_embeddings": 1024, "num_hidden_layers": 6}
    spec = _spec(
        "gemma3_text", **fields, rope_parameters={"full_attention": yarn, "sliding_attention": plain}
    )
    assert spec.max_model_len == 4096
