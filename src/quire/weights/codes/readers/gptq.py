"""GPTQ's tensors: `qweight`, `qzeros`, `scales`, `g_idx` of each quantized linear layer.

    qweight   [K * bits / 32, N] int32, packed along the inputs
    qzeros    [groups, N * bits / 32] int32, packed along the outputs
    scales    [groups, N]
    g_idx     [K], the group of each input; not their order if `desc_act` sorted the inputs. May be absent

A value is (code - zero) * scale. `checkpoint_format` gives the form of saved zeros: "gptq" (v1) minus one, "gptq_v2"
unchanged. GPTQModel 5 and later wrote v2 zeros under "gptq". All zeros of a symmetric weight are 2**(bits - 1), so the
saved zeros themselves decide there, and the label only for asymmetric ones.

The config's bits and groups, with those of single modules (`dynamic`, AutoRound's `extra_config`), must match the
shapes. `desc_act` and `sym` repeat what g_idx and the zeros show.
"""

from __future__ import annotations

import re
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
    require_type,
    scales_form,
)
from quire.weights.codes.readers.packed import even_groups, groups_by_index, sizes_of_groups, unpack
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

__all__ = ["CHANGES_NOTHING", "READS", "gptq"]

_BITS = (2, 3, 4, 8)
_INDEX = (torch.int32, torch.int64)
_INSTEAD = "take the checkpoint in gptq or gptq_v2, or in 16 bits"
_BITS_OF_ANY = whole_number(*_BITS, 16, 32)  # a module in 16 or 32 bits has no codes

CHANGES_NOTHING = TOOLS_CHANGE_NOTHING | AUTO_ROUND_CHANGES_NOTHING
_OF_MODULES: dict[str, Check] = {
    "bits": _BITS_OF_ANY,
    "group_size": whole_number(-1, at_least=1),
    "sym": flag(),
    "desc_act": flag(),
}
READS: dict[str, Check] = {
    **_OF_MODULES,
    "bits": whole_number(*_BITS),
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
    """The quantized weights of a GPTQ checkpoint.

    *raises:* LoadError: another layout, an unknown field, or shapes that do not fit each other.
    """
    config = read_settings(rename_fields(checkpoint.config, _SYNONYMS), READS, CHANGES_NOTHING)
    headers = checkpoint.headers
    zeros_format = config.get("checkpoint_format", config.get("format", "gptq"))
    if config.get("format", zeros_format) != zeros_format:
        raise refusal("quantization_config.format", f"{zeros_format}, as checkpoint_format", config["format"])
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
        path, overrides = _overrides(config, prefix.removesuffix("."))
        settings = {**config, **overrides}
        if settings.get("bits", bits) != bits:
            field = path * ("bits" in overrides) + "bits"
            raise contradiction(name, field, settings["bits"], f"codes of {bits} bits")
        group_size = _group_size(settings, inputs)
        if -(-inputs // group_size) != groups and "group_size" in settings:
            expected = -(-inputs // group_size)
            saved = f"scales of {groups} groups in {inputs} inputs, while the config gives {expected}"
            field = path * ("group_size" in overrides) + "group_size"
            raise contradiction(name, field, settings["group_size"], saved)
        if prefix + "g_idx" in headers:
            parts["g_idx"] = prefix + "g_idx"
            require_type(name, parts["g_idx"], headers, *_INDEX)
        elif groups > 1 and settings.get("desc_act"):
            raise contradiction(name, "desc_act", True, f"no {prefix}g_idx, the group of each input")
        unpack_it = partial(
            _unpack, name=name, bits=bits, group_size=group_size, symmetric=settings.get("sym", True),
            zeros_format=zeros_format,
        )  # fmt: skip
        form = partial(
            _form, name=name, bits=bits, settings=settings, group_size=group_size, inputs=inputs, parts=parts,
            headers=headers,
        )  # fmt: skip
        weights.append(CheckpointWeight(name, (outputs, inputs), parts, form, unpack_it))
    return CheckpointWeights(tuple(weights))


def _group_size(settings: Mapping[str, Any], inputs: int) -> int:
    """A size of -1, or none, means one group."""
    size = settings.get("group_size", -1)
    return inputs if size < 0 else size


def _overrides(config: Mapping[str, Any], module: str) -> tuple[str, Mapping[str, Any]]:
    """The path and the settings of the module alone. GPTQModel's `dynamic`: the first pattern that matches the start of
    its name; "-:" before a pattern leaves modules dense. AutoRound's `extra_config`: its name, else the first pattern
    found in it."""
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
    settings: Mapping[str, Any],
    group_size: int,
    inputs: int,
    parts: Mapping[str, str],
    headers: Headers,
) -> CodeForm:
    """settings: of this module. A symmetric weight has one zero for all groups."""
    group_of = tensor(parts["g_idx"]) if "g_idx" in parts else None
    groups = headers[parts["scales"]].shape[0]
    sizes, order = _groups(name, group_of, inputs, groups, group_size)
    group, _ = even_groups(sizes)
    return CodeForm(
        _label(bits, max(sizes)),
        bits,
        group,
        scales_form(parts["scales"], headers, tensor),
        None if settings.get("sym", True) else torch.uint8,
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
    zeros_format: str,
) -> list[QuantizedWeight]:
    scales = parts["scales"].T.contiguous()
    outputs, groups = scales.shape
    inputs = parts["qweight"].shape[0] * 32 // bits
    codes = unpack(parts["qweight"].T, bits, inputs)
    saved = unpack(parts["qzeros"], bits, outputs).T
    zeros = _zeros(saved, bits, symmetric, zeros_format)
    sizes, order = _groups(name, parts.get("g_idx"), inputs, groups, group_size)
    if order is not None:
        codes = codes[:, order]
    if isinstance(zeros, torch.Tensor):
        group, (scales, zeros) = even_groups(sizes, scales, zeros)
    else:
        group, (scales,) = even_groups(sizes, scales)
    label = _label(bits, max(sizes))
    return [QuantizedWeight(codes, bits, group, Factor(scales), label, zeros=zeros, order=order)]


def _zeros(saved: torch.Tensor, bits: int, symmetric: bool, zeros_format: str) -> torch.Tensor | float:
    """Saved zeros [N, groups] uint8 -> zeros of codes; one number if they are equal."""
    middle, first = 1 << bits - 1, int(saved[0, 0])
    is_uniform = bool((saved == first).all())
    plus_one = zeros_format == "gptq"
    if symmetric and is_uniform and first in (middle, middle - 1):
        plus_one = first == middle - 1
    if is_uniform:
        return float(first + plus_one)
    if not plus_one:
        return saved.contiguous()
    above = saved.to(torch.int16) + 1
    return above.to(torch.uint8 if int(above.max()) < 256 else torch.float32).contiguous()


def _groups(
    name: str, group_of: torch.Tensor | None, inputs: int, groups: int, group_size: int
) -> tuple[list[int], torch.Tensor | None]:
    """The size of each group, and the order of inputs that makes groups adjacent; None if they are already."""
    if group_of is not None:
        return groups_by_index(name, group_of, inputs, groups)
    if -(-inputs // group_size) != groups:  # the config has no group size
        group_size = -(-inputs // groups)
    if -(-inputs // group_size) != groups:
        raise mismatch(name, f"groups of {group_size} in {inputs} inputs", -(-inputs // group_size), groups)
    return sizes_of_groups(inputs, group_size), None
