"""Phi 3 and 4."""

from __future__ import annotations

from typing import Any

from quire.weights.gguf.architecture import (
    Architecture,
    decoder_fields,
    drop_head_dim,
    expect_no_experts,
    with_partial_rope,
)
from quire.weights.gguf.header import GGUFHeader

__all__ = ["ARCHITECTURES"]


def _phi3(header: GGUFHeader) -> dict[str, Any]:
    expect_no_experts(header)
    fields = with_partial_rope(header, decoder_fields(header))
    drop_head_dim(header, fields)
    max_positions = fields["max_position_embeddings"]
    return fields | {
        "model_type": "phi3",
        "rms_norm_eps": header.read("attention.layer_norm_rms_epsilon"),
        "sliding_window": header.read("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": header.read(
            "rope.scaling.original_context_length", max_positions
        ),
    }


ARCHITECTURES = {"phi3": Architecture(_phi3)}
