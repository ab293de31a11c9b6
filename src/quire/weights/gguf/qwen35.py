"""Qwen 3.5, dense and with experts: gated delta net layers, with attention layers at a fixed interval.

The writer of the file adds one to the weights of the norms except the delta nets' own, and reorders the value heads of
a delta net: the first head of each key head, then the second of each, and so on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers.modeling_gguf_pytorch_utils import GGUFTensor

from quire.weights.gguf.architecture import (
    NO_DENSE_LAYERS,
    Architecture,
    decoder_fields,
    expect_no_experts,
    expert_counts,
    with_partial_rope,
)
from quire.weights.gguf.header import GGUFHeader
from quire.weights.gguf.qwen import MoeTensors

__all__ = ["ARCHITECTURES"]


def _qwen35(header: GGUFHeader) -> dict[str, Any]:
    expect_no_experts(header)
    return _hybrid(header, decoder_fields(header)) | {"model_type": "qwen3_5_text"}


def _qwen35_moe(header: GGUFHeader) -> dict[str, Any]:
    count, used = expert_counts(header)
    header.expect("expert_weights_norm", True)
    header.expect("expert_weights_scale", 1.0, 0.0)
    header.expect("expert_gating_func", 1)  # a softmax
    return _hybrid(header, decoder_fields(header, feed_forward=False)) | {
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": header.read_uniform("expert_feed_forward_length"),
        "shared_expert_intermediate_size": header.read("expert_shared_feed_forward_length"),
        "num_experts": count,
        "num_experts_per_tok": used,
    }


def _hybrid(header: GGUFHeader, fields: dict[str, Any]) -> dict[str, Any]:
    num_draft_layers = header.read("nextn_predict_layers", 0)
    num_layers = fields["num_hidden_layers"] - num_draft_layers
    if num_draft_layers:  # layers that draft further tokens do not run
        if not any(".nextn." in name for name in header.tensors):
            raise header.refusal(
                "nextn_predict_layers", num_draft_layers, "0 without tensors of such a layer"
            )
        header.ignore_layers(num_layers)
    fields = with_partial_rope(header, fields)
    sections = header.read("rope.dimension_sections", None)
    if sections:
        num_rotated = header.read("rope.dimension_count", fields["head_dim"])
        if 2 * sum(sections) != num_rotated:
            raise header.refusal(
                "rope.dimension_sections", sections, f"of {num_rotated // 2} columns together"
            )
        fields["rope_parameters"] |= {
            "mrope_section": [section for section in sections if section],
            "mrope_interleaved": True,
        }
    interval = header.read("full_attention_interval", 4)
    usual = [(layer + 1) % interval != 0 for layer in range(num_layers)]
    saved = header.read("attention.recurrent_layers", None)
    recurrent = usual if saved is None else header.read_per_layer("attention.recurrent_layers", num_layers)
    inner, value_heads = header.read("ssm.inner_size"), header.read("ssm.time_step_rank")
    key_heads = header.read("ssm.group_count")
    if value_heads % key_heads:
        raise header.refusal("ssm.time_step_rank", value_heads, f"a multiple of ssm.group_count, {key_heads}")
    return fields | {
        "num_hidden_layers": num_layers,
        "rms_norm_eps": header.read("attention.layer_norm_rms_epsilon"),
        "layer_types": [
            "linear_attention" if is_recurrent else "full_attention" for is_recurrent in recurrent
        ],
        "linear_conv_kernel_dim": header.read("ssm.conv_kernel"),
        "linear_key_head_dim": header.read("ssm.state_size"),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": inner // value_heads,
    }


class _Qwen35Tensors(MoeTensors):
    def perform_fallback_tensor_mapping(
        self, gguf_to_hf_name_map: dict[str, str], suffix: str, qual_name: str, hf_name: str
    ) -> None:
        if hf_name.endswith(".linear_attn.dt_bias"):
            gguf_to_hf_name_map[f"blk.{hf_name.split('.')[2]}.ssm_dt.bias"] = qual_name + hf_name
        else:
            super().perform_fallback_tensor_mapping(gguf_to_hf_name_map, suffix, qual_name, hf_name)

    def process(self, weights: np.ndarray, name: str, **kwargs: Any) -> Any:
        keys, values = self.config["linear_num_key_heads"], self.config["linear_num_value_heads"]
        width = self.config["linear_value_head_dim"]
        first = 2 * keys * self.config["linear_key_head_dim"]  # rows of queries and keys
        kind = name.split(".", 2)[-1]
        if name.endswith("norm.weight") and kind != "ssm_norm.weight":
            weights = weights - 1
        elif kind == "ssm_a":
            weights = _group_by_key_head(np.log(-weights), keys, values)
        elif kind in ("ssm_dt.bias", "ssm_alpha.weight", "ssm_beta.weight"):
            weights = _group_by_key_head(weights, keys, values)
        elif kind == "attn_gate.weight":
            weights = _group_by_key_head(weights, keys, values, width)
        elif kind in ("attn_qkv.weight", "ssm_conv1d.weight"):
            weights = np.concatenate(
                [weights[:first], _group_by_key_head(weights[first:], keys, values, width)]
            )
            weights = weights[:, None] if kind == "ssm_conv1d.weight" else weights
        elif kind == "ssm_out.weight":
            weights = _group_by_key_head(weights.T, keys, values, width).T
        else:
            return super().process(weights, name, **kwargs)
        return GGUFTensor(weights, name, {})


def _group_by_key_head(rows: np.ndarray, keys: int, values: int, width: int = 1) -> np.ndarray:
    """Groups the value heads' rows by key head; the file has the first of each key head, then the second of each.
    width: rows of a value head."""
    tiled = rows.reshape(values // keys, keys, width, *rows.shape[1:])
    return tiled.swapaxes(0, 1).reshape(rows.shape)


ARCHITECTURES = {
    "qwen35": Architecture(_qwen35, _Qwen35Tensors),
    "qwen35moe": Architecture(_qwen35_moe, _Qwen35Tensors, no_effect=NO_DENSE_LAYERS),
}
