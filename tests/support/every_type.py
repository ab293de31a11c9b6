"""A tiny random float32 model of every type that transformers maps to a class, if it can be built.

`architectures` has models chosen to be hard for a cache; here every type is taken as its config class describes it,
with sizes made small and one layer (or more) of every kind that its config names by default.
Cost: some 20 ms a model.
"""

from __future__ import annotations

from typing import Any

import torch
from support.architectures import randomize
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

__all__ = ["VOCAB_SIZE", "build", "build_text_part", "tiny_config"]

VOCAB_SIZE = 131

_IDS: dict[str, Any] = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
# Whichever of these a config class has.
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "vocab_size_per_layer_input": VOCAB_SIZE,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embed_dim", "embedding_size",
                     "word_embed_proj_dim", "project_dim", "projection_dim", "attention_hidden_size", "lru_width"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim",
                     "ffn_hidden_size", "dense_ffn_hidden_size", "dim_ff", "mlp_dim", "intermediate_size_mlp"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers",
                     "num_decoder_layers", "num_encoder_layers", "depth"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
                     "encoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads"), 4),
    "num_key_value_heads": 2, "head_dim": 16, "dim_head": 16,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 512),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 48),
    "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "sliding_window": 8,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    # With four heads many an indexer's score is exactly zero: ties, of which torch chooses otherwise in a longer row.
    "index_n_heads": 16, "index_head_dim": 16, "index_topk": 16, "hidden_size_per_layer_input": 8,
    "global_head_dim": 32, "attention_chunk_size": 8, "query_pre_attn_scalar": 16,
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8, "mamba_num_heads": 8,
    "mamba_head_dim": 16, "ssm_state_size": 16, "chunk_size": 8, "state_size": 16, "time_step_rank": 8,
    "image_size": 28, "patch_size": 14, "out_hidden_size": 64, "num_position_embeddings": 16,
    "num_mel_bins": 16, "max_source_positions": 32,
}  # fmt: skip
# What the rule above does not give.
_FIELDS: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8},
    "dory": {"layer_types": ["sliding_attention", "full_attention"]},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_dt_rank": 8,
    },
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "dots3_note_text": {
        "num_key_value_heads": 4,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 24,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 8,
    },
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_n_groups": 1},
    "gemma3n_text": {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "intermediate_size": [96] * 6,
        "activation_sparsity_pattern": [0.0] * 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "gemma4_text": {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "kimi_linear": {
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    # The last layer's decays are next to none, so another one is linear.
    "minimax": {"sliding_window": None, "layer_types": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 8},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "qwen3_vl_moe_text": {"sliding_window": None},
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds": False,
        "attn_layers": ["local", "lsh"],
        "attention_head_size": 16,
        "feed_forward_size": 96,
        "num_hashes": 1,
    },
    # transformers rounds the width of q and k up to 64 in the cache, and not in the layer.
    "xlstm": {"qk_dim_factor": 1.0, "autocast_kernel_dtype": "float32"},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4},
    "zamba2": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
        "layers_block_type": ["linear_attention", "hybrid"],
    },
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(model_type: str, **fields: Any) -> PreTrainedConfig:
    """The config of `model_type` made small, its parts (text, vision, ...) as well; `fields` as they are."""
    return _shrunk(CONFIG_MAPPING[model_type], model_type, fields)


def build(auto_class: Any, model_type: str, **fields: Any) -> PreTrainedModel:
    """The model that `auto_class` maps the type to, random from a fixed seed."""
    return _built(auto_class, tiny_config(model_type, **fields))


def build_text_part(auto_class: Any, model_type: str) -> PreTrainedModel:
    """The language model within it alone. *raises:* ValueError: it is nothing else."""
    config = tiny_config(model_type)
    text = config.get_text_config(decoder=True)
    if text is config:
        raise ValueError(f"expected a type with a config of its text, got {model_type}")
    return _built(auto_class, text)


def _built(auto_class: Any, config: Any) -> PreTrainedModel:
    # transformers 5.20 would choose sdpa for models that cap attention's scores, and it drops the cap.
    options = {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}
    torch.manual_seed(7)
    model = auto_class.from_config(config, dtype=torch.float32, **options).eval()
    randomize(model)
    return model


def _shrunk(cls: Any, model_type: str, wanted: dict[str, Any]) -> PreTrainedConfig:
    default = cls()
    known = set(default.to_dict())
    aliases = dict(getattr(cls, "attribute_map", None) or {})
    fields = {
        name: value
        for name, value in {**_SMALL, **_FIELDS.get(model_type, {})}.items()
        if name in known or name in aliases or name in _FIELDS.get(model_type, {})
    }
    fields = {name: value for name, value in fields.items() if aliases.get(name) not in fields}
    if "kv_lora_rank" in fields:  # latent attention: as many of either
        fields |= (
            {"num_key_value_heads": 4, "head_dim": 8} if "head_dim" in fields else {"num_key_value_heads": 4}
        )
    if "is_decoder" in known:
        fields["is_decoder"] = True
    for name in cls.sub_configs or {}:
        part = getattr(default, name, None)
        if isinstance(part, PreTrainedConfig):
            fields[name] = _shrunk(type(part), part.model_type, {})
    kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or ()))
    if (
        kinds
        and not _is_computed(cls, "layer_types")
        and not _is_computed(cls, aliases.get("layer_types", ""))
    ):
        kinds = kinds if len(kinds) > 1 else kinds * 2
        fields.setdefault("layer_types", kinds)
        for name in ("num_hidden_layers", "num_layers", "n_layer"):
            if name in fields:
                fields[name] = len(fields["layer_types"])
    return cls(**{**_IDS, **fields, **wanted})


def _is_computed(cls: type, name: str) -> bool:
    return isinstance(getattr(cls, name, None), property)
