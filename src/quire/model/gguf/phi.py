"""Phi 3 and 4."""

from __future__ import annotations

from typing import Any

from quire.model.gguf.architecture import Architecture, decoder, expect_no_experts, with_partial_rope
from quire.model.gguf.header import GGUFHeader

__all__ = ["ARCHITECTURES"]


def _phi3(header: GGUFHeader) -> dict[str, Any]:
    expect_no_experts(header)
    fields = with_partial_rope(header, decoder(header))
    usual = fields["hidden_size"] // fields["num_attention_heads"]
    if fields.pop("head_dim") != usual:
        raise header.refusal("attention.key_length", header.take("attention.key_length"), str(usual))
    most = fields["max_position_embeddings"]
    return fields | {
        "model_type": "phi3",
        "rms_norm_eps": header.take("attention.layer_norm_rms_epsilon"),
        "sliding_window": header.take("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": header.take("rope.scaling.original_context_length", most),
    }


ARCHITECTURES = {"phi3": Architecture(_phi3)}
