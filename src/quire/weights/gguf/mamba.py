"""Mamba and Falcon Mamba, both named mamba in files."""

from __future__ import annotations

from typing import Any

from transformers.modeling_gguf_pytorch_utils import MambaTensorProcessor

from quire.weights.gguf.architecture import Architecture, has_tensor
from quire.weights.gguf.header import GGUFHeader

__all__ = ["ARCHITECTURES"]


def _mamba(header: GGUFHeader) -> dict[str, Any]:
    hidden = header.read("embedding_length")
    for key in ("feed_forward_length", "attention.head_count", "attention.head_count_kv"):
        header.expect(key, 0)
    inner = header.read("ssm.inner_size")
    if inner % hidden:
        raise header.refusal(
            "ssm.inner_size", inner, f"a multiple of {hidden}, the width of the hidden states"
        )
    epsilon = header.read("attention.layer_norm_rms_epsilon")
    fields = {
        "model_type": "mamba",
        "vocab_size": header.num_words,
        "max_position_embeddings": header.read("context_length"),
        "hidden_size": hidden,
        "num_hidden_layers": header.num_layers(),
        "layer_norm_epsilon": epsilon,
        "conv_kernel": header.read("ssm.conv_kernel"),
        "state_size": header.read("ssm.state_size"),
        "time_step_rank": header.read("ssm.time_step_rank"),
        "expand": inner // hidden,
        "use_bias": has_tensor(header, "ssm_in.bias"),
        "use_conv_bias": has_tensor(header, "ssm_conv1d.bias"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        **header.special_ids(),
    }
    if header.read("ssm.dt_b_c_rms", False):
        fields |= {"model_type": "falcon_mamba", "mixer_rms_eps": epsilon}
    return fields


ARCHITECTURES = {"mamba": Architecture(_mamba, MambaTensorProcessor)}
