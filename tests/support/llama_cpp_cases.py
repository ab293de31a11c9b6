"""Small random float32 models of each architecture that GGUF files have, with fields off their defaults.

Each is made into a file by llama.cpp's own converter (`llama_cpp_convert.py`): header and tensors are as in the
world's files. Every parameter is random, norms and biases too, so that none may be lost, swapped or undone wrongly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

NUM_WORDS = 320
_COMMON: dict[str, Any] = {
    "vocab_size": NUM_WORDS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False, "attention_dropout": 0.0,
}  # fmt: skip
_MOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_THETA = 50000.0
_LINEAR = {"rope_type": "linear", "rope_theta": _THETA, "factor": 4.0}
_YARN = {"rope_type": "yarn", "rope_theta": _THETA, "factor": 8.0, "original_max_position_embeddings": 32}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": _THETA, "factor": 8.0, "low_freq_factor": 1.0,
           "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
_THETA_ALONE = {"rope_type": "default", "rope_theta": _THETA}


@dataclass(frozen=True)
class Case:
    """
    Args:
        architecture: as the file calls it.
        kind: transformers' model type.
        fields: of its config, beside or in place of the common ones; `...` leaves a common one out.
        vocabulary: of the file, "bpe" or "spm".
        lengths: of the prompts.
        saved: fields of the config that the converter reads, changed after the model was saved.
        keys: of the header, less the architecture, written after the converter's own; None: left out.
        bound: of the error, by the spread of the logits. Float32 in another order leaves 1e-5, a wrong base, scale,
            width or window moves them by a tenth and more.
        apart: why llama.cpp does not compute what the model does that the file was made of; empty where it does.
        refused: what Quire's refusal of the file says, a regular expression; empty where it opens it.
    """

    architecture: str
    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    vocabulary: str = "bpe"
    lengths: tuple[int, ...] = (5, 40, 200)
    saved: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)
    bound: float = 5e-4
    apart: str = ""
    refused: str = ""


def _longrope(width: int) -> dict[str, Any]:
    return {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 256,
            "short_factor": [1.0 + 0.1 * i for i in range(width)],
            "long_factor": [1.5 + 0.5 * i for i in range(width)]}  # fmt: skip


def _rope(parameters: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"rope_parameters": {**parameters, **others}}


_OTHER_GELU = 3e-3  # llama.cpp takes the one of tanh
_GATED_NORM = 2e-3  # of small differences: float32 beside float64 moves these logits by 9e-4
_UNKNOWN = "expected a GGUF file of a known architecture"
_GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 1024, "n_inner": 112}
_MAMBA = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": ...,
    "state_size": 16,
    "expand": 2,
    "conv_kernel": 4,
}
_GEMMA2 = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16, "tie_word_embeddings": True}
_GEMMA3 = {**_GEMMA2, "num_hidden_layers": 7, "layer_types": [*["sliding_attention"] * 5, "full_attention",
                                                              "sliding_attention"]}  # fmt: skip
_GEMMA3_ROPE = {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "default", "rope_theta": 1e6}}  # fmt: skip
_GEMMA4 = {
    "num_hidden_layers": 6, "head_dim": 16, "global_head_dim": 32, "sliding_window": 16, "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0, "tie_word_embeddings": True, "final_logit_softcapping": 30.0,
    "layer_types": [*["sliding_attention"] * 2, "full_attention", *["sliding_attention"] * 2, "full_attention"],
}  # fmt: skip
_GPT_OSS = {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 16,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2}  # fmt: skip
_QWEN35 = {
    "num_hidden_layers": 4, "head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "full_attention_interval": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    **_rope({"rope_type": "default", "rope_theta": _THETA, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
            partial_rotary_factor=0.25),
}  # fmt: skip
_QWEN35_MOE = {**_QWEN35, **_MOE, "shared_expert_intermediate_size": 40}
_MLA = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32, "v_head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 48, "n_shared_experts": 1, "first_k_dense_replace": 1}  # fmt: skip
_GRANITE = {"attention_multiplier": 0.3, "residual_multiplier": 0.6, "embedding_multiplier": 3.0,
            "logits_scaling": 2.5}  # fmt: skip
_GRANITE_HYBRID = {
    **_GRANITE, "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 96,
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_conv": 4,
    "mamba_expand": 2, "position_embedding_type": "nope", "layer_types": ["mamba", "attention", "mamba"],
}  # fmt: skip
_DECI = [
    {"attention": {"n_heads_in_group": 2, "replace_with_linear": False}, "ffn": {"ffn_mult": 6.0}},
    {"attention": {"n_heads_in_group": 2, "replace_with_linear": False}, "ffn": {"ffn_mult": 6.0}},
    {"attention": {"n_heads_in_group": 2, "replace_with_linear": False}, "ffn": {"ffn_mult": 6.0}},
]

CASES: dict[str, Case] = {
    "llama": Case("llama", "llama", vocabulary="spm"),
    "llama-bpe-tied": Case("llama", "llama", {"tie_word_embeddings": True, **_rope(_THETA_ALONE)}),
    "llama-head_dim": Case("llama", "llama", {"head_dim": 32}),
    "llama-bias": Case("llama", "llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-eps": Case("llama", "llama", {"rms_norm_eps": 0.03}),
    "llama-linear": Case("llama", "llama", _rope(_LINEAR)),
    "llama-yarn": Case("llama", "llama", _rope(_YARN)),
    "llama-llama3": Case("llama", "llama", _rope(_LLAMA3)),
    "llama-mixtral": Case("llama", "mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "llama-mixtral-no-freq_base": Case("llama", "mixtral", {
        "num_local_experts": 8, "num_experts_per_tok": 2, **_rope({"rope_type": "default", "rope_theta": 10000.0})},
        keys={"rope.freq_base": None}),
    "llama-mistral": Case("llama", "mistral", {"sliding_window": None}, vocabulary="spm"),
    "llama-scale_linear": Case("llama", "llama", _rope(_LINEAR), keys={
        "rope.scaling.type": None, "rope.scaling.factor": None, "rope.scale_linear": 4.0}),
    "llama-factor-alone": Case("llama", "llama", _rope(_LINEAR), keys={"rope.scaling.type": None}),
    "llama-factor-of-none": Case("llama", "llama", _rope(_THETA_ALONE), keys={
        "rope.scaling.type": "none", "rope.scaling.factor": 4.0}),
    "llama-yarn-attn_factor": Case("llama", "llama", _rope(
        _YARN, attention_factor=1.3 * (0.1 * math.log(_YARN["factor"]) + 1)), keys={
        "rope.scaling.yarn_attn_factor": None, "rope.scaling.attn_factor": 1.3}),
    "llama-yarn-no-original": Case("llama", "llama", _rope({**_YARN, "original_max_position_embeddings": 1024}),
                                   keys={"rope.scaling.original_context_length": None}),
    "llama-yarn-betas": Case("llama", "llama", _rope(_YARN, beta_fast=8.0, beta_slow=2.0),
                             apart="it reads the betas of Mistral 3 and Grok alone"),
    "llama-no-head_count_kv": Case("llama", "llama", {"num_key_value_heads": 4},
                                   keys={"attention.head_count_kv": None}),
    "mistral3": Case("mistral3", "ministral3", {"head_dim": 32, **_rope(
        _YARN, beta_fast=16.0, beta_slow=2.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1)},
        refused=_UNKNOWN),
    "deci": Case("deci", "llama", {"intermediate_size": 256},
                 saved={"architectures": ["DeciLMForCausalLM"], "block_configs": _DECI}, refused=_UNKNOWN),
    "deci-varied": Case("deci", "llama", {"intermediate_size": 256}, saved={
        "architectures": ["DeciLMForCausalLM"], "num_key_value_heads_per_layer": [2, 2, 2]}, refused=_UNKNOWN),
    "qwen2": Case("qwen2", "qwen2", _rope(_THETA_ALONE)),
    "qwen2-tied": Case("qwen2", "qwen2", {"tie_word_embeddings": True, "rms_norm_eps": 0.03}),
    "qwen2-yarn": Case("qwen2", "qwen2", _rope(_YARN)),
    "qwen2moe": Case("qwen2moe", "qwen2_moe", {**_MOE, "shared_expert_intermediate_size": 40}),
    "qwen3": Case("qwen3", "qwen3", {"head_dim": 32, **_rope(_THETA_ALONE)}),
    "qwen3-head_dim-128": Case("qwen3", "qwen3", {"head_dim": 128}),
    "qwen3-no-key_length": Case("qwen3", "qwen3", {"head_dim": 16}, keys={
        "attention.key_length": None, "attention.value_length": None}),
    "qwen3-yarn": Case("qwen3", "qwen3", {"head_dim": 32, **_rope(_YARN)}),
    "qwen3moe": Case("qwen3moe", "qwen3_moe", {**_MOE, "head_dim": 32, "norm_topk_prob": True}),
    "qwen3moe-yarn": Case("qwen3moe", "qwen3_moe", {
        **_MOE, "head_dim": 32, "norm_topk_prob": True, **_rope(_YARN)}),
    "gpt-oss": Case("gpt-oss", "gpt_oss", {**_GPT_OSS, **_rope(
        # llama.cpp rounds the range of columns that are turned in part, the model does not: here it is 0 to 4.
        {**_YARN, "rope_theta": 32.0**4, "original_max_position_embeddings": 201},
        beta_fast=32.0, beta_slow=1.0, truncate=False)}, lengths=(5, 40), bound=2e-3),
    "gpt-oss-plain": Case("gpt-oss", "gpt_oss", {**_GPT_OSS, **_rope(_THETA_ALONE)}),
    "gpt-oss-no-freq_base": Case("gpt-oss", "gpt_oss", {**_GPT_OSS, **_rope(
        {"rope_type": "default", "rope_theta": 10000.0})}, keys={"rope.freq_base": None}),
    "lfm2": Case("lfm2", "lfm2", {
        "block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention", "conv"],
        "conv_L_cache": 3, "block_ff_dim": 96, "tie_word_embeddings": True, **_rope(_THETA_ALONE)}),
    "lfm2moe": Case("lfm2moe", "lfm2_moe", {
        **_MOE, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1, "use_expert_bias": True,
        "tie_word_embeddings": True}, refused=_UNKNOWN),
    "falcon-7b": Case("falcon", "falcon", {
        "num_key_value_heads": ..., "multi_query": True, "parallel_attn": True, "tie_word_embeddings": True},
        saved={"num_kv_heads": 1}, bound=_OTHER_GELU),
    "falcon-40b": Case("falcon", "falcon", {
        "num_key_value_heads": ..., "new_decoder_architecture": True, "num_kv_heads": 2,
        "tie_word_embeddings": True}, bound=_OTHER_GELU),
    "falcon-untied": Case("falcon", "falcon", {
        "num_key_value_heads": ..., "multi_query": True, "parallel_attn": True}, saved={"num_kv_heads": 1},
        bound=_OTHER_GELU),
    "phi3": Case("phi3", "phi3", {"sliding_window": None}, vocabulary="spm"),
    "phi3-partial": Case("phi3", "phi3", {"sliding_window": None, **_rope(
        {"rope_type": "default", "rope_theta": 10000.0}, partial_rotary_factor=0.5)}),
    "phi3-longrope": Case("phi3", "phi3", {
        "original_max_position_embeddings": 256, "sliding_window": None, **_rope(_longrope(8))},
        vocabulary="spm", lengths=(5, 40, 200, 300)),
    "phi3-longrope-partial": Case("phi3", "phi3", {
        "original_max_position_embeddings": 256, "sliding_window": None,
        **_rope(_longrope(6), partial_rotary_factor=0.75)}, lengths=(5, 40, 200, 300)),
    "phi3-window": Case("phi3", "phi3", {"sliding_window": 16}, vocabulary="spm",
                        apart="it reads the window and attends to everything"),
    "phi2": Case("phi2", "phi", {"num_key_value_heads": 4, "intermediate_size": 256, **_rope(
        {"rope_type": "default", "rope_theta": 10000.0}, partial_rotary_factor=0.5)}, refused=_UNKNOWN),
    "bloom": Case("bloom", "bloom", {
        "n_layer": 3, "n_head": 4, "num_key_value_heads": ..., "tie_word_embeddings": True}),
    "bloom-eps": Case("bloom", "bloom", {
        "n_layer": 3, "n_head": 4, "num_key_value_heads": ..., "tie_word_embeddings": True,
        "layer_norm_epsilon": 0.03}),
    "stablelm": Case("stablelm", "stablelm", _rope(
        {"rope_type": "default", "rope_theta": 10000.0}, partial_rotary_factor=0.25)),
    "stablelm-half": Case("stablelm", "stablelm", {"use_qkv_bias": True, **_rope(
        {"rope_type": "default", "rope_theta": 10000.0}, partial_rotary_factor=0.5)}),
    "stablelm-whole": Case("stablelm", "stablelm", _rope(
        {"rope_type": "default", "rope_theta": 10000.0}, partial_rotary_factor=1.0)),
    "stablelm-no-dimension_count": Case("stablelm", "stablelm", _rope(
        {"rope_type": "default", "rope_theta": 10000.0}, partial_rotary_factor=1.0),
        keys={"rope.dimension_count": None}),
    "stablelm-12b": Case("stablelm", "stablelm", {
        "qk_layernorm": True, "use_parallel_residual": True,
        **_rope({"rope_type": "default", "rope_theta": 10000.0}, partial_rotary_factor=0.25)}),
    "gpt2": Case("gpt2", "gpt2", {**_GPT2, "n_inner": None, "tie_word_embeddings": True}, saved={"n_ctx": 1024}),
    "gpt2-untied": Case("gpt2", "gpt2", {**_GPT2, "n_inner": None, "layer_norm_epsilon": 0.03}, saved={"n_ctx": 1024}),
    "starcoder2": Case("starcoder2", "starcoder2", {"sliding_window": None, "tie_word_embeddings": True}),
    "starcoder2-theta": Case("starcoder2", "starcoder2", {"sliding_window": None, **_rope(_THETA_ALONE)}),
    "mamba": Case("mamba", "mamba", {**_MAMBA, "tie_word_embeddings": True}),
    "mamba-untied": Case("mamba", "mamba", {**_MAMBA, "time_step_rank": 8}),
    "mamba-falcon": Case("mamba", "falcon_mamba", {**_MAMBA, "layer_norm_epsilon": 1e-6, "mixer_rms_eps": 1e-6}),
    "mamba2": Case("mamba2", "mamba2", {
        **_MAMBA, "num_heads": 4, "head_dim": 32, "n_groups": 1, "chunk_size": 16}, refused=_UNKNOWN),
    "nemotron": Case("nemotron", "nemotron", _rope(
        {"rope_type": "default", "rope_theta": 10000.0}, partial_rotary_factor=0.5)),
    "nemotron-whole": Case("nemotron", "nemotron", {"norm_eps": 0.03, **_rope(
        {"rope_type": "default", "rope_theta": _THETA}, partial_rotary_factor=1.0)}),
    "nemotron-no-dimension_count": Case("nemotron", "nemotron", _rope(
        {"rope_type": "default", "rope_theta": _THETA}, partial_rotary_factor=1.0),
        keys={"rope.dimension_count": None}),
    "gemma": Case("gemma", "gemma", {"head_dim": 32, "tie_word_embeddings": True}, vocabulary="spm"),
    "gemma2": Case("gemma2", "gemma2", {**_GEMMA2, "num_hidden_layers": 4}, vocabulary="spm"),
    "gemma2-softcaps": Case("gemma2", "gemma2", {
        **_GEMMA2, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5}, vocabulary="spm"),
    "gemma2-defaults": Case("gemma2", "gemma2", {**_GEMMA2, "sliding_window": 4096}, vocabulary="spm", keys={
        "attention.sliding_window": None, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2-27b": Case("gemma2", "gemma2", {
        **_GEMMA2, "num_hidden_layers": 46, "query_pre_attn_scalar": 16}, vocabulary="spm"),
    "gemma3": Case("gemma3", "gemma3_text", {**_GEMMA3, "rope_parameters": _GEMMA3_ROPE}, vocabulary="spm"),
    "gemma3-pattern": Case("gemma3", "gemma3_text", {
        **_GEMMA3, "rope_parameters": _GEMMA3_ROPE,
        "layer_types": [("full_attention" if i % 3 == 2 else "sliding_attention") for i in range(7)]},
        vocabulary="spm", keys={"attention.sliding_window_pattern": 3}),
    "gemma3-pattern-array": Case("gemma3", "gemma3_text", {
        **_GEMMA3, "rope_parameters": _GEMMA3_ROPE,
        "layer_types": [("full_attention" if i in (0, 3) else "sliding_attention") for i in range(7)]},
        vocabulary="spm", keys={"attention.sliding_window_pattern": [i not in (0, 3) for i in range(7)]}),
    "gemma3-no-window": Case("gemma3", "gemma3_text", {
        **_GEMMA3, "rope_parameters": _GEMMA3_ROPE, "layer_types": ["full_attention"] * 7},
        vocabulary="spm", keys={"attention.sliding_window": 0}),
    "gemma3-linear": Case("gemma3", "gemma3_text", {**_GEMMA3, "rope_parameters": {
        **_GEMMA3_ROPE, "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}}},
        vocabulary="spm"),
    "gemma3-thetas": Case("gemma3", "gemma3_text", {**_GEMMA3, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 5e5}}}, vocabulary="spm"),
    "gemma3-27b": Case("gemma3", "gemma3_text", {
        **_GEMMA2, "num_hidden_layers": 62, "query_pre_attn_scalar": 16, "rope_parameters": _GEMMA3_ROPE,
        "layer_types": [("full_attention" if i % 6 == 5 else "sliding_attention") for i in range(62)]},
        vocabulary="spm"),
    "gemma3-softcap": Case("gemma3", "gemma3_text", {
        **_GEMMA3, "rope_parameters": _GEMMA3_ROPE, "final_logit_softcapping": 1.5}, vocabulary="spm"),
    "gemma4": Case("gemma4", "gemma4_text", _GEMMA4),
    "gemma4-e": Case("gemma4", "gemma4_text", {
        **_GEMMA4, "num_kv_shared_layers": 3, "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": NUM_WORDS}),
    "gemma4-e-wide": Case("gemma4", "gemma4_text", {
        **_GEMMA4, "num_kv_shared_layers": 3, "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": NUM_WORDS, "use_double_wide_mlp": True}),
    "gemma4-kv": Case("gemma4", "gemma4_text", {
        **_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4-moe": Case("gemma4", "gemma4_text", {
        **_GEMMA4, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 48}),
    "minimax-m2": Case("minimax-m2", "minimax_m2", {
        "head_dim": 32, "rotary_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2,
        "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, **_rope(
            {"rope_type": "default", "rope_theta": _THETA}, partial_rotary_factor=0.5)}),
    "qwen35": Case("qwen35", "qwen3_5_text", _QWEN35, bound=_GATED_NORM),
    "qwen35-layers": Case("qwen35", "qwen3_5_text", {
        **_QWEN35, "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]},
        bound=_GATED_NORM),
    # Columns that the sections do not reach are not turned by llama.cpp: they interleave without a rest.
    "qwen35-interval": Case("qwen35", "qwen3_5_text", {
        **_QWEN35, "full_attention_interval": 2, "layer_types": ["linear_attention", "full_attention"] * 2,
        **_rope({**_QWEN35["rope_parameters"], "mrope_section": [3, 3, 2]}, partial_rotary_factor=0.5)},
        bound=_GATED_NORM),
    "qwen35-no-dimension_count": Case("qwen35", "qwen3_5_text", {
        **_QWEN35, **_rope({**_QWEN35["rope_parameters"], "mrope_section": [6, 5, 5]}, partial_rotary_factor=1.0)},
        keys={"rope.dimension_count": None}, bound=_GATED_NORM),
    "qwen35moe": Case("qwen35moe", "qwen3_5_moe_text", _QWEN35_MOE, bound=_GATED_NORM),
    "granite": Case("granite", "granite", _GRANITE),
    "granitemoe": Case("granitemoe", "granitemoe", {**_GRANITE, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "granitehybrid": Case("granitehybrid", "granitemoehybrid", _GRANITE_HYBRID,
                          saved={"layer_types": ["mamba", "attention", "mamba"]}),
    "deepseek2": Case("deepseek2", "deepseek_v3", {
        **_MLA, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
        saved={"scoring_func": "sigmoid"}, refused=_UNKNOWN),
    "command-r": Case("command-r", "cohere", {"logit_scale": 0.25, "tie_word_embeddings": True}, refused=_UNKNOWN),
    "cohere2": Case("cohere2", "cohere2", {"logit_scale": 0.25, "tie_word_embeddings": True, "sliding_window": 16,
                                           "num_hidden_layers": 4}, saved={"rotary_pct": 1.0}, refused=_UNKNOWN),
    "olmo2": Case("olmo2", "olmo2", refused=_UNKNOWN),
    "olmoe": Case("olmoe", "olmoe", {"num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 2},
                  refused=_UNKNOWN),
    "glm4": Case("glm4", "glm4", {"head_dim": 32, **_rope(
        {"rope_type": "default", "rope_theta": 10000.0}, partial_rotary_factor=0.5)}, refused=_UNKNOWN),
    "smollm3": Case("smollm3", "smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}, refused=_UNKNOWN),
    "exaone4": Case("exaone4", "exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3},
                    refused=_UNKNOWN),
    "seed_oss": Case("seed_oss", "seed_oss", {"head_dim": 32}, refused=_UNKNOWN),
    "ernie4_5": Case("ernie4_5", "ernie4_5", {"head_dim": 32}, refused=_UNKNOWN),
    "hunyuan-dense": Case("hunyuan-dense", "hunyuan_v1_dense", {"head_dim": 32}, refused=_UNKNOWN),
    "arcee": Case("arcee", "arcee", {"head_dim": 16}, refused=_UNKNOWN),
}  # fmt: skip


def make(name: str) -> PreTrainedModel:
    """The model of a case, random from a fixed seed."""
    case = CASES[name]
    fields = {key: value for key, value in {**_COMMON, **case.fields}.items() if value is not ...}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(case.kind, **fields), dtype=torch.float32)
    named = [*model.named_parameters(), *model.named_buffers()]
    kept = model.state_dict().keys()
    with torch.no_grad():
        for place, values in named:
            if place not in kept or not values.is_floating_point():
                continue
            if values.dim() < 2 or place.endswith("A_log"):
                values += 0.2 * torch.randn_like(values)
            else:
                values.normal_(std=1.4 / math.sqrt(values.shape[-1]))
    return model.eval()
