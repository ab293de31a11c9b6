"""GPTQ's tensors: `qweight`, `qzeros`, `scales`, `g_idx` of each quantized linear layer.

    qweight   [K * bits / 32, N] int32, packed along the inputs
    qzeros    [groups, N * bits / 32] int32, packed along the outputs
    scales    [groups, N]
    g_idx     [K], the group of each input; not the order of the inputs where `desc_act` sorted them. May be absent

A value is (code - zero) * scale. `checkpoint_format` says how zeros are stored: "gptq" (v1) less one, "gptq_v2" as they
are. GPTQModel 5 and later has written v2 zeros under "gptq". A symmetric weight tells for itself, since its zeros are
all 2**(bits - 1): what is stored decides there, and the label only for others.

The config's bits and groups, those of single modules included (`dynamic`, AutoRound's `extra_config`), must be those of
the shapes. `desc_act` and `sym` say what g_idx and the zeros say themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from quire.quantized.code_form import CodeForm
from quire.quantized.readers.checkpoint_weights import (
    FLOATS,
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
from quire.quantized.readers.packed import even_groups, groups_by_index, sizes_of_groups, unpack
from quire.quantized.readers.quantization_config import (
    AUTO_ROUND_CHANGES_NOTHING,
    TOOLS_CHANGE_NOTHING,
    Check,
    contradiction,
    flag,
    read_settings,
    refused,
    renamed,
    settings_by_pattern,
    whole,
    word,
)
from quire.quantized.weight import Factor, QuantizedWeight

__all__ = ["CHANGES_NOTHING", "READS", "gptq"]

_BITS = (2, 3, 4, 8)
_INDEX = (torch.int32, torch.int64)
_INSTEAD = "take the checkpoint in gptq or gptq_v2, or in 16 bits"
_BITS_OF_ANY = whole(*_BITS, 16, 32)  # a module in 16 or 32 bits has no codes

CHANGES_NOTHING = TOOLS_CHANGE_NOTHING | AUTO_ROUND_CHANGES_NOTHING
_OF_MODULES: dict[str, Check] = {
    "bits": _BITS_OF_ANY,
    "group_size": whole(-1, at_least=1),
    "sym": flag(),
    "desc_act": flag(),
}
READS: dict[str, Check] = {
    **_OF_MODULES,
    "bits": whole(*_BITS),
    "checkpoint_format": word("gptq", "gptq_v2", instead=_INSTEAD),
    "format": word("gptq", "gptq_v2", instead=_INSTEAD),
    "method": word("gptq"),
    "is_marlin_format": flag(False),
    "pack_dtype": word("int32"),
    "data_type": word("int"),
    "dynamic": settings_by_pattern(_OF_MODULES, CHANGES_NOTHING),
    "extra_config": settings_by_pattern(_OF_MODULES, CHANGES_NOTHING | {"data_type"}),
}
_SYNONYMS = {"w_bit": "bits", "q_group_size": "group_size"}


def gptq(checkpoint: CheckpointReader) -> CheckpointWeights:
    """What is quantized in a GPTQ checkpoint.

    *raises:* LoadError: another layout, a field that is not understood, or shapes that do not fit each other.
    """
    config = read_settings(renamed(checkpoint.config, _SYNONYMS), READS, CHANGES_NOTHING)
    headers = checkpoint.headers
    stored_as = config.get("checkpoint_format", config.get("format", "gptq"))
    if config.get("format", stored_as) != stored_as:
        raise refused("quantization_config.format", f"{stored_as}, as checkpoint_format", config["format"])
    weights = []
    for prefix in prefixes_of(headers, "qweight"):
        name = prefix + "weight"
        parts = {key: prefix + key for key in ("qweight", "qzeros", "scales")}
        require_parts(name, parts.values(), headers)
        rows, outputs = matrix(name, parts["qweight"], headers, torch.int32)
        groups, words = matrix(name, parts["qzeros"], headers, torch.int32)
        of_scales = matrix(name, parts["scales"], headers, *FLOATS)
        bits, rest = divmod(32 * words, outputs)
        if rest or bits not in _BITS or rows * 32 % bits:
            got = [tuple(headers[parts[key]].shape) for key in ("qweight", "qzeros")]
            raise mismatch(name, "2, 3, 4 or 8 bits as", "[K * bits / 32, N], [groups, N * bits / 32]", got)
        if of_scales != (groups, outputs):
            raise mismatch(name, "scales", [groups, outputs], list(of_scales))
        inputs = rows * 32 // bits
        where, overrides = _overrides(config, prefix.removesuffix("."))
        own = {**config, **overrides}
        if own.get("bits", bits) != bits:
            field = where * ("bits" in overrides) + "bits"
            raise contradiction(name, field, own["bits"], f"codes of {bits} bits")
        group_size = _group_size(own, inputs)
        if -(-inputs // group_size) != groups and "group_size" in own:
            expected = -(-inputs // group_size)
            stored = f"scales of {groups} groups in {inputs} inputs, where it makes {expected}"
            field = where * ("group_size" in overrides) + "group_size"
            raise contradiction(name, field, own["group_size"], stored)
        if prefix + "g_idx" in headers:
            parts["g_idx"] = prefix + "g_idx"
            require_type(name, parts["g_idx"], headers, *_INDEX)
        elif groups > 1 and own.get("desc_act"):
            raise contradiction(
                name, "desc_act", True, f"no {prefix}g_idx, which says the group of each input"
            )
        unpack_it = partial(
            _unpack, name=name, bits=bits, group_size=group_size, symmetric=own.get("sym", True),
            stored_as=stored_as,
        )  # fmt: skip
        form = partial(
            _form, name=name, bits=bits, own=own, group_size=group_size, inputs=inputs, parts=parts,
            headers=headers,
        )  # fmt: skip
        weights.append(CheckpointWeight(name, (outputs, inputs), parts, form, unpack_it))
    return CheckpointWeights(tuple(weights))


def _group_size(own: Mapping[str, Any], inputs: int) -> int:
    """-1 and no size at all: one group."""
    size = own.get("group_size", -1)
    return inputs if size < 0 else size


def _overrides(config: Mapping[str, Any], module: str) -> tuple[str, Mapping[str, Any]]:
    """Where the settings of the module alone are, and they. GPTQModel's `dynamic`: the first pattern that its name
    begins with; "-:" before one leaves modules plain. AutoRound's `extra_config`: its name, else the first pattern
    within it."""
    for pattern, settings in config.get("dynamic", {}).items():
        if not pattern.startswith("-:") and re.match(pattern.removeprefix("+:"), module):
            return f"dynamic.{pattern}.", settings
    extra = config.get("extra_config", {})
    fits = [module] if module in extra else [pattern for pattern in extra if re.search(pattern, module)]
    return (f"extra_config.{fits[0]}.", extra[fits[0]]) if fits else ("", {})


def _form(
    tensor: Callable[[str], torch.Tensor],
    *,
    name: str,
    bits: int,
    own: Mapping[str, Any],
    group_size: int,
    inputs: int,
    parts: Mapping[str, str],
    headers: Headers,
) -> CodeForm:
    """own: the settings of this module. Zeros of a symmetric weight are one for all."""
    group_of = tensor(parts["g_idx"]) if "g_idx" in parts else None
    groups = headers[parts["scales"]].shape[0]
    sizes, order = _groups(name, group_of, inputs, groups, group_size)
    group, _ = even_groups(sizes)
    return CodeForm(
        _label(bits, max(sizes)),
        bits,
        group,
        scales_form(parts["scales"], headers, tensor),
        None if own.get("sym", True) else torch.uint8,
        has_order=order is not None,
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
    if -(-inputs // group_size) != groups:  # the config says none
        group_size = -(-inputs // groups)
    if -(-inputs // group_size) != groups:
        raise mismatch(name, f"groups of {group_size} in {inputs} inputs", -(-inputs // group_size), groups)
    return sizes_of_groups(inputs, group_size), None
