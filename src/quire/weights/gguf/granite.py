"""Granite: dense, with experts, and hybrid with Mamba 2 layers.

The writer of the file interleaves the halves of each head of queries and keys, and separates gate and up of a
feed-forward layer.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from transformers.modeling_gguf_pytorch_utils import GGUFTensor, LlamaTensorProcessor, Qwen2MoeTensorProcessor

from quire.weights.gguf.architecture import (
    Architecture,
    already_placed,
    attending_layers,
    decoder_fields,
    drop_head_dim,
    expect_no_experts,
    expert_counts,
    has_tensor,
    with_whole_rope,
)
from quire.weights.gguf.header import GGUFHeader

__all__ = ["ARCHITECTURES"]


def _granite(header: GGUFHeader) -> dict[str, Any]:
    expect_no_experts(header)
    header.expect("rope.scaling.finetuned", True)
    fields = _scaled(header, with_whole_rope(header, decoder_fields(header)))
    return fields | {
        "model_type": "granite",
        "attention_bias": has_tensor(header, "attn_q.bias"),
        "mlp_bias": has_tensor(header, "ffn_gate.bias"),
    }


def _granite_moe(header: GGUFHeader) -> dict[str, Any]:
    header.expect("rope.scaling.finetuned", True)
    fields = _with_experts(header, _scaled(header, with_whole_rope(header, decoder_fields(header))))
    shared = fields["shared_intermediate_size"]
    return fields | {"model_type": "granitemoeshared" if shared else "granitemoe"}


def _granite_hybrid(header: GGUFHeader) -> dict[str, Any]:
    attending, heads = attending_layers(header)
    fields = with_whole_rope(header, decoder_fields(header, kv_heads=heads))
    fields = _with_experts(header, _scaled(header, fields))
    inner, state_heads = header.read("ssm.inner_size"), header.read("ssm.time_step_rank")
    if not fields["num_local_experts"]:
        header.expect("expert_shared_feed_forward_length", fields["intermediate_size"], 0)
        fields["shared_intermediate_size"] = fields["intermediate_size"]
    return fields | {
        "model_type": "granitemoehybrid",
        "layer_types": ["attention" if attends else "mamba" for attends in attending],
        "position_embedding_type": "rope" if header.read("rope.scaling.finetuned", True) else None,
        "mamba_n_heads": state_heads,
        "mamba_d_head": inner // state_heads,
        "mamba_expand": inner // fields["hidden_size"],
        "mamba_d_state": header.read("ssm.state_size"),
        "mamba_d_conv": header.read("ssm.conv_kernel"),
        "mamba_n_groups": header.read("ssm.group_count"),
        "mamba_conv_bias": has_tensor(header, "ssm_conv1d.bias"),
        "mamba_proj_bias": has_tensor(header, "ssm_in.bias"),
    }


def _scaled(header: GGUFHeader, fields: dict[str, Any]) -> dict[str, Any]:
    """`fields` with Granite's scales. Its configs have no head width."""
    width = drop_head_dim(header, fields)
    return fields | {
        "rms_norm_eps": header.read("attention.layer_norm_rms_epsilon"),
        "attention_multiplier": header.read("attention.scale", 0.0) or width**-0.5,
        "embedding_multiplier": header.read("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": header.read("residual_scale", 0.0) or 1.0,
        "logits_scaling": header.read("logit_scale", 0.0) or 1.0,
    }


def _with_experts(header: GGUFHeader, fields: dict[str, Any]) -> dict[str, Any]:
    for key in ("expert_group_count", "expert_group_used_count"):
        header.expect(key, 0, 1)
    count, used = expert_counts(header) if header.read("expert_count", 0) else (0, 0)
    if not count:
        header.expect("expert_used_count", 0)
    return fields | {
        "num_local_experts": count,
        "num_experts_per_tok": used,
        "shared_intermediate_size": header.read("expert_shared_feed_forward_length", 0),
    }


class _GraniteTensors(LlamaTensorProcessor, Qwen2MoeTensorProcessor):
    _EXPERTS = re.compile(r"model\.layers\.(\d+)\.block_sparse_moe\.experts\.(gate_up_proj|down_proj)")
    _MERGED = re.compile(r"blk\.(\d+)\.ffn_(gate|up)(?:_shexp)?\.weight")

    def perform_fallback_tensor_mapping(
        self, gguf_to_hf_name_map: dict[str, str], suffix: str, qual_name: str, hf_name: str
    ) -> None:
        names = gguf_to_hf_name_map
        if match := self._EXPERTS.fullmatch(hf_name):
            layer, projection = match.groups()
            for kind in ("down",) if projection == "down_proj" else ("gate", "up"):
                names[f"blk.{layer}.ffn_{kind}_exps"] = qual_name + hf_name
        elif hf_name.endswith(".block_sparse_moe.router.weight"):
            names[f"blk.{hf_name.split('.')[2]}.ffn_gate_inp.weight"] = qual_name + hf_name
        elif hf_name.endswith(".mamba.dt_bias"):
            names[f"blk.{hf_name.split('.')[2]}.ssm_dt.bias"] = qual_name + hf_name

    def process(self, weights: np.ndarray, name: str, **kwargs: Any) -> Any:
        if "_exps." in name:
            return Qwen2MoeTensorProcessor.process(self, weights, name, **kwargs)
        if self.config.get("shared_intermediate_size") and (match := self._MERGED.fullmatch(name)):
            layer, half = match.groups()
            tensors = kwargs["parsed_parameters"]["tensors"]
            place = f"model.layers.{layer}.shared_mlp.input_linear.weight"
            if place not in tensors:
                tensors[place] = torch.zeros(2 * weights.shape[0], weights.shape[1])
            tensors[place].chunk(2)[half == "up"].copy_(torch.from_numpy(np.array(weights)))
            return already_placed(weights)
        if self.config["model_type"] == "granitemoehybrid" and name.endswith(".ffn_down.weight"):
            return GGUFTensor(weights, name.replace("ffn_down", "ffn_down_shexp"), {})
        if name.endswith(".ssm_a"):
            weights = np.log(-weights)
        if name.endswith((".ssm_a", ".ssm_d", ".ssm_norm.weight")):
            weights = weights.reshape(-1)
        if name.endswith(".ssm_conv1d.weight"):
            weights = weights[:, None]
        return LlamaTensorProcessor.process(self, weights, name, **kwargs)


ARCHITECTURES = {
    "granite": Architecture(_granite, _GraniteTensors),
    "granitemoe": Architecture(_granite_moe, _GraniteTensors),
    "granitehybrid": Architecture(_granite_hybrid, _GraniteTensors),
}
