"""Gemma 4: layers of two widths of heads, per-layer embeddings, layers that share keys, experts."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from transformers.modeling_gguf_pytorch_utils import GGUFTensor, TensorProcessor

from quire.model.gguf.architecture import Architecture, decoder, expect_no_experts, experts
from quire.model.gguf.header import GGUFHeader
from quire.model.gguf.rope_parameters import default_rope

__all__ = ["ARCHITECTURES"]

_FREQS = "rope_freqs.weight"
_STILL = np.float32(1e30)  # the factor of a frequency that does not turn
_END_IDS = [1, 106, 50]  # <eos>, <turn|>, <|tool_response>: the header has one of the three


def _gemma4(header: GGUFHeader) -> dict[str, Any]:
    num_layers = header.num_layers()
    sliding = header.each("attention.sliding_window_pattern", num_layers)
    heads_kv = header.each("attention.head_count_kv", num_layers)
    near = _one_of(header, "attention.head_count_kv", heads_kv, sliding, True)
    far = _one_of(header, "attention.head_count_kv", heads_kv, sliding, False)
    fields = decoder(header, feed_forward=False, kv_heads=near or far)
    width, far_width = header.take("attention.key_length_swa"), header.take("attention.key_length")
    header.expect("attention.value_length_swa", width)
    header.expect("attention.value_length", far_width)
    header.expect("rope.dimension_count", far_width)
    header.expect("rope.dimension_count_swa", width)
    shared = header.take("attention.shared_kv_layers", 0)
    wide = header.each("feed_forward_length", num_layers)
    usual = wide[0]
    doubled = wide[-1] == 2 * usual and shared > 0
    if wide != [
        usual * (2 if doubled and layer >= num_layers - shared else 1) for layer in range(num_layers)
    ]:
        raise header.refusal("feed_forward_length", wide, "one width, or twice it where layers share keys")
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
        "hidden_size_per_layer_input": header.take("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": fields["vocab_size"] if per_layer is None else per_layer.shape[0],
        "layer_types": ["sliding_attention" if one else "full_attention" for one in sliding],
        "sliding_window": header.take("attention.sliding_window"),
        "rms_norm_eps": header.take("attention.layer_norm_rms_epsilon"),
        "final_logit_softcapping": header.take("final_logit_softcapping", 0.0) or None,
        "rope_parameters": {
            "sliding_attention": default_rope(header.number("rope.freq_base_swa", 10000.0)),
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": _turning(header),
                "rope_theta": header.number("rope.freq_base", 10000.0),
            },
        },
    }
    if not without_values and near != far:
        raise header.refusal(
            "attention.head_count_kv", heads_kv, "one number, as its layers have values of their own"
        )
    if header.take("expert_count", 0):
        count, used = experts(header)
        fields |= {
            "enable_moe_block": True,
            "num_experts": count,
            "top_k_experts": used,
            "moe_intermediate_size": header.one("expert_feed_forward_length"),
        }
    else:
        expect_no_experts(header)
    return fields


def _one_of(header: GGUFHeader, key: str, values: list[int], sliding: list[bool], near: bool) -> int | None:
    """The value of the layers that slide, or of the others; None where there are none."""
    found = {value for value, slides in zip(values, sliding, strict=True) if bool(slides) is near}
    if len(found) > 1:
        raise header.refusal(key, values, "one number for layers that slide, and one for the others")
    return found.pop() if found else None


def _turning(header: GGUFHeader) -> float:
    """Which part of the frequencies turns: the first ones have the factor 1, the others one that stops them."""
    factors = header.tensor(_FREQS)
    if factors is None:
        return 1.0
    turning = int((factors == 1.0).sum())
    if not bool((factors[:turning] == 1.0).all()) or not bool((factors[turning:] == float(_STILL)).all()):
        raise header.refusal(
            "rope.freq_base", header.take("rope.freq_base", None), f"given with a {_FREQS} of 1 and 1e30"
        )
    return turning / factors.numel()


class _Gemma4Tensors(TensorProcessor):
    _SCALES = re.compile(r"model\.layers\.(\d+)\.router\.(scale|per_expert_scale)")

    def perform_fallback_tensor_mapping(
        self, gguf_to_hf_name_map: dict[str, str], suffix: str, qual_name: str, hf_name: str
    ) -> None:
        if found := self._SCALES.fullmatch(hf_name):
            layer, scale = found.groups()
            stored = "ffn_gate_inp" if scale == "scale" else "ffn_down_exps"
            gguf_to_hf_name_map[f"blk.{layer}.{stored}.scale"] = qual_name + hf_name

    def process(self, weights: np.ndarray, name: str, **kwargs: Any) -> Any:
        return GGUFTensor(weights, name, {})


ARCHITECTURES = {"gemma4": Architecture(_gemma4, _Gemma4Tensors)}
