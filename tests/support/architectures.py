"""Tiny random float32 models of many architectures, none from the Hub, for the exactness tests.

Each name maps to a transformers model type and the fields that differ from the common tiny shape. Windows and chunks
are shorter than the test prompts, so that they matter.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 131

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
}
_MHA: dict[str, Any] = {"num_key_value_heads": ...}  # a type without the field
_MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
# Latents of 24 and 8 turned columns, heads of 12 + 8 and 20: no two widths alike.
_MLA = {"num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 24, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12, "v_head_dim": 20}  # fmt: skip
_MLA_MOE = {**_MLA, **_MOE, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
            "n_group": 1, "topk_group": 1}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128,
         "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "vocab_size": VOCAB_SIZE,
         "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False}  # fmt: skip
_SLIDING_FULL = ["sliding_attention", "full_attention"]

# name -> (model type, fields, whether the common shape applies)
_ARCHITECTURES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "afmoe": ("afmoe", {**_MOE, "sliding_window": 8, "layer_types": _SLIDING_FULL, "num_dense_layers": 1}, True),
    "apertus": ("apertus", {}, True),
    "arcee": ("arcee", {}, True),
    "axk1": ("axk1", _MLA_MOE, True),
    "bitnet": ("bitnet", {}, True),
    "bloom": ("bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB_SIZE, "bos_token_id": 1,
                        "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False}, False),
    "cohere": ("cohere", {}, True),
    "cohere2": ("cohere2", {"sliding_window": 8, "layer_types": _SLIDING_FULL}, True),
    "cwm": ("cwm", {"sliding_window": 8, "layer_types": _SLIDING_FULL}, True),
    "deepseek_v2": ("deepseek_v2", {**_MLA_MOE, "q_lora_rank": None}, True),
    "deepseek_v3": ("deepseek_v3", {**_MLA_MOE, "rope_parameters": _YARN}, True),
    "dots1": ("dots1", {**_MOE, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
                        "n_group": 1, "topk_group": 1}, True),
    "ernie4_5": ("ernie4_5", {}, True),
    "exaone4": ("exaone4", {"sliding_window": 8, "layer_types": _SLIDING_FULL}, True),
    "falcon": ("falcon", {**_MHA, "head_dim": ...}, True),
    "gemma": ("gemma", {"num_key_value_heads": 1}, True),
    "gemma2": ("gemma2", {"sliding_window": 8, "layer_types": _SLIDING_FULL, "query_pre_attn_scalar": 16,
                          "attn_logit_softcapping": 5.0}, True),
    "gemma3_text": ("gemma3_text", {"sliding_window": 8, "num_hidden_layers": 3, "query_pre_attn_scalar": 16,
                                    "layer_types": [*_SLIDING_FULL, "sliding_attention"]}, True),
    "gemma3n_text": ("gemma3n_text", {
        "num_hidden_layers": 6, "num_kv_shared_layers": 2, "sliding_window": 8, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE, "laurel_rank": 8, "altup_num_inputs": 2,
        "intermediate_size": [96] * 6, "activation_sparsity_pattern": [0.0] * 6,
        "layer_types": [*_SLIDING_FULL, *_SLIDING_FULL, *_SLIDING_FULL]}, True),
    "gemma4_text": ("gemma4_text", {
        "num_hidden_layers": 6, "num_kv_shared_layers": 2, "sliding_window": 8, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE, "global_head_dim": 32,
        "layer_types": [*_SLIDING_FULL, *_SLIDING_FULL, *_SLIDING_FULL]}, True),
    "glm": ("glm", {}, True),
    "glm4": ("glm4", {}, True),
    "glm4_moe": ("glm4_moe", {**_MOE, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
                              "n_group": 1, "topk_group": 1}, True),
    "glm4_moe_lite": ("glm4_moe_lite", {**_MLA_MOE, "head_dim": ...}, True),
    "gpt2": ("gpt2", _GPT2, False),
    "gpt_bigcode": ("gpt_bigcode", {**_GPT2, "multi_query": True}, False),
    "gpt_neox": ("gpt_neox", {**_MHA, "rotary_pct": 0.5}, True),
    "gpt_oss": ("gpt_oss", {**_MOE, "sliding_window": 8, "layer_types": _SLIDING_FULL}, True),
    "granite": ("granite", {"attention_multiplier": 0.25, "residual_multiplier": 0.5, "logits_scaling": 2.0}, True),
    "granite_swa": ("granite_swa", {"sliding_window": 8, "layer_types": _SLIDING_FULL}, True),
    "granitemoe": ("granitemoe", _MOE, True),
    "helium": ("helium", {}, True),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {}, True),
    "internlm3": ("internlm3", {}, True),
    "llama": ("llama", {}, True),
    "llama4_text": ("llama4_text", {
        "num_hidden_layers": 4, "attention_chunk_size": 8, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2,
        "num_local_experts": 2, "num_experts_per_tok": 1, "no_rope_layers": [1, 1, 1, 0],
        "layer_types": ["chunked_attention"] * 3 + ["full_attention"], "attn_temperature_tuning": True,
        "floor_scale": 4}, True),
    "longcat_flash": ("longcat_flash", {
        **_MLA, "num_hidden_layers": ..., "num_layers": 2, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 48,
        "n_routed_experts": 4, "moe_topk": 2, "zero_expert_num": 2}, True),
    "mimo_v2_flash": ("mimo_v2_flash", {**_MOE, "n_routed_experts": 4, "v_head_dim": 8, "sliding_window": 8,
                                        "layer_types": _SLIDING_FULL, "n_group": 1, "topk_group": 1}, True),
    "minicpm3": ("minicpm3", _MLA, True),
    "ministral3": ("ministral3", {}, True),
    "mistral": ("mistral", {"sliding_window": 8}, True),
    "mixtral": ("mixtral", _MOE, True),
    "mpt": ("mpt", {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 512, "vocab_size": VOCAB_SIZE,
                    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False}, False),
    "nanochat": ("nanochat", {}, True),
    "nemotron": ("nemotron", {}, True),
    "olmo": ("olmo", {}, True),
    "olmo2": ("olmo2", {}, True),
    "olmo3": ("olmo3", {"sliding_window": 8, "layer_types": _SLIDING_FULL}, True),
    "olmoe": ("olmoe", _MOE, True),
    "opt": ("opt", {**_MHA, "ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0}, True),
    "persimmon": ("persimmon", _MHA, True),
    "phi": ("phi", {"partial_rotary_factor": 0.5}, True),
    "phi3": ("phi3", {"sliding_window": 8}, True),
    "phimoe": ("phimoe", _MOE, True),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, True),
    "qwen2_moe": ("qwen2_moe", {**_MOE, "shared_expert_intermediate_size": 48}, True),
    "qwen3": ("qwen3", {}, True),
    "qwen3_moe": ("qwen3_moe", _MOE, True),
    "seed_oss": ("seed_oss", {}, True),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}, True),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.5}, True),
    "starcoder2": ("starcoder2", {"sliding_window": 8}, True),
    "youtu": ("youtu", _MLA, True),
    "vaultgemma": ("vaultgemma", {"sliding_window": 8, "layer_types": _SLIDING_FULL,
                                  "query_pre_attn_scalar": 16}, True),
}  # fmt: skip

# Those that the installed transformers has: 5.20 knows no internlm3.
ALL = tuple(name for name, (model_type, _, _) in _ARCHITECTURES.items() if model_type in CONFIG_MAPPING)
# What the default suite proves on the engine, both back ends; the rest are run by hand there, and all of them in CI.
CORE = (
    "cohere2", "deepseek_v3", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "gemma3n_text", "glm4",
    "gpt2", "gpt_neox", "gpt_oss", "granite", "hunyuan_v1_dense", "llama", "llama4_text", "mimo_v2_flash",
    "mistral", "mixtral", "olmo2", "opt", "phi", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3", "stablelm",
    "starcoder2",
)  # fmt: skip


def tiny(name: str) -> PreTrainedModel:
    """The tiny model of architecture `name`, random from a fixed seed."""
    model_type, fields, common = _ARCHITECTURES[name]
    fields = {**_COMMON, **fields} if common else fields
    config = AutoConfig.for_model(
        model_type, **{key: value for key, value in fields.items() if value is not ...}
    )
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **attention_of(config)).eval()
    randomize(model)
    return model


def attention_of(config: Any) -> dict[str, str]:
    """What `from_config` needs to be told: transformers 5.20 would choose sdpa for models that cap attention's scores,
    and it drops the cap."""
    return {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}


@torch.no_grad()
def randomize(model: PreTrainedModel) -> None:
    """Weights under which answers depend on every part: attention is sharp and outweighs the residual.

    As initialised, attention is all but uniform and a token mostly predicts itself: a cache that loses the past
    would pass.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            gain = 2.5 if "attn" in name or "attention" in name else 1.0
            parameter.normal_(0.0, gain / 8.0)  # 1 / sqrt(hidden_size)
        elif "sinks" in name:
            parameter.normal_(0.0, 1.0)
