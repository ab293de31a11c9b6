"""GPTQ's tensors: `qweight`, `qzeros`, `scales`, `g_idx` of each quantized linear layer.

    qweight   [K * bits / 32, N] int32, packed along the inputs
    qzeros    [groups, N * bits / 32] int32, packed along the outputs
    scales    [groups, N]
    g_idx     [K], the group of each input; not the order of the inputs where `desc_act` sorted them. May be absent

A value is (code - zero) * scale. `checkpoint_format` says how zeros are stored: "gptq" (v1) less one, "gptq_v2" as they
are. GPTQModel 5 and later has written v2 zeros under "gptq". A symmetric weight tells for itself, since its zeros are
all 2**(bits - 1): what is stored decides there, and the label only for others.

Number of bits and groups are those of the shapes, which per-pattern settings (`dynamic`) cannot contradict.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from quire.errors import LoadError
from quire.quantized.code_form import CodeForm
from quire.quantized.readers.packed import even_groups, groups_by_index, sizes_of_groups, unpack
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

__all__ = ["gptq"]

_BITS = (2, 3, 4, 8)
_FORMATS = ("gptq", "gptq_v2")


def gptq(config: Mapping[str, Any], headers: Headers, tensor: Callable[[str], torch.Tensor]) -> StoredWeights:
    """What is quantized in a GPTQ checkpoint.

    *raises:* LoadError: another layout, or shapes that do not fit each other.
    """
    stored_as = config.get("checkpoint_format") or config.get("format") or "gptq"
    if stored_as not in _FORMATS:
        raise LoadError(
            f"expected a GPTQ checkpoint_format of {' or '.join(_FORMATS)}, got {stored_as!r}, which is made for one "
            "kernel; take the checkpoint in one of the two, or in 16 bits"
        )
    weights = []
    for prefix in prefixes_of(headers, "qweight"):
        parts = {key: prefix + key for key in ("qweight", "qzeros", "scales")}
        require_parts(prefix + "weight", parts.values(), headers)
        if prefix + "g_idx" in headers:
            parts["g_idx"] = prefix + "g_idx"
        rows, outputs = headers[parts["qweight"]].shape
        bits, rest = divmod(32 * headers[parts["qzeros"]].shape[1], outputs)
        if rest or bits not in _BITS or rows * 32 % bits:
            got = [tuple(headers[parts[key]].shape) for key in ("qweight", "qzeros")]
            raise mismatch(
                prefix + "weight", "2, 3, 4 or 8 bits as", "[K * bits / 32, N], [groups, N * bits / 32]", got
            )
        shape = (outputs, rows * 32 // bits)
        own = {**config, **_overrides(config, prefix.removesuffix("."))}
        unpack_it = partial(
            _unpack, name=prefix + "weight", bits=bits, group_size=own.get("group_size") or -1,
            symmetric=bool(own.get("sym", True)), stored_as=stored_as,
        )  # fmt: skip
        form = partial(_form, bits=bits, own=own, inputs=shape[1], parts=parts, headers=headers)
        weights.append(StoredWeight(prefix + "weight", shape, parts, form, unpack_it))
    return StoredWeights(tuple(weights))


def _overrides(config: Mapping[str, Any], module: str) -> Mapping[str, Any]:
    """GPTQModel's settings for modules whose names match a pattern; "-:" before one leaves them plain."""
    for pattern, settings in (config.get("dynamic") or {}).items():
        if not pattern.startswith("-:") and re.match(pattern.removeprefix("+:"), module):
            return settings or {}
    return {}


def _form(
    tensor: Callable[[str], torch.Tensor],
    *,
    bits: int,
    own: Mapping[str, Any],
    inputs: int,
    parts: Mapping[str, str],
    headers: Headers,
) -> CodeForm:
    """own: the settings of this module. Zeros of a symmetric weight are one for all."""
    groups, size = headers[parts["scales"]].shape[0], own.get("group_size") or -1
    if size < 0 or -(-inputs // size) != groups:
        size = -(-inputs // groups)
    group, _ = even_groups(sizes_of_groups(inputs, size))
    return CodeForm(
        _label(bits, min(size, inputs)),
        bits,
        group,
        scales_form(parts["scales"], headers, tensor),
        None if own.get("sym", True) else torch.uint8,
        has_order="g_idx" in parts and bool(own.get("desc_act")),
    )


def _label(bits: int, size: int) -> str:
    return f"gptq int{bits}:{size}"


def _unpack(
    parts: Mapping[str, torch.Tensor],
    *,
    name: str,
    bits: int,
    group_size: int,
    symmetric: bool,
    stored_as: str,
) -> list[QuantizedWeight]:
    scales = parts["scales"].T.contiguous()
    outputs, groups = scales.shape
    inputs = parts["qweight"].shape[0] * 32 // bits
    codes = unpack(parts["qweight"].T, bits, inputs)
    stored = unpack(parts["qzeros"], bits, outputs).T
    if codes.shape[0] != outputs or stored.shape[1] != groups:
        raise mismatch(name, "scales", [stored.shape[1], codes.shape[0]], [groups, outputs])
    zeros = _zeros(stored, bits, symmetric, stored_as)
    sizes, order = _groups(name, parts.get("g_idx"), inputs, groups, group_size)
    if order is not None:
        codes = codes[:, order]
    if isinstance(zeros, torch.Tensor):
        group, (scales, zeros) = even_groups(sizes, scales, zeros)
    else:
        group, (scales,) = even_groups(sizes, scales)
    label = _label(bits, max(sizes))
    return [QuantizedWeight(codes, bits, group, Factor(scales), label, zeros=zeros, order=order)]


def _zeros(stored: torch.Tensor, bits: int, symmetric: bool, stored_as: str) -> torch.Tensor | float:
    """[N, groups] uint8 as stored -> zeros, one for all where they are equal."""
    middle, first = 1 << bits - 1, int(stored[0, 0])
    is_uniform = bool((stored == first).all())
    plus_one = stored_as == "gptq"
    if symmetric and is_uniform and first in (middle, middle - 1):
        plus_one = first == middle - 1
    if is_uniform:
        return float(first + plus_one)
    if not plus_one:
        return stored.contiguous()
    above = stored.to(torch.int16) + 1
    return above.to(torch.uint8 if int(above.max()) < 256 else torch.float32).contiguous()


def _groups(
    name: str, group_of: torch.Tensor | None, inputs: int, groups: int, group_size: int
) -> tuple[list[int], torch.Tensor | None]:
    """The size of each group, and the order of inputs that makes groups of neighbours; None where they are already."""
    if group_of is not None:
        return groups_by_index(name, group_of, inputs, groups)
    size = inputs if group_size < 0 else group_size
    if -(-inputs // size) != groups:
        raise mismatch(name, f"groups of {size} in {inputs} inputs", -(-inputs // size), groups)
    return sizes_of_groups(inputs, size), None
