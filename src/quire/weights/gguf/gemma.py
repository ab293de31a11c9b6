"""Gemma 1 to 3. The writer of the file adds one to the weights of their norms."""

from __future__ import annotations

from typing import Any

from transformers.modeling_gguf_pytorch_utils import Gemma2TensorProcessor

from quire.weights.gguf.architecture import (
    Architecture,
    decoder_fields,
    expect_no_experts,
    layer_types,
    with_whole_rope,
)
from quire.weights.gguf.header import GGUFHeader
from quire.weights.gguf.rope_parameters import default_rope

__all__ = ["ARCHITECTURES"]

# Layers of the two models that scale queries by another width than a head's: Gemma 2 27B, Gemma 3 27B.
_OWN_SCALE = {"gemma2": 46, "gemma3": 62}


def _gemma(header: GGUFHeader) -> dict[str, Any]:
    expect_no_experts(header)
    fields = with_whole_rope(header, decoder_fields(header)) | {"model_type": "gemma"}
    fields["rms_norm_eps"] = header.read("attention.layer_norm_rms_epsilon")
    return fields


def _gemma2(header: GGUFHeader) -> dict[str, Any]:
    expect_no_experts(header)
    fields: dict[str, Any] = with_whole_rope(header, decoder_fields(header)) | {"model_type": "gemma2"}
    header.expect("rope.freq_base_swa", fields["rope_parameters"]["rope_theta"])
    return fields | {
        "rms_norm_eps": header.read("attention.layer_norm_rms_epsilon"),
        "sliding_window": header.read("attention.sliding_window", 4096),
        "layer_types": layer_types(header, fields["num_hidden_layers"], 2),
        "attn_logit_softcapping": header.read("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": header.read("final_logit_softcapping", 30.0) or None,
        "query_pre_attn_scalar": _query_scale(header, fields),
    }


def _gemma3(header: GGUFHeader) -> dict[str, Any]:
    expect_no_experts(header)
    fields: dict[str, Any] = with_whole_rope(header, decoder_fields(header)) | {"model_type": "gemma3_text"}
    window = header.read("attention.sliding_window", 0)
    layers = fields["num_hidden_layers"]
    pattern = layer_types(header, layers, 6)
    if window:
        fields["sliding_window"] = window
    return fields | {
        "rms_norm_eps": header.read("attention.layer_norm_rms_epsilon"),
        "layer_types": pattern if window else ["full_attention"] * layers,
        "rope_parameters": {
            "full_attention": fields["rope_parameters"],
            "sliding_attention": default_rope(header.number("rope.freq_base_swa", 10000.0)),
        },
        "final_logit_softcapping": header.read("final_logit_softcapping", 0.0) or None,
        "query_pre_attn_scalar": _query_scale(header, fields),
    }


def _query_scale(header: GGUFHeader, fields: dict[str, Any]) -> int:
    """`query_pre_attn_scalar`. The file has no key for it: llama.cpp identifies the two models by their layers."""
    if fields["num_hidden_layers"] == _OWN_SCALE[header.architecture]:
        return fields["hidden_size"] // fields["num_attention_heads"]
    return fields["head_dim"]


ARCHITECTURES = {
    "gemma": Architecture(_gemma, Gemma2TensorProcessor),
    "gemma2": Architecture(_gemma2, Gemma2TensorProcessor),
    "gemma3": Architecture(_gemma3, Gemma2TensorProcessor),
}
