"""Llama, Mistral and Mixtral, all named llama in files.

The writer of the file interleaves the two halves of each head of queries and keys; the processors undo it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor, Qwen2MoeTensorProcessor

from quire.weights.gguf.architecture import (
    Architecture,
    decoder_fields,
    expect_no_experts,
    expert_counts,
    has_tensor,
    with_whole_rope,
)
from quire.weights.gguf.header import GGUFHeader

__all__ = ["ARCHITECTURES"]


def _llama(header: GGUFHeader) -> dict[str, Any]:
    fields = with_whole_rope(header, decoder_fields(header))
    fields["rms_norm_eps"] = header.read("attention.layer_norm_rms_epsilon")
    if header.read("expert_count", 0):
        for key in ("expert_group_count", "expert_group_used_count"):
            header.expect(key, 0, 1)
        count, used = expert_counts(header)
        return fields | {
            "model_type": "mixtral",
            "num_local_experts": count,
            "num_experts_per_tok": used,
            "sliding_window": header.read("attention.sliding_window", None) or None,
        }
    expect_no_experts(header)
    if window := header.read("attention.sliding_window", 0):
        return fields | {"model_type": "mistral", "sliding_window": window}
    return fields | {
        "model_type": "llama",
        "attention_bias": has_tensor(header, "attn_q.bias"),
        "mlp_bias": has_tensor(header, "ffn_gate.bias"),
    }


class _LlamaTensors(LlamaTensorProcessor, Qwen2MoeTensorProcessor):
    """Processes experts' tensors as Qwen's, others as Llama's."""

    def process(self, weights: np.ndarray, name: str, **kwargs: Any) -> Any:
        if "_exps." in name:
            return Qwen2MoeTensorProcessor.process(self, weights, name, **kwargs)
        return LlamaTensorProcessor.process(self, weights, name, **kwargs)


ARCHITECTURES = {"llama": Architecture(_llama, _LlamaTensors)}
