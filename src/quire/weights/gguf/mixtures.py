"""gpt-oss and MiniMax M2: experts in every layer."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from transformers.modeling_gguf_pytorch_utils import GGUFTensor, MiniMaxM2TensorProcessor, TensorProcessor

from quire.weights.gguf.architecture import (
    NO_DENSE_LAYERS,
    Architecture,
    already_placed,
    decoder_fields,
    expert_counts,
    head_dim,
    layer_types,
    with_partial_rope,
)
from quire.weights.gguf.header import GGUFHeader
from quire.weights.gguf.rope_parameters import rotary_width, scaled_rope

__all__ = ["ARCHITECTURES"]


def _gpt_oss(header: GGUFHeader) -> dict[str, Any]:
    fields = decoder_fields(header, feed_forward=False)
    width = head_dim(header, fields)
    rotary_width(header, width, is_whole=True)
    rope = scaled_rope(header, fields["max_position_embeddings"], width=width, head_dim=width, truncate=False)
    header.expect("rope.freq_base_swa", rope["rope_theta"])
    count, used = expert_counts(header)
    return fields | {
        "model_type": "gpt_oss",
        "head_dim": width,
        "rope_parameters": rope,
        "rms_norm_eps": header.read("attention.layer_norm_rms_epsilon"),
        "intermediate_size": header.read_uniform("expert_feed_forward_length"),
        "num_local_experts": count,
        "num_experts_per_tok": used,
        "sliding_window": header.read("attention.sliding_window"),
        "layer_types": layer_types(header, fields["num_hidden_layers"], 2),
    }


def _minimax_m2(header: GGUFHeader) -> dict[str, Any]:
    fields = with_partial_rope(header, decoder_fields(header, feed_forward=False))
    header.expect("expert_gating_func", 2)  # a sigmoid
    header.expect("expert_weights_norm", True)
    header.expect("expert_weights_scale", 1.0, 0.0)
    count, used = expert_counts(header)
    return fields | {
        "model_type": "minimax_m2",
        "rms_norm_eps": header.read("attention.layer_norm_rms_epsilon"),
        "intermediate_size": header.read_uniform("expert_feed_forward_length"),
        "num_local_experts": count,
        "num_experts_per_tok": used,
    }


class _GptOssTensors(TensorProcessor):
    """A file has an expert's gate and up apart, with rows of outputs; the model interleaves them as columns."""

    _EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.(weight|bias)")

    def process(self, weights: np.ndarray, name: str, **kwargs: Any) -> Any:
        match = self._EXPERTS.fullmatch(name)
        if match is None:
            return GGUFTensor(weights, name, {})
        layer, projection, suffix = match.groups()
        tensors = kwargs["parsed_parameters"]["tensors"]
        prefix = f"model.layers.{layer}.mlp.experts."
        end = "_bias" if suffix == "bias" else ""
        values = torch.from_numpy(np.array(weights))
        values = values if suffix == "bias" else values.transpose(1, 2)
        if projection == "down":
            tensors[f"{prefix}down_proj{end}"] = values.contiguous()
            return already_placed(weights)
        place = f"{prefix}gate_up_proj{end}"
        if place not in tensors:
            tensors[place] = values.new_zeros(*values.shape[:-1], 2 * values.shape[-1])
        tensors[place][..., projection == "up" :: 2] = values
        return already_placed(weights)


ARCHITECTURES = {
    "gpt-oss": Architecture(_gpt_oss, _GptOssTensors, no_effect=NO_DENSE_LAYERS),
    "minimax-m2": Architecture(_minimax_m2, MiniMaxM2TensorProcessor, no_effect=NO_DENSE_LAYERS),
}
