"""bitsandbytes: NF4 and FP4 in blocks of 64 values, and int8 with one scale for an output.

    4 bits   weight uint8 [N * K / 2, 1], two values to a byte, the high nibble first; weight.quant_map [16];
             weight.absmax, a scale for each block of the flattened weight: float32, or uint8 with
             weight.nested_quant_map [256] and weight.nested_absmax for each 256 of them;
             weight.quant_state.bitsandbytes__nf4: JSON with shape, block sizes and the nested scales' offset
    8 bits   weight int8 [N, K], SCB [N]: a value is weight * SCB / 127

Of 4 bits, values have the bits of the package's own dequantization before it rounds to 16 bits. Of 8 bits they may
differ in the last place, since bitsandbytes multiplies by SCB and by 1/127 one after the other and here the two are
one factor. That int8 splits off outliers of activations is no matter of the weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from quire.quantized.code_form import CodeForm, FactorForm
from quire.quantized.readers.stored import (
    Headers,
    StoredWeight,
    StoredWeights,
    mismatch,
    prefixes_of,
    require_parts,
    scales_form,
)
from quire.quantized.weight import Factor, QuantizedWeight

__all__ = ["bitsandbytes"]

_STATE = "weight.quant_state.bitsandbytes__"


def bitsandbytes(
    config: Mapping[str, Any], headers: Headers, tensor: Callable[[str], torch.Tensor]
) -> StoredWeights:
    """What is quantized in a checkpoint of bitsandbytes.

    *raises:* LoadError: tensors that are missing or do not fit each other.
    """
    weights = []
    for state_name in sorted(name for name in headers if f".{_STATE}" in name):
        prefix, _, kind = state_name.partition(_STATE)
        state = json.loads(bytes(tensor(state_name).tolist()))
        parts = {key: prefix + "weight." + key for key in ("absmax", "quant_map")} | {
            "weight": prefix + "weight"
        }
        if "nested_blocksize" in state:
            parts |= {key: prefix + "weight." + key for key in ("nested_absmax", "nested_quant_map")}
        require_parts(prefix + "weight", parts.values(), headers)
        outputs, inputs = state["shape"]
        unpack_it = partial(_unpack_4bit, name=prefix + "weight", kind=kind, state=state)
        form = partial(
            _form_4bit, kind=kind, state=state, inputs=inputs, absmax=parts["absmax"], headers=headers
        )
        weights.append(StoredWeight(prefix + "weight", (outputs, inputs), parts, form, unpack_it))
    dropped = {name for name in headers if f".{_STATE}" in name}
    for prefix in prefixes_of(headers, "SCB"):
        outputs, inputs = headers[prefix + "weight"].shape
        parts = {key: prefix + key for key in ("weight", "SCB")}
        form = CodeForm("int8", 8, inputs, FactorForm(torch.float32))
        weights.append(
            StoredWeight(prefix + "weight", (outputs, inputs), parts, partial(_given, form), _unpack_int8)
        )
        dropped |= {prefix + "weight_format"} & set(headers)
    return StoredWeights(tuple(weights), frozenset(dropped))


def _given(form: CodeForm, tensor: Callable[[str], torch.Tensor]) -> CodeForm:
    return form


def _form_4bit(
    tensor: Callable[[str], torch.Tensor],
    *,
    kind: str,
    state: Mapping[str, Any],
    inputs: int,
    absmax: str,
    headers: Headers,
) -> CodeForm:
    """Nested scales are products, which two bytes do not hold."""
    nested = "nested_blocksize" in state
    scales = FactorForm(torch.float32) if nested else scales_form(absmax, headers, tensor)
    return CodeForm(kind, 4, math.gcd(inputs, int(state["blocksize"])), scales, has_table=True)


def _unpack_4bit(
    parts: Mapping[str, torch.Tensor], *, name: str, kind: str, state: Mapping[str, Any]
) -> list[QuantizedWeight]:
    outputs, inputs = state["shape"]
    packed = parts["weight"].contiguous().view(torch.uint8).reshape(-1, 1)
    block = int(state["blocksize"])
    num_blocks = -(-outputs * inputs // block)
    if packed.numel() * 2 != outputs * inputs or parts["absmax"].numel() != num_blocks:
        raise mismatch(
            name,
            "bytes and scales",
            [outputs * inputs // 2, num_blocks],
            [packed.numel(), parts["absmax"].numel()],
        )
    codes = torch.cat([packed >> 4, packed & 15], dim=1).view(outputs, inputs)
    scales = parts["absmax"].flatten()
    if "nested_blocksize" in state:
        of_block = torch.arange(num_blocks) // int(state["nested_blocksize"])
        scales = parts["nested_quant_map"].float()[scales.long()] * parts["nested_absmax"].float()[of_block]
        scales = scales + float(state.get("nested_offset", 0.0))
    # Blocks count along the flattened weight, so one may begin within a row.
    group = math.gcd(inputs, block)
    block_of = torch.arange(0, outputs * inputs, group) // block
    scales = Factor(scales.float()[block_of].view(outputs, -1))
    return [QuantizedWeight(codes, 4, group, scales, kind, table=parts["quant_map"].float())]


def _unpack_int8(parts: Mapping[str, torch.Tensor]) -> list[QuantizedWeight]:
    codes = parts["weight"].view(torch.uint8) ^ 128
    scales = Factor(parts["SCB"].float().reshape(-1, 1) / 127)
    return [QuantizedWeight(codes, 8, codes.shape[1], scales, "int8", zeros=128.0)]
