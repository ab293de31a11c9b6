"""AWQ's tensors, of its version "gemm": `qweight`, `qzeros` and `scales` of each quantized linear layer.

    qweight   [K, N / 8] int32: 8 outputs of one input in a word, in the order 0, 2, 4, 6, 1, 3, 5, 7
    qzeros    [groups, N / 8] int32, likewise
    scales    [groups, N]

A value is (code - zero) * scale, of 4 bits. The versions "gemv" and "gemv_fast" have other layouts and are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

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
    require_parts,
    scales_form,
)
from quire.weights.codes.readers.packed import even_groups, sizes_of_groups
from quire.weights.codes.readers.quantization_config import (
    AUTO_ROUND_CHANGES_NOTHING,
    TOOLS_CHANGE_NOTHING,
    Check,
    contradiction,
    flag,
    read_settings,
    refusal,
    rename_fields,
    settings_by_pattern,
    whole_number,
    word,
)
from quire.weights.codes.weight import Factor, QuantizedWeight

__all__ = ["CHANGES_NOTHING", "READS", "awq"]

# Output i of 8 is nibble _NIBBLE_OF[i] of its word.
_NIBBLE_OF = [0, 4, 1, 5, 2, 6, 3, 7]


def _not_llm_awq(field: str, value: Any) -> Any:
    """The tool that runs the checkpoint does not matter, except this one, which has a layout of its own."""
    if value == "llm-awq":
        raise refusal(field, "codes in the version gemm", value)
    return value


_GEMM = word("gemm", instead="take the checkpoint in the version gemm, or the model in 16 bits")

# zero_point and sym repeat what the zeros show.
CHANGES_NOTHING = (TOOLS_CHANGE_NOTHING | AUTO_ROUND_CHANGES_NOTHING) - {"backend"}
READS: dict[str, Check] = {
    "bits": whole_number(4),
    "group_size": whole_number(-1, at_least=1),
    "version": _GEMM,
    "format": _GEMM,
    "checkpoint_format": _GEMM,
    "method": word("awq"),
    "backend": _not_llm_awq,
    "zero_point": flag(),
    "sym": flag(),
    "desc_act": flag(False),
    "pack_dtype": word("int32"),
    "data_type": word("int"),
    "extra_config": settings_by_pattern({"bits": whole_number(4, 16, 32)}, CHANGES_NOTHING | {"data_type"}),
}
_SYNONYMS = {"w_bit": "bits", "q_group_size": "group_size"}


def awq(checkpoint: CheckpointReader) -> CheckpointWeights:
    """The quantized weights of an AWQ checkpoint.

    *raises:* LoadError: another version, an unknown field, or shapes that do not fit each other.
    """
    config = read_settings(rename_fields(checkpoint.config, _SYNONYMS), READS, CHANGES_NOTHING)
    headers = checkpoint.headers
    weights = []
    for prefix in prefixes_of(headers, "qweight"):
        name = prefix + "weight"
        parts = {key: prefix + key for key in ("qweight", "qzeros", "scales")}
        require_parts(name, parts.values(), headers)
        inputs, words = matrix(name, parts["qweight"], headers, torch.int32)
        groups, outputs = matrix(name, parts["scales"], headers, *FLOATS)
        zeros = matrix(name, parts["qzeros"], headers, torch.int32)
        if words * 8 != outputs or zeros != (groups, words):
            raise mismatch(
                name, "qweight and qzeros", [(inputs, outputs // 8), (groups, outputs // 8)],
                [(inputs, words), zeros],
            )  # fmt: skip
        group_size = config.get("group_size", 128)
        group_size = inputs if group_size < 0 else group_size
        if -(-inputs // group_size) != groups:
            saved = f"scales of {groups} groups in {inputs} inputs, while the config gives {-(-inputs // group_size)}"
            raise contradiction(name, "group_size", group_size, saved)
        unpack_it = partial(_unpack, group_size=group_size)
        form = partial(_form, scales=parts["scales"], inputs=inputs, group_size=group_size, headers=headers)
        weights.append(CheckpointWeight(name, (outputs, inputs), parts, form, unpack_it))
    return CheckpointWeights(tuple(weights))


def _form(
    tensor: Callable[[str], torch.Tensor], *, scales: str, inputs: int, group_size: int, headers: Headers
) -> CodeForm:
    group, _ = even_groups(sizes_of_groups(inputs, group_size))
    return CodeForm(_label(group_size), 4, group, scales_form(scales, headers, tensor), torch.uint8)


def _label(group_size: int) -> str:
    return f"awq int4:{group_size}"


def _unpack(parts: Mapping[str, torch.Tensor], *, group_size: int) -> list[QuantizedWeight]:
    codes, zeros = (_nibbles(parts[key]).T.contiguous() for key in ("qweight", "qzeros"))
    scales = parts["scales"].T.contiguous()
    inputs = codes.shape[1]
    group, (scales, zeros) = even_groups(sizes_of_groups(inputs, group_size), scales, zeros)
    return [QuantizedWeight(codes, 4, group, Factor(scales), _label(group_size), zeros=zeros)]


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """[rows, n] int32 -> [rows, n * 8] uint8 in the order of the outputs."""
    packed = words.contiguous().view(torch.uint8).unsqueeze(-1)
    nibbles = torch.cat([packed & 15, packed >> 4], dim=-1).view(words.shape[0], -1, 8)
    return nibbles[..., _NIBBLE_OF].flatten(1)
