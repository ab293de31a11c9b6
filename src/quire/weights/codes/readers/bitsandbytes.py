"""bitsandbytes: NF4 and FP4 in blocks of 64 values, and int8 with one scale for an output.

    4 bits   weight uint8 [N * K / 2, 1], two values to a byte, the high nibble first; weight.quant_map [16];
             weight.absmax, a scale for each block of the flattened weight: float32, or uint8 with
             weight.nested_quant_map [256] and weight.nested_absmax for each 256 of them;
             weight.quant_state.bitsandbytes__nf4: JSON with shape, block sizes and the nested scales' offset
    8 bits   weight int8 [N, K], SCB [N]: a value is weight * SCB / 127

At 4 bits, values have the bits of the package's own dequantization before it rounds to 16 bits. At 8 bits they may
differ in the last place: bitsandbytes multiplies by SCB and then by 1/127, here the two are one factor. Its separate
product for outliers of activations does not concern the weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from quire.weights.codes.code_form import CodeForm, FactorForm
from quire.weights.codes.readers.checkpoint_weights import (
    CheckpointReader,
    CheckpointWeight,
    CheckpointWeights,
    Headers,
    matrix,
    mismatch,
    prefixes_of,
    require_parts,
    require_type,
    scales_form,
)
from quire.weights.codes.readers.quantization_config import (
    TOOLS_CHANGE_NOTHING,
    Check,
    contradiction,
    flag,
    read_settings,
    refusal,
    whole_number,
    word,
)
from quire.weights.codes.weight import Factor, QuantizedWeight

__all__ = ["CHANGES_NOTHING", "READS", "bitsandbytes"]

_STATE = "weight.quant_state.bitsandbytes__"


# Each weight's own quant_state has the types of its 4-bit codes and scales; its bytes show how they are saved.
CHANGES_NOTHING = TOOLS_CHANGE_NOTHING | {
    "llm_int8_threshold", "llm_int8_skip_modules", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight",
    "bnb_4bit_compute_dtype", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage",
}  # fmt: skip
READS: dict[str, Check] = dict.fromkeys(
    ("load_in_4bit", "_load_in_4bit", "load_in_8bit", "_load_in_8bit"), flag()
)


def _offset(field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise refusal(field, "a number", value)
    return float(value)


def _shape(field: str, value: Any) -> tuple[int, int]:
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(type(size) is int and size > 0 for size in value)
    ):
        raise refusal(field, "two whole numbers above 0", value)
    return value[0], value[1]


_STATE_READS: dict[str, Check] = {
    "shape": _shape,
    "blocksize": whole_number(at_least=1),
    "nested_blocksize": whole_number(at_least=1),
    "nested_offset": _offset,
    "quant_type": word("nf4", "fp4"),
}
_STATE_CHANGES_NOTHING = ("dtype", "nested_dtype")  # types that the package dequantizes to


def bitsandbytes(checkpoint: CheckpointReader) -> CheckpointWeights:
    """The quantized weights of a bitsandbytes checkpoint.

    *raises:* LoadError: tensors that are missing or do not fit each other, or an unknown field.
    """
    config, headers = read_settings(checkpoint.config, READS, CHANGES_NOTHING), checkpoint.headers
    weights = []
    for state_name in sorted(name for name in headers if f".{_STATE}" in name):
        prefix, _, kind = state_name.partition(_STATE)
        name = prefix + "weight"
        _require_bits(name, config, 4)
        state = _read_state(state_name, checkpoint)
        if state.get("quant_type", kind) != kind:
            raise mismatch(name, f"the quant_type of {state_name},", kind, state["quant_type"])
        parts = {key: f"{name}.{key}" for key in ("absmax", "quant_map")} | {"weight": name}
        if "nested_blocksize" in state:
            parts |= {key: f"{name}.{key}" for key in ("nested_absmax", "nested_quant_map")}
        require_parts(name, parts.values(), headers)
        require_type(
            name, name, headers, torch.uint8, torch.int8, torch.bfloat16, torch.float16, torch.float32
        )
        scales_type = torch.uint8 if "nested_blocksize" in state else torch.float32
        require_type(name, parts["absmax"], headers, scales_type)
        for key in parts.keys() - {"absmax", "weight"}:
            require_type(name, parts[key], headers, torch.float32)
        if tuple(headers[parts["quant_map"]].shape) != (16,):
            raise mismatch(name, parts["quant_map"] + " of", [16], list(headers[parts["quant_map"]].shape))
        unpack_it = partial(_unpack_4bit, name=name, kind=kind, state=state)
        form = partial(
            _form_4bit,
            kind=kind,
            state=state,
            inputs=state["shape"][1],
            absmax=parts["absmax"],
            headers=headers,
        )
        weights.append(CheckpointWeight(name, state["shape"], parts, form, unpack_it))
    dropped = {name for name in headers if f".{_STATE}" in name}
    for prefix in prefixes_of(headers, "SCB"):
        name = prefix + "weight"
        _require_bits(name, config, 8)
        parts = {key: prefix + key for key in ("weight", "SCB")}
        require_parts(name, parts.values(), headers)
        outputs, inputs = matrix(name, name, headers, torch.int8)
        require_type(name, parts["SCB"], headers, torch.float32, torch.float16)
        if math.prod(headers[parts["SCB"]].shape) != outputs:
            raise mismatch(name, "SCB of", [outputs], list(headers[parts["SCB"]].shape))
        form = CodeForm("int8", 8, inputs, FactorForm(torch.float32))
        weights.append(
            CheckpointWeight(name, (outputs, inputs), parts, partial(_known_form, form), _unpack_int8)
        )
        dropped |= {prefix + "weight_format"} & set(headers)
    return CheckpointWeights(tuple(weights), frozenset(dropped))


def _require_bits(name: str, config: Mapping[str, Any], bits: int) -> None:
    """*raises:* LoadError: the config gives the weights other bits."""
    for field_bits in (4, 8):
        for key in (f"load_in_{field_bits}bit", f"_load_in_{field_bits}bit"):
            if config.get(key, field_bits == bits) != (field_bits == bits):
                raise contradiction(name, key, config[key], f"codes of {bits} bits")


def _read_state(name: str, checkpoint: CheckpointReader) -> dict[str, Any]:
    require_type(name, name, checkpoint.headers, torch.uint8)
    try:
        saved = json.loads(bytes(checkpoint.tensor(name).flatten().tolist()))
    except ValueError as error:
        raise mismatch(name, "JSON,", "", error) from error
    state = read_settings(saved, _STATE_READS, _STATE_CHANGES_NOTHING, name)
    needed = ["shape", "blocksize"] + ["nested_offset"] * ("nested_blocksize" in state)
    for key in needed:
        if key not in state:
            raise mismatch(name, f"its field {key},", "", "none")
    return state


def _known_form(form: CodeForm, tensor: Callable[[str], torch.Tensor]) -> CodeForm:
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
    """The form of a 4-bit weight. Nested scales are products, which need four bytes."""
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
        nested_block = torch.arange(num_blocks) // int(state["nested_blocksize"])
        table, largest = parts["nested_quant_map"], parts["nested_absmax"]
        expected, got = [(256,), (int(nested_block[-1]) + 1,)], [tuple(table.shape), tuple(largest.shape)]
        if got != expected:
            raise mismatch(name, "nested values and scales of", expected, got)
        scales = table[scales.long()] * largest[nested_block] + state["nested_offset"]
    # Blocks run along the flattened weight, so a block may begin within a row.
    group = math.gcd(inputs, block)
    block_of = torch.arange(0, outputs * inputs, group) // block
    scales = Factor(scales.float()[block_of].view(outputs, -1))
    return [QuantizedWeight(codes, 4, group, scales, kind, table=parts["quant_map"].float())]


def _unpack_int8(parts: Mapping[str, torch.Tensor]) -> list[QuantizedWeight]:
    codes = parts["weight"].view(torch.uint8) ^ 128
    scales = Factor(parts["SCB"].float().reshape(-1, 1) / 127)
    return [QuantizedWeight(codes, 8, codes.shape[1], scales, "int8", zeros=128.0)]
