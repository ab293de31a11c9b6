"""Qwen 2 and 3, dense and with experts."""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers.modeling_gguf_pytorch_utils import GGUFTensor, Qwen2MoeTensorProcessor

from quire.weights.gguf.architecture import (
    Architecture,
    decoder_fields,
    drop_head_dim,
    expect_no_experts,
    expert_counts,
    has_tensor,
    with_whole_rope,
)
from quire.weights.gguf.header import GGUFHeader

__all__ = ["ARCHITECTURES", "MoeTensors"]

_NO_EFFECT = {
    "rope.dimension_sections": "for positions in pictures; in a text all sections have the token's position"
}


def _qwen(header: GGUFHeader, model_type: str) -> dict[str, Any]:
    fields = with_whole_rope(header, decoder_fields(header)) | {"model_type": model_type}
    fields["rms_norm_eps"] = header.read("attention.layer_norm_rms_epsilon")
    return fields


def _qwen2(header: GGUFHeader) -> dict[str, Any]:
    expect_no_experts(header)
    fields = _qwen(header, "qwen2")
    drop_head_dim(header, fields)
    return fields


def _qwen3(header: GGUFHeader) -> dict[str, Any]:
    expect_no_experts(header)
    return _qwen(header, "qwen3") | {"attention_bias": has_tensor(header, "attn_q.bias")}


def _expert_fields(header: GGUFHeader) -> dict[str, Any]:
    for key in ("expert_group_count", "expert_group_used_count"):
        header.expect(key, 0, 1)
    header.expect("expert_weights_scale", 1.0, 0.0)
    header.expect("expert_gating_func", 1)  # a softmax
    count, used = expert_counts(header)
    return {"num_experts": count, "num_experts_per_tok": used}


def _qwen2_moe(header: GGUFHeader) -> dict[str, Any]:
    fields = _qwen(header, "qwen2_moe") | _expert_fields(header)
    drop_head_dim(header, fields)
    whole = fields["intermediate_size"]
    return fields | {
        "moe_intermediate_size": header.read_uniform(
            "expert_feed_forward_length", whole // fields["num_experts_per_tok"]
        ),
        "shared_expert_intermediate_size": header.read("expert_shared_feed_forward_length", whole),
        "norm_topk_prob": bool(header.read("expert_weights_norm", False)),
    }


def _qwen3_moe(header: GGUFHeader) -> dict[str, Any]:
    fields = _qwen(header, "qwen3_moe") | _expert_fields(header)
    whole = fields["intermediate_size"]
    return fields | {
        "moe_intermediate_size": header.read_uniform(
            "expert_feed_forward_length", whole // fields["num_experts_per_tok"]
        ),
        "norm_topk_prob": bool(header.read("expert_weights_norm", True)),
        "attention_bias": has_tensor(header, "attn_q.bias"),
    }


class MoeTensors(Qwen2MoeTensorProcessor):
    def process(self, weights: np.ndarray, name: str, **kwargs: Any) -> Any:
        if name.endswith(".ffn_gate_inp_shexp.weight"):  # some files have it as a vector
            return GGUFTensor(weights.reshape(1, -1), name, {})
        return super().process(weights, name, **kwargs)


ARCHITECTURES = {
    "qwen2": Architecture(_qwen2, no_effect=_NO_EFFECT),
    "qwen2moe": Architecture(_qwen2_moe, MoeTensors),
    "qwen3": Architecture(_qwen3, no_effect=_NO_EFFECT),
    "qwen3moe": Architecture(_qwen3_moe, MoeTensors, no_effect=_NO_EFFECT),
}
