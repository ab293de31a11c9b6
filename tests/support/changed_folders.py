"""Small checkpoints in one file each, to be opened with one field or one tensor changed."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from support import packing, quantized_checkpoints
from support.quantized_checkpoints import FORMATS, packed

from quire.weights.sources import CheckpointTensor

REMOVED = object()
VALUES: tuple[Any, ...] = (
    REMOVED, None, True, False, -1, 0, 1, 2, 3, 4, 5, 8, 31, 32, 33, 64, 128, 4.0, 4.5, "", "4", "true", "x", "gptq",
    "gptq_v2", "gemm", "gemv", "float", "group", "channel", "tensor", "64x128", "re:(", [], [4], [64, 64], ["Linear"],
    ["re:.*"], ["Embedding"], [[1]], {}, {"x": 1}, {".*": {"bits": 8}}, {"x": {"targets": ["Linear"]}},
)  # fmt: skip


def _scheme(weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "quantization_status": "compressed", "config_groups": {"group_0": {**group, **more}},
    }  # fmt: skip


def _args(bits: int, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False, **more}


def _ordered(rounded: packing.Rounded) -> dict[str, torch.Tensor]:
    index = torch.from_numpy(rounded.group_of.astype(np.int32))
    return {**packing.compressed_packed(rounded, symmetric=True), "weight_g_idx": index}


def _of_mxfp4(weight: np.ndarray) -> quantized_checkpoints.Module:
    tensors, values = packing.mxfp4(weight[None])
    blocks, scales = tensors["_blocks"][0].flatten(1), tensors["_scales"][0]
    return {"weight_packed": blocks, "weight_scale": scales}, values[0]


def _renamed(pack: Any, **names: str) -> Any:
    def packed_and_renamed(weight: np.ndarray) -> quantized_checkpoints.Module:
        tensors, values = pack(weight)
        return {names.get(name, name): tensor for name, tensor in tensors.items()}, values

    return packed_and_renamed


def _blocks(weight: np.ndarray) -> quantized_checkpoints.Module:
    return packing.fp8_blocks(weight, 64)


_ROUND_BY_ORDER: Any = {"shuffled": np.random.default_rng(5)}
CHECKPOINTS: dict[str, tuple[dict[str, Any], Callable[[np.ndarray], quantized_checkpoints.Module]]] = {
    **{
        name: ({**config, **more}, pack)
        for name, more in (
            ("gptq", {"desc_act": False, "dynamic": {"-:lm_head": {}}, "damp_percent": 0.1}),
            ("gptq by activation order", {}),
            ("awq", {"zero_point": True, "modules_to_not_convert": ["lm_head"]}),
            ("nf4", {"bnb_4bit_quant_type": "nf4"}),
        )
        for config, pack in [FORMATS[name]]
    },
    "auto-round": (
        {
            "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 64,
            "sym": True, "data_type": "int", "iters": 200, "extra_config": {"lm_head": {"bits": 16}},
        },
        packed(lambda made: packing.gptq(made, minus_one=True), 4, 64, half=True),
    ),
    "w4a16": (
        _scheme(_args(4, strategy="group", group_size=32) | {"symmetric": False}),
        FORMATS["w4a16"][1],
    ),
    "w4a16 by activation order": (
        _scheme(_args(4, strategy="group", group_size=32, actorder="group")),
        packed(_ordered, 4, 32, **_ROUND_BY_ORDER),
    ),
    "w8a8": (
        _scheme(_args(8, strategy="channel")) | {"format": "int-quantized"},
        FORMATS["w8a8"][1],
    ),
    "compressed fp8": (
        _scheme(_args(8, strategy="block", block_structure=[64, 64]) | {"type": "float"})
        | {"format": "float-quantized"},
        _renamed(_blocks, weight_scale_inv="weight_scale"),
    ),
    "compressed mxfp4": (
        _scheme(_args(4, strategy="group", group_size=32) | {"type": "float"})
        | {"format": "mxfp4-pack-quantized"},
        _of_mxfp4,
    ),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [64, 64], "activation_scheme": "dynamic", "fmt": "e4m3"},
        _blocks,
    ),
    "fp8 of channels": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        packing.fp8_channels,
    ),
    "int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, packing.int8_of_bitsandbytes),
}  # fmt: skip


@dataclass
class Folder:
    """A checkpoint in `path`. config: its config.json. tensors: all it has. weights: what they stand for."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]

    @functools.cached_property
    def tensors_of_two(self) -> dict[str, torch.Tensor]:
        """Those of two modules, or of the experts."""
        ends = ("q_proj", "down_proj", "down_proj_blocks", "down_proj_scales")
        return {
            name: tensor
            for name, tensor in self.tensors.items()
            if "layers.0." in name and any(f".{end}" in name for end in ends)
        }

    @functools.cached_property
    def coded_of_two(self) -> set[str]:
        """The weights that these are."""
        modules = {re.sub(r"(_proj)[._].*", r"\1", name) for name in self.tensors_of_two}
        names = {name if name in self.weights else name + ".weight" for name in modules}
        return {
            name
            for name in names
            if name not in self.tensors
            or not self.tensors[name].is_floating_point()
            or self.tensors[name].dtype.itemsize == 1
        }

    @functools.cached_property
    def headers(self) -> dict[str, CheckpointTensor]:
        return headers_of(self.tensors_of_two)

    def write(
        self, config: dict[str, Any] | None = None, tensors: dict[str, torch.Tensor] | None = None
    ) -> None:
        (self.path / "config.json").write_text(json.dumps(self.config if config is None else config))
        if tensors is not None:
            save_file(tensors, self.path / "model.safetensors", {"format": "pt"})


def headers_of(tensors: dict[str, torch.Tensor]) -> dict[str, CheckpointTensor]:
    return {
        name: CheckpointTensor(name, tuple(tensor.shape), tensor.dtype, tensor.clone)
        for name, tensor in tensors.items()
    }


@functools.cache
def plain_model() -> Any:
    """Weights with as many outputs as inputs are few, so that one that lies the wrong way shows."""
    return quantized_checkpoints.tiny(num_hidden_layers=1)


def make(path: Path, name: str) -> Folder:
    if name == "mxfp4":
        plain = quantized_checkpoints.save_gpt_oss(path)
    else:
        plain = quantized_checkpoints.save(path, copy.deepcopy(plain_model()), *CHECKPOINTS[name])
    tensors: dict[str, torch.Tensor] = {}
    for part in sorted(path.glob("*.safetensors")):
        tensors |= load_file(part)
        part.unlink()
    (path / "model.safetensors.index.json").unlink()
    weights = {key: weight.clone() for key, weight in plain.state_dict().items()}
    folder = Folder(path, json.loads((path / "config.json").read_text()), tensors, weights)
    folder.write(tensors=tensors)
    return folder


def changed(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A copy with the field at `path` changed."""
    config = copy.deepcopy(config)
    at: Any = config
    for key in path[:-1]:
        at = at.setdefault(key, {})
    if value is REMOVED:
        at.pop(path[-1], None)
    else:
        at[path[-1]] = value
    return config


def changed_tensors(
    tensors: dict[str, torch.Tensor], name: str
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Copies with the tensor `name` changed in its type, in its shape, or gone, each with what was done."""
    tensor = tensors[name]
    others = {key: part for key, part in tensors.items() if key != name}
    yield "removed", others
    for dtype in (torch.float32, torch.float16, torch.int32, torch.int64, torch.int8, torch.uint8, torch.bool,
                  torch.float8_e4m3fn, torch.float8_e5m2):  # fmt: skip
        if dtype != tensor.dtype:
            yield f"as {dtype}", {**others, name: tensor.float().to(dtype)}
    shapes: dict[str, torch.Tensor] = {"flat": tensor.reshape(-1), "of one more size": tensor.unsqueeze(0)}
    if tensor.dim():
        shapes |= {"without its last row": tensor[:-1], "empty": tensor[:0], "twice": torch.cat([tensor] * 2)}
    if tensor.dim() == 2:
        shapes |= {"the other way": tensor.T, "without its last column": tensor[:, :-1]}
        shapes["of one column"] = tensor[:, :1]
    for what, part in shapes.items():
        if part.shape != tensor.shape:
            yield what, {**others, name: part.clone(memory_format=torch.contiguous_format)}
