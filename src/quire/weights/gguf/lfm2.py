"""LFM 2: layers of short convolutions, and some attention layers."""

from __future__ import annotations

from typing import Any

from transformers.modeling_gguf_pytorch_utils import Lfm2TensorProcessor

from quire.weights.gguf.architecture import (
    Architecture,
    attending_layers,
    decoder_fields,
    drop_head_dim,
    expect_no_experts,
    has_tensor,
    with_whole_rope,
)
from quire.weights.gguf.header import GGUFHeader

__all__ = ["ARCHITECTURES"]


def _lfm2(header: GGUFHeader) -> dict[str, Any]:
    expect_no_experts(header)
    attending, heads = attending_layers(header)
    fields = with_whole_rope(header, decoder_fields(header, kv_heads=heads))
    drop_head_dim(header, fields)
    header.expect("attention.sliding_window", 0)
    return fields | {
        "model_type": "lfm2",
        "layer_types": ["full_attention" if attends else "conv" for attends in attending],
        "norm_eps": header.read("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": header.read("shortconv.l_cache"),
        "conv_bias": has_tensor(header, "shortconv.in_proj.bias"),
        "block_auto_adjust_ff_dim": False,  # the header has the adjusted width
    }


ARCHITECTURES = {"lfm2": Architecture(_lfm2, Lfm2TensorProcessor)}
