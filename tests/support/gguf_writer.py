"""Writes a transformers model as the GGUF file that llama.cpp's converter would make, weights in float32.

What the converter writes: its folder "conversion"; the header of every decoder: set_gguf_parameters of its TextModel.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

ARCHITECTURES = {
    "mistral": "llama", "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss",
    "falcon_mamba": "mamba", "gemma3_text": "gemma3", "gemma4_text": "gemma4", "minimax_m2": "minimax-m2",
    "granitemoeshared": "granitemoe", "granitemoehybrid": "granitehybrid", "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}  # fmt: skip
"""By model type where a file calls it otherwise."""

_LIKE_LLAMA = ("llama", "granite", "granitemoe", "granitehybrid")
_PLUS_ONE = ("gemma", "gemma2", "gemma3", "nemotron", "qwen35", "qwen35moe")
_Stored = Iterator[tuple[str, torch.Tensor]]


def write(
    path: Path,
    model: PreTrainedModel,
    header: dict[str, Any] | None = None,
    *,
    coded: str | None = None,
    **tensors: torch.Tensor,
) -> Path:
    """header: keys of the architecture beside or instead of those that follow from the config; None leaves one out.
    coded: the type of matrices and experts whose rows it can code. tensors: further ones, a double underscore in a name
    for a dot."""
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    _add_words(writer, config.vocab_size)
    keys = header_of(config, architecture) | (header or {})
    for key, value in keys.items():
        if value is not None:
            _add(writer, f"{architecture}.{key}", value)
    made = dict(_tensors(model, architecture)) | dict(_rope_tensors(config))
    for name, values in (made | {name.replace("__", "."): value for name, value in tensors.items()}).items():
        data = np.ascontiguousarray(values.float().numpy())
        if (
            coded
            and data.ndim >= 2
            and data.shape[-1] % 32 == 0
            and name.endswith("weight")
            and "norm" not in name
        ):
            kind = gguf.GGMLQuantizationType[coded]
            writer.add_tensor(name, gguf.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_words(writer: gguf.GGUFWriter, count: int) -> None:
    """A vocabulary as sentencepiece makes them."""
    words = ["<pad>", "<s>", "</s>", "<unk>", "\u2581", *map(chr, range(97, 123))]
    words += [f"[PAD{number}]" for number in range(count - len(words))]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_scores([float(-number) for number in range(count)])
    writer.add_token_types([3, 3, 3, 2] + [1] * (count - 4))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, list):
        writer.add_array(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    else:
        writer.add_uint32(name, int(value))


def header_of(config: Any, architecture: str) -> dict[str, Any]:
    """The keys of the architecture; None for one that the converter does not write."""
    said = config.to_dict()

    def first(*names: str) -> Any:
        return next((said[name] for name in names if said.get(name) is not None), None)

    hidden, heads = first("hidden_size", "n_embd"), first("num_attention_heads", "n_head")
    keys = {
        "block_count": first("num_hidden_layers", "n_layer"),
        "context_length": first("max_position_embeddings", "n_positions", "seq_length") or 2048,
        "embedding_length": hidden,
        "feed_forward_length": first("n_inner", "ffn_hidden_size", "intermediate_size"),
        "attention.head_count": heads,
        "attention.head_count_kv": first("num_key_value_heads", "num_kv_heads"),
        "attention.layer_norm_rms_epsilon": first("rms_norm_eps"),
        "attention.layer_norm_epsilon": first("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
        "attention.key_length": said.get("head_dim"),
        "attention.value_length": said.get("head_dim"),
        "expert_count": first("num_local_experts", "num_experts"),
        "expert_used_count": first("num_experts_per_tok", "top_k_experts"),
        "expert_feed_forward_length": first("moe_intermediate_size"),
        "expert_shared_feed_forward_length": first(
            "shared_expert_intermediate_size", "shared_intermediate_size"
        ),
    }
    rope = said.get("rope_parameters") or {}
    keys |= _rope_keys(rope.get("full_attention", rope))
    width = said.get("head_dim") or (hidden // heads if heads else 0)
    if (part := rope.get("partial_rotary_factor")) is not None:
        keys["rope.dimension_count"] = int(width * part)
    special = globals().get(f"_{architecture.replace('-', '_')}_keys")
    return keys | (special(config, said) if special else {})


def _rope_keys(rope: dict[str, Any]) -> dict[str, Any]:
    keys: dict[str, Any] = {"rope.freq_base": rope.get("rope_theta")}
    kind = rope.get("rope_type")
    if kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        keys |= {
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_attn_factor": rope.get("attention_factor"),
            "rope.scaling.yarn_beta_fast": rope.get("beta_fast"),
            "rope.scaling.yarn_beta_slow": rope.get("beta_slow"),
        }
    if kind == "longrope":
        keys["rope.scaling.type"] = kind
    return keys


def _llama_keys(config: Any, said: dict[str, Any]) -> dict[str, Any]:
    width = said.get("head_dim") or config.hidden_size // config.num_attention_heads
    window = said.get("sliding_window")
    return {
        "vocab_size": config.vocab_size, "rope.dimension_count": width, "attention.sliding_window": window,
    }  # fmt: skip


def _gpt2_keys(config: Any, said: dict[str, Any]) -> dict[str, Any]:
    return {"attention.head_count_kv": None}


def _bloom_keys(config: Any, said: dict[str, Any]) -> dict[str, Any]:
    return {"attention.head_count_kv": config.n_head, "feed_forward_length": 4 * config.hidden_size}


def _falcon_keys(config: Any, said: dict[str, Any]) -> dict[str, Any]:
    groups = config.num_kv_heads if config.new_decoder_architecture else 1
    return {"attention.head_count_kv": groups, "tensor_data_layout": "jploski"}


def _stablelm_keys(config: Any, said: dict[str, Any]) -> dict[str, Any]:
    return {"use_parallel_residual": config.use_parallel_residual}


def _nemotron_keys(config: Any, said: dict[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "attention.layer_norm_epsilon": config.norm_eps,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
    }


def _phi3_keys(config: Any, said: dict[str, Any]) -> dict[str, Any]:
    rope = config.rope_parameters
    most, first = config.max_position_embeddings, config.original_max_position_embeddings
    keys: dict[str, Any] = {
        "rope.scaling.original_context_length": first, "attention.sliding_window": config.sliding_window or 0,
    }  # fmt: skip
    if rope["rope_type"] == "longrope":
        scale = most / first
        keys["rope.scaling.attn_factor"] = (
            math.sqrt(1 + math.log(scale) / math.log(first)) if scale > 1 else 1.0
        )
    return keys


def _gemma2_keys(config: Any, said: dict[str, Any]) -> dict[str, Any]:
    return {
        "attn_logit_softcapping": config.attn_logit_softcapping,
        "final_logit_softcapping": config.final_logit_softcapping,
        "attention.sliding_window": config.sliding_window,
    }


def _gemma3_keys(config: Any, said: dict[str, Any]) -> dict[str, Any]:
    return {
        "final_logit_softcapping": config.final_logit_softcapping,
        "attention.sliding_window": config.sliding_window,
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
    }


def _gemma4_keys(config: Any, said: dict[str, Any]) -> dict[str, Any]:
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    far = _far(config)
    wide = config.intermediate_size
    shared = config.num_hidden_layers - config.num_kv_shared_layers
    keys: dict[str, Any] = {
        "final_logit_softcapping": config.final_logit_softcapping,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": sliding,
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "attention.key_length": far.head_dim, "attention.value_length": far.head_dim,
        "attention.key_length_swa": said["head_dim"], "attention.value_length_swa": said["head_dim"],
        "rope.dimension_count": far.head_dim, "rope.dimension_count_swa": said["head_dim"],
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
    }  # fmt: skip
    if config.use_double_wide_mlp:
        keys["feed_forward_length"] = [
            wide * (1 + (layer >= shared)) for layer in range(config.num_hidden_layers)
        ]
    if config.attention_k_eq_v:
        keys["attention.head_count_kv"] = [
            said["num_key_value_heads"] if slides else far.num_key_value_heads for slides in sliding
        ]
    return keys


def _far(config: Any) -> Any:
    """The config of the layers of Gemma 4 that attend to everything."""
    return config.per_layer_config[config.layer_types.index("full_attention")]


def _gpt_oss_keys(config: Any, said: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention.sliding_window": config.sliding_window,
        "expert_feed_forward_length": config.intermediate_size,
    }


def _minimax_m2_keys(config: Any, said: dict[str, Any]) -> dict[str, Any]:
    return {"expert_feed_forward_length": config.intermediate_size, "expert_gating_func": 2}


def _mamba_keys(config: Any, said: dict[str, Any]) -> dict[str, Any]:
    return {
        "context_length": 2**20, "feed_forward_length": 0, "attention.head_count": 0, "attention.head_count_kv": None,
        "attention.layer_norm_epsilon": None,
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        "ssm.conv_kernel": config.conv_kernel, "ssm.inner_size": config.intermediate_size,
        "ssm.state_size": config.state_size, "ssm.time_step_rank": config.time_step_rank,
        "ssm.dt_b_c_rms": config.model_type == "falcon_mamba",
    }  # fmt: skip


def _granite_keys(config: Any, said: dict[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size, "attention.key_length": None, "attention.value_length": None,
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "attention.scale": config.attention_multiplier, "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier, "logit_scale": config.logits_scaling,
    }  # fmt: skip


_granitemoe_keys = _granite_keys


def _granitehybrid_keys(config: Any, said: dict[str, Any]) -> dict[str, Any]:
    return _granite_keys(config, said) | {
        "attention.head_count_kv": [
            config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types
        ],
        "rope.scaling.finetuned": config.position_embedding_type == "rope",
        "ssm.conv_kernel": config.mamba_d_conv, "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups, "ssm.time_step_rank": config.mamba_n_heads,
        "ssm.inner_size": config.mamba_expand * config.hidden_size,
        "feed_forward_length": (
            config.intermediate_size if config.num_local_experts else config.shared_intermediate_size
        ),
    }  # fmt: skip


def _lfm2_keys(config: Any, said: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention.head_count_kv": [
            0 if kind == "conv" else config.num_key_value_heads for kind in config.layer_types
        ],
        "attention.layer_norm_rms_epsilon": config.norm_eps, "vocab_size": config.vocab_size,
        "shortconv.l_cache": config.conv_L_cache,
    }  # fmt: skip


def _qwen35_keys(config: Any, said: dict[str, Any]) -> dict[str, Any]:
    return {
        "rope.dimension_sections": [*config.rope_parameters["mrope_section"], 0],
        "full_attention_interval": config.layer_types.index("full_attention") + 1,
        "ssm.conv_kernel": config.linear_conv_kernel_dim, "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads, "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
    }  # fmt: skip


_qwen35moe_keys = _qwen35_keys


def _rope_tensors(config: Any) -> _Stored:
    rope = getattr(config, "rope_parameters", None) or {}
    full = rope.get("full_attention", rope)
    kind = full.get("rope_type")
    if kind == "llama3":
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        yield "rope_freqs.weight", _llama3_factors(full, width)
    if kind == "longrope":
        yield "rope_factors_long.weight", torch.tensor(full["long_factor"])
        yield "rope_factors_short.weight", torch.tensor(full["short_factor"])
    if kind == "proportional":
        pairs = _far(config).head_dim // 2
        turning = int(pairs * full["partial_rotary_factor"])
        yield "rope_freqs.weight", torch.tensor([1.0] * turning + [1e30] * (pairs - turning))


def _llama3_factors(rope: dict[str, Any], width: int) -> torch.Tensor:
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    first = rope["original_max_position_embeddings"]
    factors = []
    for freq in 1.0 / rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float32) / width):
        length = 2 * math.pi / freq
        if length < first / high:
            factors.append(1.0)
        elif length > first / low:
            factors.append(factor)
        else:
            smooth = (first / length - low) / (high - low)
            factors.append(float(1 / ((1 - smooth) / factor + smooth)))
    return torch.tensor(factors)


def _tensors(model: PreTrainedModel, architecture: str) -> _Stored:
    config: Any = model.config
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    layers = getattr(config, "num_hidden_layers", None) or config.n_layer
    names = gguf.get_tensor_name_map(kinds[architecture], layers)
    stacked: dict[str, list[torch.Tensor]] = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for changed, values in _changed(name, weight, config, architecture):
            if match := re.fullmatch(r"(.*_layernorm)\.norms\.\d+(\.weight)", changed):
                stacked.setdefault(match[1] + match[2], []).append(values)
                continue
            yield _stored_name(changed, names), values
    for name, rows in stacked.items():
        yield _stored_name(name, names), torch.stack(rows)


def _stored_name(name: str, names: gguf.TensorNameMap) -> str:
    if name.startswith(("blk.", "token_embd", "output")):
        return name
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    found = found or names.get_name(name.removeprefix("transformer."), try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def _changed(name: str, weight: torch.Tensor, config: Any, architecture: str) -> _Stored:
    """The weight as the converter changes it, and the name of the model's parameter that the file has it under, or the
    file's own name."""
    end = name.rpartition(".")[0].rpartition(".")[2] or name
    layer = next((part for part in name.split(".") if part.isdigit()), "")
    if architecture in _LIKE_LLAMA and end in ("q_proj", "k_proj"):
        heads = config.num_attention_heads if end == "q_proj" else config.num_key_value_heads
        yield name, _interleaved(weight, heads)
    elif architecture in _PLUS_ONE and name.endswith("norm.weight") and "linear_attn" not in name:
        yield name, weight + 1
    elif architecture == "gpt-oss" and ".mlp.experts." in name:
        yield from _gpt_oss_experts(name, weight, layer)
    elif ".linear_attn." in name and not name.endswith("norm.weight"):
        yield from _delta_net(name, weight, config, layer)
    elif name.endswith("sinks") or name.endswith("layer_scalar"):
        yield name + ".weight", weight
    elif architecture == "gemma4" and re.search(r"router\.(scale|per_expert_scale)$", name):
        yield f"blk.{layer}.{'ffn_gate_inp' if name.endswith('r.scale') else 'ffn_down_exps'}.scale", weight
    elif architecture == "gemma4" and ".experts." in name:
        yield name + ".weight", weight
    elif name.endswith("experts.gate_up_proj"):
        for half, values in zip(("gate", "up"), weight.chunk(2, dim=1), strict=True):
            yield f"blk.{layer}.ffn_{half}_exps.weight", values
    elif name.endswith("experts.down_proj"):
        yield f"blk.{layer}.ffn_down_exps.weight", weight
    elif name.endswith("e_score_correction_bias"):
        yield f"blk.{layer}.exp_probs_b.bias", weight
    elif name.endswith("shared_mlp.input_linear.weight"):
        kind = "_shexp" if config.num_local_experts else ""
        for half, values in zip(("gate", "up"), weight.chunk(2), strict=True):
            yield f"blk.{layer}.ffn_{half}{kind}.weight", values
    elif name.endswith("shared_mlp.output_linear.weight"):
        yield f"blk.{layer}.ffn_down{'_shexp' if config.num_local_experts else ''}.weight", weight
    elif name.endswith("block_sparse_moe.router.weight"):
        yield f"blk.{layer}.ffn_gate_inp.weight", weight
    elif end == "query_key_value" or name.endswith("query_key_value.weight"):
        yield name, _queries_keys_values(weight, config, architecture)
    elif architecture == "gpt2" and end in ("c_attn", "c_proj", "c_fc") and name.endswith(".weight"):
        yield name, weight.T
    elif name.endswith("A_log"):
        values = -torch.exp(weight)
        yield name, values[:, None] if architecture == "granitehybrid" else values
    elif architecture == "granitehybrid" and name.endswith("mamba.D"):
        yield name, weight[:, None]
    elif architecture == "granitehybrid" and name.endswith("mamba.norm.weight"):
        yield name, weight.view(config.mamba_n_groups, -1)
    elif name.endswith("dt_bias"):
        yield f"blk.{layer}.ssm_dt.bias", weight
    elif name.endswith(("conv1d.weight", "conv.conv.weight")):
        yield name, weight.squeeze(1)
    else:
        yield name, weight


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _gpt_oss_experts(name: str, weight: torch.Tensor, layer: str) -> _Stored:
    suffix = "bias" if name.endswith("_bias") else "weight"
    values = weight if suffix == "bias" else weight.transpose(1, 2)
    if "down_proj" in name:
        yield f"blk.{layer}.ffn_down_exps.{suffix}", values
        return
    for first, half in enumerate(("gate", "up")):
        yield f"blk.{layer}.ffn_{half}_exps.{suffix}", values[:, first::2]


def _delta_net(name: str, weight: torch.Tensor, config: Any, layer: str) -> _Stored:
    """The first value head of each key head, then the second of each, where the model has each key head's together."""
    keys, values, width = (
        config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim,
    )  # fmt: skip

    def tiled(rows: torch.Tensor, width: int = 1) -> torch.Tensor:
        return rows.view(keys, values // keys, width, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)

    first = 2 * keys * config.linear_key_head_dim
    if name.endswith("A_log"):
        yield name, tiled(-torch.exp(weight))
    elif name.endswith("dt_bias"):
        yield f"blk.{layer}.ssm_dt.bias", tiled(weight)
    elif name.endswith(("in_proj_a.weight", "in_proj_b.weight")):
        yield name, tiled(weight)
    elif name.endswith("in_proj_z.weight"):
        yield name, tiled(weight, width)
    elif name.endswith("out_proj.weight"):
        yield name, tiled(weight.T.contiguous(), width).T
    else:
        rows = weight.squeeze(1) if name.endswith("conv1d.weight") else weight
        yield name, torch.cat([rows[:first], tiled(rows[first:], width)])


def _queries_keys_values(weight: torch.Tensor, config: Any, architecture: str) -> torch.Tensor:
    """All queries, then all keys, then all values."""
    heads = config.n_head if architecture == "bloom" else config.num_attention_heads
    groups = (
        heads if architecture == "bloom" else config.num_kv_heads if config.new_decoder_architecture else 1
    )
    rows = weight.reshape(groups, heads // groups + 2, -1, *weight.shape[1:])
    parts = rows[:, :-2], rows[:, -2], rows[:, -1]
    return torch.cat([part.reshape(-1, *weight.shape[1:]) for part in parts])
