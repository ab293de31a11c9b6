"""Gemma 4: layers of two head widths, per-layer embeddings, layers that share keys, experts."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from transformers.modeling_gguf_pytorch_utils import GGUFTensor, TensorProcessor

from quire.weights.gguf.architecture import Architecture, decoder_fields, expect_no_experts, expert_counts
from quire.weights.gguf.header import GGUFHeader
from quire.weights.gguf.rope_parameters import default_rope

__all__ = ["ARCHITECTURES"]

_FREQS = "rope_freqs.weight"
_STOPPED = np.float32(1e30)  # the factor of a frequency without rotation
_END_IDS = [1, 106, 50]  # <eos>, <turn|>, <|tool_response>: the header has one of the three


def _gemma4(header: GGUFHeader) -> dict[str, Any]:
    num_layers = header.num_layers()
    sliding = header.read_per_layer("attention.sliding_window_pattern", num_layers)
    heads_kv = header.read_per_layer("attention.head_count_kv", num_layers)
    near = _shared_value(header, "attention.head_count_kv", heads_kv, sliding, True)
    far = _shared_value(header, "attention.head_count_kv", heads_kv, sliding, False)
    fields = decoder_fields(header, feed_forward=False, kv_heads=near or far)
    width, far_width = header.read("attention.key_length_swa"), header.read("attention.key_length")
    header.expect("attention.value_length_swa", width)
    header.expect("attention.value_length", far_width)
    header.expect("rope.dimension_count", far_width)
    header.expect("rope.dimension_count_swa", width)
    shared = header.read("attention.shared_kv_layers", 0)
    widths = header.read_per_layer("feed_forward_length", num_layers)
    usual = widths[0]
    doubled = widths[-1] == 2 * usual and shared > 0
    if widths != [
        usual * (2 if doubled and layer >= num_layers - shared else 1) for layer in range(num_layers)
    ]:
        raise header.refusal(
            "feed_forward_length", widths, "one width, or twice it in layers that share keys"
        )
    without_values = [
        layer
        for layer in range(num_layers - shared)
        if not sliding[layer] and f"blk.{layer}.attn_v.weight" not in header.tensors
    ]
    per_layer = header.tensors.get("per_layer_token_embd.weight")
    fields |= {
        "model_type": "gemma4_text",
        "eos_token_id": _END_IDS,
        "head_dim": width,
        "global_head_dim": far_width,
        "num_global_key_value_heads": far,
        "attention_k_eq_v": bool(without_values),
        "intermediate_size": usual,
        "use_double_wide_mlp": doubled,
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": header.read("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": fields["vocab_size"] if per_layer is None else per_layer.shape[0],
        "layer_types": ["sliding_attention" if is_sliding else "full_attention" for is_sliding in sliding],
        "sliding_window": header.read("attention.sliding_window"),
        "rms_norm_eps": header.read("attention.layer_norm_rms_epsilon"),
        "final_logit_softcapping": header.read("final_logit_softcapping", 0.0) or None,
        "rope_parameters": {
            "sliding_attention": default_rope(header.number("rope.freq_base_swa", 10000.0)),
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": _rotated_part(header),
                "rope_theta": header.number("rope.freq_base", 10000.0),
            },
        },
    }
    if not without_values and near != far:
        raise header.refusal(
            "attention.head_count_kv", heads_kv, "one number, as its layers have values of their own"
        )
    if header.read("expert_count", 0):
        count, used = expert_counts(header)
        fields |= {
            "enable_moe_block": True,
            "num_experts": count,
            "top_k_experts": used,
            "moe_intermediate_size": header.read_uniform("expert_feed_forward_length"),
        }
    else:
        expect_no_experts(header)
    return fields


def _shared_value(
    header: GGUFHeader, key: str, values: list[int], sliding: list[bool], near: bool
) -> int | None:
    """The value of all sliding layers, or of all others; None if there are none."""
    matches = {value for value, slides in zip(values, sliding, strict=True) if bool(slides) is near}
    if len(matches) > 1:
        raise header.refusal(key, values, "one number for layers that slide, and one for the others")
    return matches.pop() if matches else None


def _rotated_part(header: GGUFHeader) -> float:
    """The share of rotated frequencies: the first have the factor 1, the others a factor that stops them."""
    factors = header.tensor(_FREQS)
    if factors is None:
        return 1.0
    num_rotated = int((factors == 1.0).sum())
    if not bool((factors[:num_rotated] == 1.0).all()) or not bool(
        (factors[num_rotated:] == float(_STOPPED)).all()
    ):
        raise header.refusal(
            "rope.freq_base", header.read("rope.freq_base", None), f"given with a {_FREQS} of 1 and 1e30"
        )
    return num_rotated / factors.numel()


class _Gemma4Tensors(TensorProcessor):
    _SCALES = re.compile(r"model\.layers\.(\d+)\.router\.(scale|per_expert_scale)")

    def perform_fallback_tensor_mapping(
        self, gguf_to_hf_name_map: dict[str, str], suffix: str, qual_name: str, hf_name: str
    ) -> None:
        if matches := self._SCALES.fullmatch(hf_name):
            layer, scale = matches.groups()
            saved_name = "ffn_gate_inp" if scale == "scale" else "ffn_down_exps"
            gguf_to_hf_name_map[f"blk.{layer}.{saved_name}.scale"] = qual_name + hf_name

    def process(self, weights: np.ndarray, name: str, **kwargs: Any) -> Any:
        return GGUFTensor(weights, name, {})


ARCHITECTURES = {"gemma4": Architecture(_gemma4, _Gemma4Tensors)}
