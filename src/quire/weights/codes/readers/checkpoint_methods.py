"""The reader of a checkpoint, chosen by its config.json; every quantized tensor must be explained.

The tensors decide which weights are quantized. Lists of other modules (`modules_to_not_convert`) only repeat in the
config what the tensors show; a tensor of codes that no reader takes is refused by its name, and so is a field of the
config that its reader does not know (`quantization_config`).

    add a format: one file with a `Reader`, and its line in `METHODS`

Cost: headers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from quire.errors import LoadError
from quire.weights.codes.readers.awq import awq
from quire.weights.codes.readers.bitsandbytes import bitsandbytes
from quire.weights.codes.readers.checkpoint_weights import (
    CheckpointModule,
    CheckpointReader,
    CheckpointWeights,
    Headers,
    Reader,
)
from quire.weights.codes.readers.compressed_tensors import compressed_tensors
from quire.weights.codes.readers.fp8 import FLOATS_OF_8, fp8
from quire.weights.codes.readers.gptq import gptq
from quire.weights.codes.readers.mxfp4 import mxfp4

__all__ = ["METHODS", "checkpoint_weights", "first_quantized_tensor", "method_of"]

METHODS: dict[str, Reader] = {
    "gptq": gptq,
    "awq": awq,
    "compressed-tensors": compressed_tensors,
    "fp8": fp8,
    "fbgemm_fp8": fp8,
    "mxfp4": mxfp4,
    "bitsandbytes": bitsandbytes,
}
"""By the `quant_method` of a quantization_config."""

# Endings of names of tensors with codes or parts of them, of any type.
_CODES = ("qweight", "qzeros", "weight_packed", "weight_scale", "weight_scale_inv", "weight_global_scale")


def first_quantized_tensor(headers: Headers) -> str | None:
    """The first tensor that is a part of a quantized weight by its name alone, for a config without quantization.
    8-bit floats and bytes may be dense."""
    ends = (*_CODES, "SCB", "absmax")
    integers = (torch.int8, torch.uint8)
    return next(
        (
            name
            for name in sorted(headers)
            if (end := name.rpartition(".")[2]) in ends
            or (end.endswith(("weight", "_blocks")) and headers[name].saved_type in integers)
        ),
        None,
    )


_AUTO_ROUND = {
    "auto_round:auto_gptq": "gptq", "auto_round:gptq": "gptq", "auto_round": "gptq", "auto_round:gptqmodel": "gptq",
    "auto_round:auto_awq": "awq", "auto_round:awq": "awq",
}  # fmt: skip
_AUTO_ROUND_V2 = ("auto_round", "auto_round:gptqmodel")  # they save zeros without an offset


def method_of(config: Mapping[str, Any]) -> str:
    """The quant_method of a quantization_config, by its name in `METHODS`; "" without one."""
    method = str(config.get("quant_method") or "")
    method = str(getattr(config.get("quant_method"), "value", method))
    if method in ("auto-round", "intel/auto-round"):
        # AutoRound writes other tools' layouts and names the tool.
        packing = str(config.get("packing_format") or "")
        return _AUTO_ROUND.get(packing, f"{method} with packing_format {packing}")
    if not method and (config.get("load_in_4bit") or config.get("load_in_8bit")):
        return "bitsandbytes"
    return method


def checkpoint_weights(
    config: Mapping[str, Any],
    headers: Headers,
    tensor: Callable[[str], torch.Tensor],
    module_of: Callable[[str], CheckpointModule] = CheckpointModule,
) -> CheckpointWeights:
    """The quantized weights of a checkpoint.

    config: the quantization_config of its config.json. headers: of all its tensors, by name. tensor: reads one.
    module_of: the model's module for a module's name in the checkpoint.

    *raises:* LoadError: an unknown method, layout, field or tensor; with its name, and what would run.
    """
    method = method_of(config)
    if (reader := METHODS.get(method)) is None:
        raise LoadError(
            f"expected weights in 16 or 32 bits or quantized by {', '.join(METHODS)}, got quant_method {method!r}; "
            "take the model as one of these, or as a GGUF file"
        )
    if config.get("packing_format") in _AUTO_ROUND_V2 and method == "gptq":
        config = {"checkpoint_format": "gptq_v2", **config}
    weights = reader(CheckpointReader(config, headers, tensor, module_of))
    tensor_names = weights.names
    for name in sorted(headers):
        saved, end = headers[name].saved_type, name.rpartition(".")[2]
        is_codes = isinstance(saved, str) or saved in (torch.int8, torch.uint8, *FLOATS_OF_8)
        if name not in tensor_names and (is_codes or end in _CODES):
            kind = saved if isinstance(saved, str) else str(saved).removeprefix("torch.")
            raise LoadError(
                f"expected tensors that {method} is known to have, got {name} of {kind} {list(headers[name].shape)}; "
                "take the model in 16 bits, or as a GGUF file"
            )
    return weights
