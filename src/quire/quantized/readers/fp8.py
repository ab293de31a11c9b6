"""Weights of 8-bit floats: one scale for a block of 128 x 128 values, for a group, for an output, or for all.

    weight              [N, K] float8_e4m3fn or float8_e5m2
    weight_scale_inv    [N / 128, K / 128], rounded up: DeepSeek's and Qwen's checkpoints, in spite of its name a factor
    weight_scale        [N, groups], [N, 1], [N], [1] or one number: FBGEMM's, Mistral's, compressed-tensors'; of uint8
                        it is an exponent plus 127 (MXFP8)

A value is weight * scale. A code is the byte, its table the 256 floats. Scales of activations are dropped: activations
are not quantized here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from quire.errors import LoadError
from quire.quantized.readers.mxfp4 import powers_of_two
from quire.quantized.readers.packed import even_groups
from quire.quantized.readers.stored import Headers, StoredWeight, StoredWeights, mismatch, prefixes_of
from quire.quantized.weight import Factor, QuantizedWeight

__all__ = ["FLOATS_OF_8", "fp8", "unpack_fp8"]

FLOATS_OF_8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_OF_ACTIVATIONS = ("input_scale", "activation_scale", "input_scale_ub", "k_scale", "v_scale", "output_scale")


def fp8(config: Mapping[str, Any], headers: Headers, tensor: Callable[[str], torch.Tensor]) -> StoredWeights:
    """What is quantized in a checkpoint of 8-bit floats.

    *raises:* LoadError: a weight without scales, or scales of another shape.
    """
    block = config.get("weight_block_size")
    weights = []
    for prefix in prefixes_of(headers, "weight"):
        name = prefix + "weight"
        if headers[name].stored not in FLOATS_OF_8:
            continue
        scale = next((name + end for end in ("_scale_inv", "_scale") if name + end in headers), None)
        if scale is None:
            raise LoadError(f"cannot read the weight {name}: the checkpoint lacks {name}_scale_inv")
        shape = headers[name].shape
        if len(shape) != 2:
            raise mismatch(name, "[N, K]", "", list(shape))
        unpack_it = partial(_unpack, name=name, block=tuple(block) if block else None)
        weights.append(StoredWeight(name, (shape[0], shape[1]), {"weight": name, "scale": scale}, unpack_it))
    dropped = {name for name in headers if name.rpartition(".")[2] in _OF_ACTIVATIONS}
    return StoredWeights(tuple(weights), frozenset(dropped))


def _unpack(
    parts: Mapping[str, torch.Tensor], *, name: str, block: tuple[int, int] | None
) -> list[QuantizedWeight]:
    return [unpack_fp8(name, parts["weight"], parts["scale"], block)]


def unpack_fp8(
    name: str, weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] | None
) -> QuantizedWeight:
    """The weight of [N, K] 8-bit floats. block: outputs and inputs that share a scale, where `scale` has blocks.

    *raises:* LoadError: `scale` is of no known shape.
    """
    outputs, inputs = weight.shape
    scale = powers_of_two(scale) if scale.dtype == torch.uint8 else scale
    codes = weight.view(torch.uint8)
    table = torch.arange(256, dtype=torch.uint8).view(weight.dtype).float()
    kind = str(weight.dtype).rpartition("_")[2].removesuffix("fn")
    if (
        block is not None
        and scale.dim() == 2
        and scale.shape == (-(-outputs // block[0]), -(-inputs // block[1]))
    ):
        scales = scale.float().repeat_interleave(block[0], dim=0)[:outputs]
        sizes = [min(block[1], inputs - start) for start in range(0, inputs, block[1])]
        group, (scales,) = even_groups(sizes, scales)
        return QuantizedWeight(
            codes, 8, group, Factor(scales), f"fp8 {kind}:{block[0]}x{block[1]}", table=table
        )
    if scale.dim() == 2 and scale.shape[0] == outputs and scale.shape[1] > 1 and inputs % scale.shape[1] == 0:
        group = inputs // scale.shape[1]
        return QuantizedWeight(codes, 8, group, Factor(scale.float()), f"fp8 {kind}:{group}", table=table)
    if scale.numel() not in (1, outputs):
        expected = "one number, " + f"[{outputs}, 1]" + (f" or blocks of {list(block)}" if block else "")
        raise mismatch(name, "scales", expected, list(scale.shape))
    scales = scale.float().reshape(-1, 1).expand(outputs, 1).contiguous()
    return QuantizedWeight(codes, 8, inputs, Factor(scales), f"fp8 {kind}", table=table)
