"""Weights of 8-bit floats: one scale for a block of 128 x 128 values, for a group, for an output, or for all.

    weight              [N, K] float8_e4m3fn or float8_e5m2
    weight_scale_inv    [N / 128, K / 128], rounded up: in DeepSeek's and Qwen's checkpoints, a factor despite its name
    weight_scale        [N, groups], [N, 1], [N], [1] or one number: FBGEMM's, Mistral's, compressed-tensors'; as uint8
                        it is an exponent plus 127 (MXFP8)

A value is weight * scale. A code is the byte, its table the 256 floats. Scales of activations are dropped: activations
are not quantized here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch

from quire.errors import LoadError
from quire.weights.codes.code_form import CodeForm
from quire.weights.codes.readers.checkpoint_weights import (
    FLOATS,
    CheckpointReader,
    CheckpointWeight,
    CheckpointWeights,
    Headers,
    matrix,
    mismatch,
    prefixes_of,
    require_type,
    scales_form,
)
from quire.weights.codes.readers.mxfp4 import powers_of_two
from quire.weights.codes.readers.packed import even_groups, sizes_of_groups
from quire.weights.codes.readers.quantization_config import (
    TOOLS_CHANGE_NOTHING,
    Check,
    block,
    contradiction,
    read_settings,
    word,
)
from quire.weights.codes.weight import Factor, QuantizedWeight

__all__ = [
    "CHANGES_NOTHING",
    "FLOATS_OF_8",
    "READS",
    "blocks_of",
    "fp8",
    "fp8_form",
    "kind_of",
    "unpack_fp8",
]

FLOATS_OF_8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_OF_ACTIVATIONS = ("input_scale", "activation_scale", "input_scale_ub", "k_scale", "v_scale", "output_scale")


# Scales of activations, and formats of keys and values, which are not quantized here.
CHANGES_NOTHING = TOOLS_CHANGE_NOTHING | {"activation_scale_ub", "kv_cache_scheme", "kv_cache_quant_method"}
READS: dict[str, Check] = {
    "weight_block_size": block,
    "activation_scheme": word("dynamic", "static"),
    "fmt": word("e4m3", "e5m2"),
    "scale_fmt": word("float", "ue8m0"),
    "expert_dtype": word("fp8"),
}
_DEFAULT_BLOCK = (128, 128)  # transformers' default for quant_method "fp8"


def fp8(checkpoint: CheckpointReader) -> CheckpointWeights:
    """The quantized weights of a checkpoint in 8-bit floats.

    *raises:* LoadError: a weight without scales, scales of another shape, or an unknown field.
    """
    config, headers = read_settings(checkpoint.config, READS, CHANGES_NOTHING), checkpoint.headers
    block_size: tuple[int, int] | None = config.get("weight_block_size")
    has_default = "weight_block_size" not in checkpoint.config
    has_default = has_default and checkpoint.config.get("quant_method") == "fp8"
    block = _DEFAULT_BLOCK if has_default else block_size
    weights = []
    for prefix in prefixes_of(headers, "weight"):
        name = prefix + "weight"
        if headers[name].saved_type not in FLOATS_OF_8:
            continue
        scale = next((name + end for end in ("_scale_inv", "_scale") if name + end in headers), None)
        if scale is None:
            raise LoadError(f"cannot read the weight {name}: the checkpoint lacks {name}_scale_inv")
        shape = matrix(name, name, headers, *FLOATS_OF_8)
        require_type(name, scale, headers, *FLOATS, torch.float8_e8m0fnu)
        if (kind := kind_of(headers[name].saved_type)) != config.get("fmt", kind):
            raise contradiction(name, "fmt", config["fmt"], kind)
        of_scale = tuple(headers[scale].shape)
        if block_size is not None and of_scale != blocks_of(shape, block_size):
            saved = f"scales of {list(of_scale)}, while the config gives {list(blocks_of(shape, block_size))}"
            raise contradiction(name, "weight_block_size", list(block_size), saved)
        form = partial(fp8_form, name=name, scale=scale, block=block, headers=headers)
        unpack_it = partial(_unpack, name=name, block=block)
        weights.append(CheckpointWeight(name, shape, {"weight": name, "scale": scale}, form, unpack_it))
    dropped = {name for name in headers if name.rpartition(".")[2] in _OF_ACTIVATIONS}
    return CheckpointWeights(tuple(weights), frozenset(dropped))


def blocks_of(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """The number of blocks of a weight in each dimension."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def _unpack(
    parts: Mapping[str, torch.Tensor], *, name: str, block: tuple[int, int] | None
) -> list[QuantizedWeight]:
    return [unpack_fp8(name, parts["weight"], parts["scale"], block)]


def fp8_form(
    tensor: Callable[[str], torch.Tensor],
    *,
    name: str,
    scale: str,
    block: tuple[int, int] | None,
    headers: Headers,
) -> CodeForm:
    """The form of the weight in the tensors `name` and `scale`. *raises:* LoadError: as `unpack_fp8`."""
    shape, saved = headers[name].shape, headers[name].saved_type
    sizes, kind, _ = _scale_groups(name, (shape[0], shape[1]), tuple(headers[scale].shape), block)
    group, _ = even_groups(sizes)
    return CodeForm(
        f"fp8 {kind_of(saved)}{kind}", 8, group, scales_form(scale, headers, tensor), has_table=True
    )


def kind_of(saved: object) -> str:
    """The name of a type of 8-bit floats, such as "e4m3"."""
    return str(saved).rpartition("_")[2].removesuffix("fn")


def _scale_groups(
    name: str, shape: tuple[int, int], scale: tuple[int, ...], block: tuple[int, int] | None
) -> tuple[list[int], str, int]:
    """The inputs of each group of a weight [N, K] whose scales have the shape `scale`, its part of the label, and the
    number of outputs of each row of scales (0: all outputs share one).

    *raises:* LoadError: `scale` has no known shape.
    """
    outputs, inputs = shape
    if block is not None and tuple(scale) == blocks_of((outputs, inputs), block):
        return sizes_of_groups(inputs, block[1]), f":{block[0]}x{block[1]}", block[0]
    if len(scale) == 2 and scale[0] == outputs and scale[1] > 1 and inputs % scale[1] == 0:
        size = inputs // scale[1]
        return sizes_of_groups(inputs, size), f":{size}", 1
    if math.prod(scale) not in (1, outputs):
        blocks = f"blocks of {list(block)}" if block else "blocks of a size"
        expected = f"of outputs, or of {blocks} that weight_block_size, or block_structure of weights, gives"
        raise mismatch(name, "scales of all,", expected, list(scale))
    return [inputs], "", 1 if math.prod(scale) > 1 else 0


def unpack_fp8(
    name: str, weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] | None
) -> QuantizedWeight:
    """The weight from [N, K] 8-bit floats. block: outputs and inputs that share a scale, if `scale` has blocks.

    *raises:* LoadError: `scale` has no known shape.
    """
    outputs = weight.shape[0]
    sizes, kind, of_row = _scale_groups(name, (weight.shape[0], weight.shape[1]), tuple(scale.shape), block)
    scales = powers_of_two(scale) if scale.dtype == torch.uint8 else scale.float()
    scales = scales.reshape(-1, len(sizes))
    scales = scales.repeat_interleave(of_row or outputs, dim=0)[:outputs]
    group, (scales,) = even_groups(sizes, scales)
    table = torch.arange(256, dtype=torch.uint8).view(weight.dtype).float()
    label = f"fp8 {kind_of(weight.dtype)}{kind}"
    return QuantizedWeight(weight.view(torch.uint8), 8, group, Factor(scales), label, table=table)
