"""The content of a GGUF file for each model type: its name there, its metadata, and each tensor's name and change.

As llama.cpp's own convert_hf_to_gguf does it (that of llama-cpp-python 0.3.36), which cannot be used here: it refuses
tokenizers that it does not know. Names come from the `gguf` package's own map; the rest is below.

    lfm2              the convolution's middle dimension of 1 goes
    granitemoehybrid  A = -exp(A_log); A, D and the gated norm get a dimension; gate and up of the MLP are cut apart
    qwen3_5_text      A likewise; norms that count from 0 get 1 added, all but the gated one

Queries and keys stay in the order of transformers: these types rotate halves, or not at all.
"""

from __future__ import annotations

import functools
from typing import Any

import gguf
import torch
from gguf import GGUFWriter

__all__ = ["ARCHITECTURES", "add_metadata", "tensors_of"]

ARCHITECTURES = {
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "granitemoehybrid": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
}
_ATTENTION = ("attention", "full_attention")  # as a config calls a layer of attention


def add_metadata(writer: GGUFWriter, config: dict[str, Any]) -> None:
    """The keys of the model, vocabulary apart. config: of config.json."""
    kind = config["model_type"]
    heads, layers = config["num_attention_heads"], config["layer_types"] if kind != "qwen3" else []
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config["num_key_value_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config.get("shared_intermediate_size") or config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(heads)
    if kind in ("lfm2", "granitemoehybrid"):  # none: a layer that is recurrent
        writer.add_head_count_kv([kv_heads if layer in _ATTENTION else 0 for layer in layers])
    else:
        writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["norm_eps" if kind == "lfm2" else "rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if kind == "lfm2":
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    elif kind == "granitemoehybrid":
        _add_granite(writer, config, head_dim)
    elif kind == "qwen3_5_text":
        _add_qwen35(writer, config, head_dim)


def _add_granite(writer: GGUFWriter, config: dict[str, Any], head_dim: int) -> None:
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_inner_size(config["mamba_n_heads"] * config["mamba_d_head"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])


def _add_qwen35(writer: GGUFWriter, config: dict[str, Any], head_dim: int) -> None:
    key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if key_heads != value_heads:  # llama.cpp has them in another order then
        raise SystemExit(f"expected as many key as value heads, got {key_heads} and {value_heads}")
    every = config["layer_types"].index("full_attention") + 1
    expected = [
        "linear_attention" if (layer + 1) % every else "full_attention"
        for layer in range(config["num_hidden_layers"])
    ]
    if config["layer_types"] != expected:
        raise SystemExit(f"expected full attention in every {every}th layer, got {config['layer_types']}")
    rope = config["rope_parameters"]
    writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([*rope.get("mrope_section", (11, 11, 10)), 0])
    writer.add_full_attention_interval(every)
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(key_heads)
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * value_heads)
    writer.add_ssm_time_step_rank(value_heads)


def tensors_of(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The file's entries for a tensor of transformers: names and values, in bfloat16, or in float32 where llama.cpp
    takes nothing else: vectors, norms, convolutions, and tensors of one number per head.

    *raises:* KeyError for a name that the architecture does not have.
    """
    if name == "lm_head.weight":  # tied: the embedding serves
        return {}
    if name.endswith("shared_mlp.input_linear.weight"):
        gate, up = tensor.to(torch.bfloat16).chunk(2)
        halves = {"gate_proj": gate, "up_proj": up}
        stem = name.removesuffix("shared_mlp.input_linear.weight")
        return {_gguf_name(f"{stem}mlp.{part}.weight", config): half for part, half in halves.items()}
    target = _gguf_name(
        name.replace("shared_mlp.output_linear", "mlp.down_proj").replace(".dt_bias", ".dt_proj.bias"), config
    )
    is_float32 = tensor.ndim == 1 or name.endswith(("conv1d.weight", "conv.conv.weight"))
    tensor = tensor.to(torch.float32 if is_float32 else torch.bfloat16)
    kind = config["model_type"]
    if name.endswith(".A_log"):
        tensor = -tensor.exp()
    elif tensor.ndim == 3:
        tensor = tensor.squeeze(1)
    elif kind == "qwen3_5_text" and name.endswith("norm.weight") and "linear_attn" not in name:
        tensor = tensor + 1
    if kind == "granitemoehybrid" and name.endswith((".A_log", ".D")):
        tensor = tensor[:, None]
    elif kind == "granitemoehybrid" and name.endswith("mamba.norm.weight"):
        tensor = tensor.reshape(config["mamba_n_groups"], -1)
    return {target: tensor.contiguous()}


def _gguf_name(name: str, config: dict[str, Any]) -> str:
    target = _names(config["model_type"], config["num_hidden_layers"]).get_name(name, (".weight", ".bias"))
    if target is None:
        raise KeyError(f"{name} has no name in a GGUF file of {config['model_type']}")
    return target


@functools.cache
def _names(kind: str, num_layers: int) -> gguf.TensorNameMap:
    return gguf.get_tensor_name_map(ARCHITECTURES[kind], num_layers)
