"""A tiny Qwen 3 written as a GGUF file, as llama.cpp's converter writes one: its names, codes and vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

NUM_LAYERS = 2
WORDS = [*bytes_to_unicode().values(), "ab", "abc", "<|end|>", "<|turn|>"]
MERGES = ["a b", "ab c"]
END, TURN = len(WORDS) - 2, len(WORDS) - 1
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 768, "norm_topk_prob": True}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}<|turn|>{% endfor %}"


def tiny(seed: int = 0, kind: str = "qwen3", *, tied: bool = False) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        kind, hidden_size=64, intermediate_size=96, num_hidden_layers=NUM_LAYERS, num_attention_heads=2,
        num_key_value_heads=1, head_dim=128 if kind == "qwen3" else 32, vocab_size=len(WORDS),
        max_position_embeddings=256, tie_word_embeddings=tied, initializer_range=0.2,
        **(_EXPERTS if kind == "qwen3_moe" else {}),
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def write(
    path: Path,
    model: PreTrainedModel,
    *,
    architecture: str = "qwen3",
    quantized: bool | Callable[[str], str] = True,
    parts: int = 1,
) -> Path:
    """Linear weights, experts and embeddings in Q8_0 where `quantized`, or in what it says of their names; everything
    else in float32."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(NUM_LAYERS)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if architecture == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if parts > 1:
        writer.add_uint16("split.count", parts)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3 if word in ("<|end|>", "<|turn|>") else 1 for word in WORDS])
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(END)
    writer.add_eot_token_id(TURN)
    writer.add_chat_template(TEMPLATE)
    kinds = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen3moe": gguf.MODEL_ARCH.QWEN3MOE}
    names = gguf.get_tensor_name_map(kinds.get(architecture, gguf.MODEL_ARCH.QWEN3), NUM_LAYERS)
    state = _with_gate_and_up_apart(model.state_dict())
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight")
    for name, weight in state.items():
        values = weight.numpy()
        stored = names.get_name(name, try_suffixes=(".weight",))
        said = quantized(name) if callable(quantized) else "Q8_0"
        is_coded = values.ndim >= 2 and not name.endswith("mlp.gate.weight")
        kind = gguf.GGMLQuantizationType[said] if quantized and is_coded else None
        data = values if kind is None else gguf.quantize(values, kind)
        writer.add_tensor(stored, np.ascontiguousarray(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _with_gate_and_up_apart(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As files have experts."""
    apart: dict[str, torch.Tensor] = {}
    for name, weight in state.items():
        if name.endswith("experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            apart[prefix + "gate_proj.weight"], apart[prefix + "up_proj.weight"] = weight.chunk(2, dim=1)
        else:
            apart[name + ".weight" if name.endswith("experts.down_proj") else name] = weight
    return apart
