"""Small models of every architecture that a GGUF file opens as, each key of its header off its default somewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

__all__ = ["CASES", "Case", "made"]

_SMALL = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False, "initializer_range": 0.2,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LINEAR = {"rope_type": "linear", "factor": 4.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """fields: of the config, beside those of every small model. header: keys as of `gguf_writer.write`."""

    model_type: str
    fields: dict[str, Any] = field(default_factory=dict)
    header: dict[str, Any] = field(default_factory=dict)


def _rope(base: float = 10000.0, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base} | parameters}


def _long(pairs: int, first: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope", "original_max_position_embeddings": first,
        "short_factor": [1.0 + 0.05 * pair for pair in range(pairs)],
        "long_factor": [1.0 + 0.5 * pair for pair in range(pairs)],
    }  # fmt: skip


_GPT2 = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 256, "n_inner": 256}
_MAMBA = {
    "state_size": 8,
    "conv_kernel": 3,
    "time_step_rank": 6,
    "layer_norm_epsilon": 1e-3,
    "intermediate_size": 128,
}
_GEMMA3 = {"head_dim": 32, "sliding_window": 24, "num_hidden_layers": 7, "layer_types": None}
_GEMMA3_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 50000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
}
_GEMMA4 = {
    "head_dim": 16, "global_head_dim": 32, "sliding_window": 24, "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96,
}  # fmt: skip
_GRANITE = {
    "attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0,
}  # fmt: skip
_HYBRID = {
    "layer_types": ["mamba", "attention", "mamba"], "num_hidden_layers": 3, "mamba_n_heads": 8, "mamba_d_head": 16,
    "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_expand": 2, "mamba_d_conv": 3, "shared_intermediate_size": 48,
}  # fmt: skip

_QWEN35 = {
    "num_hidden_layers": 4, "full_attention_interval": 4, "head_dim": 32, "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    **_rope(5000.0, partial_rotary_factor=0.5, mrope_section=[4, 2, 2], mrope_interleaved=True),
}  # fmt: skip

CASES: dict[str, Case] = {
    "llama": Case("llama", {"rms_norm_eps": 1e-3, **_rope(5000.0)}),
    "llama head_dim": Case("llama", {"head_dim": 32}),
    "llama tied": Case("llama", {"tie_word_embeddings": True}),
    "llama biases": Case("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama linear": Case("llama", _rope(**_LINEAR)),
    "llama old linear key": Case(
        "llama", _rope(**_LINEAR), {"rope.scaling.type": None, "rope.scaling.factor": None, "rope.scale_linear": 4.0}
    ),
    "llama yarn": Case("llama", _rope(**_YARN)),
    "llama rope_freqs": Case("llama", _rope(50000.0, **_LLAMA3)),
    "llama window": Case("mistral", {"sliding_window": 24}),
    "mixtral": Case("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, **_rope(5000.0)}),
    "qwen2": Case("qwen2", {"rms_norm_eps": 1e-3, **_rope(5000.0)}),
    "qwen2 yarn": Case("qwen2", _rope(**_YARN)),
    "qwen2moe": Case("qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 48, **_rope(**_YARN)}),
    "qwen3": Case("qwen3", {"head_dim": 32, "rms_norm_eps": 1e-3}),
    "qwen3 yarn": Case(
        "qwen3", {
            "head_dim": 32,
            **_rope(
                rope_type="yarn", factor=4.0, original_max_position_embeddings=4096, attention_factor=1.3,
                beta_fast=16.0, beta_slow=2.0,
            ),
        },
    ),
    "qwen3moe yarn": Case("qwen3_moe", {**_EXPERTS, "head_dim": 32, "norm_topk_prob": True, **_rope(**_YARN)}),
    "phi3": Case("phi3", {"sliding_window": 24, **_rope(5000.0, partial_rotary_factor=0.5)}),
    "phi3 no window": Case("phi3", {"sliding_window": None, "original_max_position_embeddings": 256}),
    "phi3 longrope": Case(
        "phi3", {"original_max_position_embeddings": 64, **_rope(**_long(6, 64), partial_rotary_factor=0.75)}
    ),
    "gemma": Case("gemma", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": Case(
        "gemma2",
        {
            "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 24, "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0, "tie_word_embeddings": True,
        },
    ),
    "gemma2 27b": Case(
        "gemma2", {
            "head_dim": 32, "query_pre_attn_scalar": 16, "num_hidden_layers": 46, "sliding_window": 24,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": Case(
        "gemma3_text", {**_GEMMA3, "query_pre_attn_scalar": 32, "rope_parameters": _GEMMA3_ROPE}
    ),
    "gemma3 linear": Case(
        "gemma3_text",
        {
            **_GEMMA3, "query_pre_attn_scalar": 32, "final_logit_softcapping": 3.0,
            "rope_parameters": _GEMMA3_ROPE
            | {"full_attention": {"rope_theta": 50000.0, "rope_type": "linear", "factor": 8.0}},
        },
    ),
    "gemma3 27b": Case("gemma3_text", {**_GEMMA3, "num_hidden_layers": 62, "query_pre_attn_scalar": 16}),
    "gemma4": Case("gemma4_text", {**_GEMMA4, "final_logit_softcapping": 3.0}),
    "gemma4 shared": Case("gemma4_text", {**_GEMMA4, "num_kv_shared_layers": 3, "use_double_wide_mlp": True}),
    "gemma4 experts": Case(
        "gemma4_text",
        {
            **_GEMMA4, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
            "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
        },
    ),
    "gpt2": Case("gpt2", {**_GPT2, "tie_word_embeddings": True, "layer_norm_epsilon": 1e-3}),
    "gpt2 narrow": Case("gpt2", {**_GPT2, "n_inner": 96, "n_positions": 300}),
    "bloom": Case("bloom", {"n_layer": 2, "n_head": 4, "seq_length": 256, "tie_word_embeddings": True}),
    "falcon": Case("falcon", {"tie_word_embeddings": True, **_rope(5000.0)}),
    "falcon groups": Case(
        "falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True, "ffn_hidden_size": 96}
    ),
    "falcon one norm": Case(
        "falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}
    ),
    "starcoder2": Case("starcoder2", {"norm_epsilon": 1e-3, **_rope(5000.0)}),
    "starcoder2 window": Case("starcoder2", {"sliding_window": 24}, {"attention.sliding_window": 24}),
    "stablelm": Case("stablelm", {"layer_norm_eps": 1e-3, **_rope(5000.0, partial_rotary_factor=0.5)}),
    "stablelm 12b": Case(
        "stablelm", {"qk_layernorm": True, "use_qkv_bias": True, "use_parallel_residual": True}
    ),
    "nemotron": Case("nemotron", {"head_dim": 16, "norm_eps": 1e-3, **_rope(partial_rotary_factor=0.5)}),
    "nemotron whole": Case("nemotron", {"head_dim": 16, **_rope(partial_rotary_factor=1.0)}),
    "stablelm whole": Case("stablelm", _rope(partial_rotary_factor=1.0)),
    "nemotron linear": Case("nemotron", {"head_dim": 16, **_rope(**_LINEAR, partial_rotary_factor=0.5)}),
    "mamba": Case("mamba", _MAMBA),
    "falcon mamba": Case("falcon_mamba", {**_MAMBA, "mixer_rms_eps": 1e-3}),
    "gpt-oss": Case(
        "gpt_oss",
        {
            "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24,
            **_rope(
                5000.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=4096, beta_fast=16.0,
                beta_slow=2.0, truncate=False,
            ),
        },
    ),
    "minimax-m2": Case(
        "minimax_m2",
        {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, **_rope(partial_rotary_factor=0.5)},
    ),
    "granite": Case("granite", _GRANITE),
    "granitemoe": Case("granitemoe", {**_GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "granitemoe shared": Case(
        "granitemoeshared",
        {**_GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48},
    ),
    "granitehybrid": Case(
        "granitemoehybrid", {**_GRANITE, **_HYBRID, "num_local_experts": 0, "num_experts_per_tok": 0}
    ),
    "granitehybrid experts": Case(
        "granitemoehybrid",
        {
            **_GRANITE, **_HYBRID, "num_local_experts": 4, "num_experts_per_tok": 2, "position_embedding_type": "rope",
        },
    ),
    "lfm2": Case(
        "lfm2",
        {
            "layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "norm_eps": 1e-3,
            "conv_L_cache": 4, "block_auto_adjust_ff_dim": False, **_rope(5000.0),
        },
    ),
    "qwen35": Case("qwen3_5_text", _QWEN35),
    "qwen35 yarn": Case(
        "qwen3_5_text",
        {
            **_QWEN35,
            **_rope(**_YARN, partial_rotary_factor=0.5, mrope_section=[4, 2, 2], mrope_interleaved=True),
        },
    ),
    "qwen35 heads": Case("qwen3_5_text", {**_QWEN35, "linear_num_value_heads": 6, "tie_word_embeddings": True}),
    "qwen35moe": Case(
        "qwen3_5_moe_text",
        {**_QWEN35, **_EXPERTS, "linear_num_value_heads": 4, "shared_expert_intermediate_size": 48},
    ),
    "qwen35 recurrent_layers": Case(
        "qwen3_5_text",
        {**_QWEN35, "layer_types": ["linear_attention", "full_attention"] * 2},
        {"attention.recurrent_layers": [True, False] * 2, "full_attention_interval": 4},
    ),
}  # fmt: skip


def made(case: Case) -> PreTrainedModel:
    """The model in float32, every parameter random: norms and biases too."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(case.model_type, **(_SMALL | case.fields))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "bias", "sinks", "scale", "layernorm.weight")):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
