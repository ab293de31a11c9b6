"""Tiny models saved in the formats of quantization tools, each with the dense model of its decoded weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from support import packing
from support.architectures import randomize
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

Module = tuple[dict[str, torch.Tensor], np.ndarray]
"""Tensors of one module by their last names, and the values they stand for."""

_QWEN: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 97, "max_position_embeddings": 128, "eos_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}


def tiny(kind: str = "qwen3", **more: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**_QWEN, **(_EXPERTS if kind == "qwen3_moe" else {}), **more})
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomize(made)
    return made


def packed(write: Callable[[packing.Rounded], dict[str, torch.Tensor]], *rounding: Any, **more: Any) -> Any:
    def pack(weight: np.ndarray) -> Module:
        rounded = packing.round_weight(weight, *rounding, **more)
        return write(rounded), rounded.values

    return pack


def _compressed(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False, "checkpoint_format": "gptq"}

# Name -> (quantization_config, what packs a weight).
FORMATS: dict[str, tuple[dict[str, Any], Callable[[np.ndarray], Module]]] = {
    "gptq": (
        _GPTQ,
        packed(lambda made: packing.gptq(made, minus_one=True), 4, 64, symmetric=False, half=True),
    ),
    "gptq by activation order": (
        {**_GPTQ, "sym": True, "desc_act": True},
        packed(
            lambda made: packing.gptq(made, minus_one=False),
            4,
            64,
            half=True,
            shuffled=np.random.default_rng(3),
        ),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"},
        packed(packing.awq, 4, 64, symmetric=False, half=True),
    ),
    "w4a16": (
        _compressed(num_bits=4, group_size=32),
        packed(lambda made: packing.compressed_packed(made, symmetric=False), 4, 32, symmetric=False),
    ),
    "w8a8": (_compressed(num_bits=8), packed(packing.compressed_int8, 8, 1 << 20)),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        lambda weight: packing.fp8_blocks(weight, 128),
    ),
    "nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        lambda weight: packing.nf4(weight, nested=True),
    ),
}


def save(
    folder: Path,
    plain: PreTrainedModel,
    quantization: dict[str, Any],
    pack: Callable[[np.ndarray], Module],
    others: Mapping[str, Callable[[np.ndarray], Module]] | None = None,
) -> PreTrainedModel:
    """Save `plain` in two files with its linear layers packed, the head not; it becomes what the codes stand for.

    others: weights that are packed in another way, by name."""
    plain.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    names = _checkpoint_names(plain)
    files: list[dict[str, torch.Tensor]] = [{}, {}]
    for index, (name, tensor) in enumerate(sorted(names.items())):
        values = tensor.detach()
        is_linear = values.dim() == 2 and "proj" in name
        pack_it = (others or {}).get(name, pack if is_linear else None)
        if pack_it is None:
            files[index % 2][name] = values.clone()
            continue
        tensors, widened = pack_it(values.numpy())
        prefix = name.removesuffix("weight")
        # The parts of a weight may lie in different files.
        for part, (key, packed) in enumerate(tensors.items()):
            files[(index + part) % 2][prefix + key] = packed.clone(memory_format=torch.contiguous_format)
        values.copy_(torch.from_numpy(np.ascontiguousarray(widened)))
    write(folder, files, quantization)
    return plain


def save_gpt_oss(folder: Path) -> PreTrainedModel:
    """One whose experts alone are quantized; returns what their codes stand for."""
    plain = tiny("gpt_oss", num_local_experts=4, intermediate_size=64, num_experts_per_tok=2)
    plain.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        tensors, values = packing.mxfp4(state.pop(name).transpose(1, 2).numpy())
        state |= {name + end: tensor for end, tensor in tensors.items()}
        plain.get_parameter(name).data.copy_(torch.from_numpy(values).transpose(1, 2))
    write(folder, [state], {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return plain


def write(folder: Path, files: list[dict[str, torch.Tensor]], quantization: dict[str, Any]) -> None:
    index: dict[str, str] = {}
    for number, tensors in enumerate(files, 1):
        path = folder / f"model-{number:05}-of-{len(files):05}.safetensors"
        save_file(tensors, path, {"format": "pt"})
        index |= dict.fromkeys(tensors, path.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))


def _checkpoint_names(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The model's weights as its checkpoints call them: experts one by one."""
    named: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        values = parameter.data
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            named[name] = values
            continue
        prefix, _, kind = name.rpartition(".")
        for expert, weight in enumerate(values):
            if kind == "down_proj":
                named[f"{prefix}.{expert}.down_proj.weight"] = weight
            else:
                gate, up = weight.chunk(2)
                named |= {
                    f"{prefix}.{expert}.gate_proj.weight": gate,
                    f"{prefix}.{expert}.up_proj.weight": up,
                }
    return named
