"""LFM 2: layers of short convolutions, and some that attend."""

from __future__ import annotations

from typing import Any

from transformers.modeling_gguf_pytorch_utils import Lfm2TensorProcessor

from quire.model.gguf.architecture import (
    Architecture,
    decoder,
    drop_head_dim,
    expect_no_experts,
    has_tensor,
    kv_heads_of_some,
    with_whole_rope,
)
from quire.model.gguf.header import GGUFHeader

__all__ = ["ARCHITECTURES"]


def _lfm2(header: GGUFHeader) -> dict[str, Any]:
    expect_no_experts(header)
    attending, heads = kv_heads_of_some(header)
    fields = with_whole_rope(header, decoder(header, kv_heads=heads))
    drop_head_dim(header, fields)
    header.expect("attention.sliding_window", 0)
    return fields | {
        "model_type": "lfm2",
        "layer_types": ["full_attention" if one else "conv" for one in attending],
        "norm_eps": header.take("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": header.take("shortconv.l_cache"),
        "conv_bias": has_tensor(header, "shortconv.in_proj.bias"),
        "block_auto_adjust_ff_dim": False,  # the header has the width that came of it
    }


ARCHITECTURES = {"lfm2": Architecture(_lfm2, Lfm2TensorProcessor)}
