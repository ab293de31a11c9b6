"""AWQ's tensors, of its version "gemm": `qweight`, `qzeros` and `scales` of each quantized linear layer.

    qweight   [K, N / 8] int32: 8 outputs of one input to a word, in the order 0, 2, 4, 6, 1, 3, 5, 7
    qzeros    [groups, N / 8] int32, the same
    scales    [groups, N]

A value is (code - zero) * scale, of 4 bits. The versions "gemv" and "gemv_fast" have other layouts and are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from quire.errors import LoadError
from quire.quantized.code_form import CodeForm
from quire.quantized.readers.packed import even_groups, sizes_of_groups
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

__all__ = ["awq"]

# Output i of 8 is nibble _NIBBLE_OF[i] of its word.
_NIBBLE_OF = [0, 4, 1, 5, 2, 6, 3, 7]


def awq(config: Mapping[str, Any], headers: Headers, tensor: Callable[[str], torch.Tensor]) -> StoredWeights:
    """What is quantized in an AWQ checkpoint.

    *raises:* LoadError: another version, or shapes that do not fit each other.
    """
    version, bits = str(config.get("version") or "gemm").lower(), config.get("bits", config.get("w_bit", 4))
    if version != "gemm" or bits != 4:
        raise LoadError(
            f"expected an AWQ checkpoint of version gemm with 4 bits, got version {version} with {bits}; take one of "
            "gemm, or the model in 16 bits"
        )
    weights = []
    for prefix in prefixes_of(headers, "qweight"):
        parts = {key: prefix + key for key in ("qweight", "qzeros", "scales")}
        require_parts(prefix + "weight", parts.values(), headers)
        inputs, words = headers[parts["qweight"]].shape
        groups, outputs = headers[parts["scales"]].shape
        zeros = headers[parts["qzeros"]].shape
        if words * 8 != outputs or tuple(zeros) != (groups, words):
            raise mismatch(
                prefix + "weight", "qweight and qzeros", [(inputs, outputs // 8), (groups, outputs // 8)],
                [(inputs, words), zeros],
            )  # fmt: skip
        group_size = config.get("group_size", config.get("q_group_size", 128))
        group_size = inputs if group_size < 0 else group_size
        if -(-inputs // group_size) != groups:
            raise mismatch(
                prefix + "weight",
                f"groups of {group_size} in {inputs} inputs",
                -(-inputs // group_size),
                groups,
            )
        unpack_it = partial(_unpack, group_size=group_size)
        form = partial(_form, scales=parts["scales"], inputs=inputs, group_size=group_size, headers=headers)
        weights.append(StoredWeight(prefix + "weight", (outputs, inputs), parts, form, unpack_it))
    return StoredWeights(tuple(weights))


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
