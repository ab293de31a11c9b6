"""gpt-oss's MXFP4 experts: 4-bit floats in blocks of 32 that share a power of two.

    NAME_blocks   [E, N, K / 32, 16] uint8, two values to a byte, the low nibble first
    NAME_scales   [E, N, K / 32] uint8, the exponent plus 127

NAME is "...experts.gate_up_proj" or "...experts.down_proj"; a dense checkpoint has it as [E, K, N]. A value is
float4 * 2**exponent. Values have the bits of transformers' own dequantization before it rounds to bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quire.weights.codes.code_form import CodeForm, FactorForm
from quire.weights.codes.readers.checkpoint_weights import (
    CheckpointReader,
    CheckpointWeight,
    CheckpointWeights,
    mismatch,
    require_parts,
    require_type,
)
from quire.weights.codes.readers.quantization_config import TOOLS_CHANGE_NOTHING, Check, read_settings
from quire.weights.codes.weight import Factor, QuantizedWeight

__all__ = ["CHANGES_NOTHING", "E2M1", "MXFP4_FORM", "READS", "low_nibble_first", "mxfp4", "powers_of_two"]

MXFP4_FORM = CodeForm("mxfp4", 4, 32, FactorForm(torch.bfloat16), has_table=True)

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


CHANGES_NOTHING = TOOLS_CHANGE_NOTHING
READS: dict[str, Check] = {}


def mxfp4(checkpoint: CheckpointReader) -> CheckpointWeights:
    """The quantized weights of gpt-oss's checkpoint.

    *raises:* LoadError: shapes that do not fit each other, or an unknown field.
    """
    read_settings(checkpoint.config, READS, CHANGES_NOTHING)
    headers = checkpoint.headers
    weights = []
    for blocks in sorted(name for name in headers if name.endswith("_blocks")):
        name = blocks.removesuffix("_blocks")
        scales = name + "_scales"
        require_parts(name, [scales], headers)
        for part in (blocks, scales):
            require_type(name, part, headers, torch.uint8)
        shape, of_scales = tuple(headers[blocks].shape), tuple(headers[scales].shape)
        if len(shape) != 4 or shape[3] != 16 or of_scales != shape[:3]:
            raise mismatch(
                name, "blocks of [E, N, K / 32, 16] and scales of [E, N, K / 32]", "", [shape, of_scales]
            )
        parts = {"blocks": blocks, "scales": scales}
        weights.append(
            CheckpointWeight(
                name,
                (shape[0], shape[1], shape[2] * 32),
                parts,
                lambda _: MXFP4_FORM,
                _unpack,
                transposed=True,
            )
        )
    return CheckpointWeights(tuple(weights))


def _unpack(parts: Mapping[str, torch.Tensor]) -> list[QuantizedWeight]:
    table = torch.tensor(E2M1)
    experts = []
    for blocks, exponents in zip(parts["blocks"], parts["scales"], strict=True):
        codes = low_nibble_first(blocks.flatten(1))
        experts.append(QuantizedWeight(codes, 4, 32, Factor(powers_of_two(exponents)), "mxfp4", table=table))
    return experts


def low_nibble_first(packed: torch.Tensor) -> torch.Tensor:
    """[N, n] bytes -> [N, 2 * n] codes of 4 bits."""
    packed = packed.unsqueeze(-1)
    return torch.cat([packed & 15, packed >> 4], dim=-1).flatten(1)


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes -> bfloat16, which represents each of them: 2**(byte - 127)."""
    exponents = exponents.to(torch.int32)
    bits = torch.where(exponents == 0, 0x400000, exponents << 23)  # the smallest is below the normal numbers
    return bits.view(torch.float32).bfloat16()
