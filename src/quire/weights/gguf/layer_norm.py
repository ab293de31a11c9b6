"""Decoders with LayerNorm: GPT-2, BLOOM, Falcon, StarCoder 2, StableLM, Nemotron."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers.modeling_gguf_pytorch_utils import (
    BloomTensorProcessor,
    GGUFTensor,
    GPT2TensorProcessor,
    NemotronTensorProcessor,
    TensorProcessor,
)

from quire.weights.gguf.architecture import (
    Architecture,
    already_placed,
    decoder_fields,
    drop_head_dim,
    expect_no_experts,
    has_tensor,
    head_dim,
    with_partial_rope,
    with_whole_rope,
)
from quire.weights.gguf.header import GGUFHeader

__all__ = ["ARCHITECTURES"]


def _gpt2(header: GGUFHeader) -> dict[str, Any]:
    expect_no_experts(header)
    fields = decoder_fields(header)
    _expect_plain_heads(header, fields)
    heads, width = fields.pop("num_attention_heads"), fields.pop("hidden_size")
    del fields["num_key_value_heads"]
    return fields | {
        "model_type": "gpt2",
        "n_positions": fields.pop("max_position_embeddings"),
        "n_embd": width,
        "n_layer": fields.pop("num_hidden_layers"),
        "n_head": heads,
        "n_inner": fields.pop("intermediate_size"),
        "layer_norm_epsilon": header.read("attention.layer_norm_epsilon"),
    }


def _bloom(header: GGUFHeader) -> dict[str, Any]:
    expect_no_experts(header)
    fields = decoder_fields(header, feed_forward=False)
    header.expect("feed_forward_length", 4 * fields["hidden_size"])
    header.expect("attention.max_alibi_bias", 8.0)
    _expect_plain_heads(header, fields)
    del fields["num_key_value_heads"]
    return fields | {
        "model_type": "bloom",
        "seq_length": fields.pop("max_position_embeddings"),
        "n_layer": fields.pop("num_hidden_layers"),
        "n_head": fields.pop("num_attention_heads"),
        "layer_norm_epsilon": header.read("attention.layer_norm_epsilon"),
    }


def _falcon(header: GGUFHeader) -> dict[str, Any]:
    expect_no_experts(header)
    fields = with_whole_rope(header, decoder_fields(header))
    drop_head_dim(header, fields)
    groups = fields.pop("num_key_value_heads")
    grouped = groups > 1
    fields |= {
        "model_type": "falcon",
        "ffn_hidden_size": fields.pop("intermediate_size"),
        "layer_norm_epsilon": header.read("attention.layer_norm_epsilon"),
        "multi_query": not grouped,
        "num_kv_heads": groups,
        "new_decoder_architecture": grouped,
        "bias": has_tensor(header, "attn_qkv.bias"),
    }
    if grouped:
        fields["num_ln_in_parallel_attn"] = 2 if has_tensor(header, "attn_norm_2.weight") else 1
    return fields


def _starcoder2(header: GGUFHeader) -> dict[str, Any]:
    expect_no_experts(header)
    fields = with_whole_rope(header, decoder_fields(header))
    drop_head_dim(header, fields)
    return fields | {
        "model_type": "starcoder2",
        "norm_epsilon": header.read("attention.layer_norm_epsilon"),
        "sliding_window": header.read("attention.sliding_window", None) or None,
        "use_bias": has_tensor(header, "attn_q.bias"),
    }


def _stablelm(header: GGUFHeader) -> dict[str, Any]:
    expect_no_experts(header)
    fields = with_partial_rope(header, decoder_fields(header))
    drop_head_dim(header, fields)
    parallel = not has_tensor(header, "ffn_norm.weight")
    header.expect("use_parallel_residual", parallel)
    return fields | {
        "model_type": "stablelm",
        "layer_norm_eps": header.read("attention.layer_norm_epsilon"),
        "use_parallel_residual": parallel,
        "use_qkv_bias": has_tensor(header, "attn_q.bias"),
        "qk_layernorm": has_tensor(header, "attn_q_norm.weight"),
    }


def _nemotron(header: GGUFHeader) -> dict[str, Any]:
    expect_no_experts(header)
    fields = with_partial_rope(header, decoder_fields(header))
    return fields | {
        "model_type": "nemotron",
        "norm_eps": header.read("attention.layer_norm_epsilon"),
        "attention_bias": has_tensor(header, "attn_q.bias"),
        "mlp_bias": has_tensor(header, "ffn_up.bias"),
    }


def _expect_plain_heads(header: GGUFHeader, fields: dict[str, Any]) -> None:
    """Refuse heads that share keys, or whose width is not the hidden size divided by their number."""
    header.expect("attention.head_count_kv", fields["num_attention_heads"])
    header.expect("attention.key_length", fields["hidden_size"] // fields["num_attention_heads"])
    head_dim(header, fields)


class _FalconTensors(TensorProcessor):
    """The file has all queries, then all keys, then all values; the model groups them by key head."""

    def process(self, weights: np.ndarray, name: str, **kwargs: Any) -> Any:
        if ".attn_qkv." in name:
            heads, groups = self.config["num_attention_heads"], self.config["num_kv_heads"]
            width = weights.shape[0] // (heads + 2 * groups)
            rows = weights.reshape(heads + 2 * groups, width, *weights.shape[1:])
            queries, keys, values = np.split(rows, [heads, heads + groups])
            grouped = queries.reshape(groups, heads // groups, *queries.shape[1:])
            merged = np.concatenate([grouped, keys[:, None], values[:, None]], axis=1)
            weights = merged.reshape(weights.shape)
        return GGUFTensor(weights, name, {})


class _StableLmTensors(TensorProcessor):
    """The file has the norms of a layer's heads in one tensor, the model a module for each head."""

    def process(self, weights: np.ndarray, name: str, **kwargs: Any) -> Any:
        for kind in "qk":
            if name.endswith(f".attn_{kind}_norm.weight"):
                prefix = f"model.layers.{name.split('.')[1]}.self_attn.{kind}_layernorm.norms."
                parsed = kwargs["parsed_parameters"]["tensors"]
                parsed |= {f"{prefix}{head}.weight": torch.tensor(row) for head, row in enumerate(weights)}
                return already_placed(weights)
        return GGUFTensor(weights, name, {})


ARCHITECTURES = {
    "gpt2": Architecture(_gpt2, GPT2TensorProcessor),
    "bloom": Architecture(_bloom, BloomTensorProcessor),
    "falcon": Architecture(_falcon, _FalconTensors),
    "starcoder2": Architecture(_starcoder2),
    "stablelm": Architecture(_stablelm, _StableLmTensors),
    "nemotron": Architecture(
        _nemotron,
        NemotronTensorProcessor,
        no_effect={
            "attention.layer_norm_rms_epsilon": "its norms are LayerNorms, which have another key for their epsilon"
        },
    ),
}
