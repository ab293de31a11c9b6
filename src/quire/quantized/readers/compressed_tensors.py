"""compressed-tensors: weights of integers or 8-bit floats, by schemes that each fit some modules.

    pack-quantized         weight_packed int32 [N, K * bits / 32], weight_scale [N, groups], weight_shape; asymmetric:
                           weight_zero_point int32 [N * bits / 32, groups]; by activation order: weight_g_idx [K]
    int-quantized, naive   weight int8 [N, K], weight_scale, and weight_zero_point int8 where it is asymmetric
    float-, mxfp8-quantized weight float8 [N, K], weight_scale for a block, a group, an output or all
    mxfp4-pack-quantized   weight_packed uint8 [N, K / 2], weight_scale uint8 [N, K / 32]

Stored integers are signed; packed ones have 2**(bits - 1) added, and so has a code. A value is (code - zero) * scale.
Schemes that quantize activations too (W8A8, FP8) are read as weights alone: activations stay as they are.

Refused by name: NVFP4, 2:4 sparsity, and transforms, which would need rotations of activations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from quire.errors import LoadError
from quire.quantized.code_form import CodeForm
from quire.quantized.readers.fp8 import FLOATS_OF_8, fp8_form, unpack_fp8
from quire.quantized.readers.mxfp4 import E2M1, MXFP4_FORM, low_nibble_first, powers_of_two
from quire.quantized.readers.packed import even_groups, groups_by_index, sizes_of_groups, unpack
from quire.quantized.readers.stored import (
    Headers,
    StoredWeight,
    StoredWeights,
    mismatch,
    prefixes_of,
    scales_form,
)
from quire.quantized.weight import Factor, QuantizedWeight

__all__ = ["compressed_tensors"]

_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized", "mxfp8-quantized",
    "dense", "mixed-precision",
)  # fmt: skip
_DROPPED = (
    "input_scale",
    "input_zero_point",
    "output_scale",
    "k_scale",
    "v_scale",
    "q_scale",
    "weight_shape",
)


def compressed_tensors(
    config: Mapping[str, Any], headers: Headers, tensor: Callable[[str], torch.Tensor]
) -> StoredWeights:
    """What is quantized in a checkpoint of compressed-tensors.

    *raises:* LoadError: a format or a scheme that is not read, or shapes that do not fit each other.
    """
    _refuse_what_is_not_weights(config)
    weights = []
    for prefix in prefixes_of(headers, "weight_scale"):
        name, key = prefix + "weight", "weight_packed"
        if prefix + key not in headers:
            key = "weight"
        names = ("weight_scale", "weight_zero_point", "weight_g_idx")
        parts = {part: prefix + part for part in (key, *names) if prefix + part in headers}
        if key not in parts:
            raise LoadError(f"cannot read the weight {name}: the checkpoint has {prefix}weight_scale alone")
        scheme = _scheme_of(config, prefix.removesuffix("."))
        outputs, columns = headers[parts[key]].shape[-2:]
        stored = headers[parts[key]].stored
        form: Callable[[Callable[[str], torch.Tensor]], CodeForm]
        if stored == torch.int32:
            shape = tensor(prefix + "weight_shape").tolist()
            form = partial(
                _form_of_integers,
                bits=_bits(scheme, columns, shape[-1]),
                shape=shape,
                parts=parts,
                headers=headers,
            )
            unpack_it = partial(_unpack_packed, name=name, shape=shape, scheme=scheme)
        elif stored == torch.int8:
            shape = [outputs, columns]
            form = partial(_form_of_integers, bits=8, shape=shape, parts=parts, headers=headers)
            unpack_it = partial(_unpack_int8, name=name)
        elif stored in FLOATS_OF_8:
            shape = [outputs, columns]
            block = scheme.get("block_structure")
            block = tuple(block) if block else None
            form = partial(fp8_form, name=name, scale=parts["weight_scale"], block=block, headers=headers)
            unpack_it = partial(_unpack_floats, name=name, block=block)
        elif stored == torch.uint8 and headers[parts["weight_scale"]].stored == torch.uint8:
            shape = [outputs, columns * 2]
            form = _form_of_mxfp4
            unpack_it = partial(_unpack_mxfp4)
        else:
            raise mismatch(name, "its codes as int32, int8, float8 or (MXFP4) uint8", "", stored)
        if len(headers[parts[key]].shape) != 2 or len(shape) != 2 or shape[0] != outputs:
            raise mismatch(name, "codes of", "[N, K]", [list(headers[parts[key]].shape), shape])
        weights.append(StoredWeight(name, (shape[0], shape[1]), parts, form, unpack_it))
    dropped = {name for name in headers if name.rpartition(".")[2] in _DROPPED}
    return StoredWeights(tuple(weights), frozenset(dropped))


def _refuse_what_is_not_weights(config: Mapping[str, Any]) -> None:
    instead = "take a checkpoint of the model in W8A16, W4A16, W8A8 or FP8, or in 16 bits"
    formats = {config.get("format")} | {group.get("format") for group in _groups(config).values()}
    for stored_as in sorted(str(each) for each in formats if each is not None):
        if stored_as not in _FORMATS:
            raise LoadError(
                f"expected a compressed-tensors format of {', '.join(_FORMATS)}, got {stored_as!r}; {instead}"
            )
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise LoadError(f"expected compressed-tensors without sparsity, got {sparsity!r}; {instead}")
    if (config.get("transform_config") or {}).get("config_groups"):
        raise LoadError(f"expected compressed-tensors without transforms, got a transform_config; {instead}")


def _groups(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The schemes that are written out; a preset's name with its targets alone says nothing that shapes do not."""
    return {
        name: group
        for name, group in (config.get("config_groups") or {}).items()
        if isinstance(group, Mapping)
    }


def _scheme_of(config: Mapping[str, Any], module: str) -> Mapping[str, Any]:
    """How the weights of the module are quantized: by its name, else by a pattern, else by the class it may be of."""
    groups = [
        (group, str(target)) for group in _groups(config).values() for target in group.get("targets") or []
    ]
    fits: tuple[Callable[[str], bool], ...] = (
        lambda target: target == module,
        lambda target: target.startswith("re:") and re.match(target.removeprefix("re:"), module) is not None,
        lambda target: target.isidentifier() and target[0].isupper(),
    )
    for fit in fits:
        for group, target in groups:
            if fit(target):
                return group.get("weights") or {}
    if len(schemes := {id(group): group for group, _ in groups}) == 1:
        return next(iter(schemes.values())).get("weights") or {}
    raise LoadError(
        f"cannot read the weight {module}.weight: expected a scheme of config_groups that fits the module, got targets "
        f"{sorted({target for _, target in groups})}"
    )


def _form_of_mxfp4(tensor: Callable[[str], torch.Tensor]) -> CodeForm:
    return MXFP4_FORM


def _form_of_integers(
    tensor: Callable[[str], torch.Tensor],
    *,
    bits: int,
    shape: list[int],
    parts: Mapping[str, str],
    headers: Headers,
) -> CodeForm:
    inputs, of_scales = shape[1], headers[parts["weight_scale"]].shape
    groups = 1 if len(of_scales) < 2 else of_scales[1]
    size = -(-inputs // groups)
    group, _ = even_groups(sizes_of_groups(inputs, size))
    return CodeForm(
        _label(bits, groups, size),
        bits,
        group,
        scales_form(parts["weight_scale"], headers, tensor),
        torch.uint8 if "weight_zero_point" in parts else None,
        has_order="weight_g_idx" in parts,
    )


def _label(bits: int, groups: int, size: int) -> str:
    return f"int{bits}" if groups == 1 else f"int{bits}:{size}"


def _bits(scheme: Mapping[str, Any], words: int, inputs: int) -> int:
    return int(scheme.get("num_bits") or words * 32 // inputs)


def _unpack_packed(
    parts: Mapping[str, torch.Tensor], *, name: str, shape: list[int], scheme: Mapping[str, Any]
) -> list[QuantizedWeight]:
    outputs, inputs = shape
    words = parts["weight_packed"].shape[1]
    bits = _bits(scheme, words, inputs)
    if not 2 <= bits <= 8 or words != -(-inputs * bits // 32):
        raise mismatch(
            name, f"words of {bits} bits a code", [outputs, -(-inputs * bits // 32)], [outputs, words]
        )
    codes = unpack(parts["weight_packed"], bits, inputs)
    scales = parts["weight_scale"].reshape(outputs, -1)
    zeros: torch.Tensor | float = float(1 << bits - 1)
    if (stored := parts.get("weight_zero_point")) is not None:
        if stored.dtype == torch.int32:
            zeros = unpack(stored.T, bits, outputs).T.contiguous()
        else:
            zeros = (stored.reshape(outputs, -1).to(torch.int16) + (1 << bits - 1)).to(torch.uint8)
    return [_integers(name, codes, bits, scales, zeros, parts.get("weight_g_idx"))]


def _unpack_int8(parts: Mapping[str, torch.Tensor], *, name: str) -> list[QuantizedWeight]:
    codes = parts["weight"].view(torch.uint8) ^ 128
    outputs = codes.shape[0]
    scales = (
        parts["weight_scale"].reshape(-1, 1) if parts["weight_scale"].dim() < 2 else parts["weight_scale"]
    )
    if scales.shape[0] == 1:
        scales = scales.expand(outputs, -1)
    zeros: torch.Tensor | float = 128.0
    if (stored := parts.get("weight_zero_point")) is not None:
        zeros = (stored.to(torch.int16) + 128).to(torch.uint8).reshape(-1, scales.shape[1])
        zeros = zeros.expand(scales.shape).contiguous()
    return [_integers(name, codes, 8, scales.contiguous(), zeros, None)]


def _integers(
    name: str,
    codes: torch.Tensor,
    bits: int,
    scales: torch.Tensor,
    zeros: torch.Tensor | float,
    group_of: torch.Tensor | None,
) -> QuantizedWeight:
    inputs, groups = codes.shape[1], scales.shape[1]
    order = None
    if group_of is not None and int(group_of.min()) >= 0:
        sizes, order = groups_by_index(name, group_of, inputs, groups)
        codes = codes if order is None else codes[:, order]
    else:
        size = -(-inputs // groups)
        sizes = sizes_of_groups(inputs, size)
    if scales.shape[0] != codes.shape[0] or len(sizes) != groups:
        raise mismatch(name, "scales", [codes.shape[0], len(sizes)], list(scales.shape))
    if isinstance(zeros, torch.Tensor):
        if zeros.shape != scales.shape:
            raise mismatch(name, "zeros", list(scales.shape), list(zeros.shape))
        group, (scales, zeros) = even_groups(sizes, scales, zeros)
    else:
        group, (scales,) = even_groups(sizes, scales)
    label = _label(bits, groups, max(sizes))
    return QuantizedWeight(codes, bits, group, Factor(scales), label, zeros=zeros, order=order)


def _unpack_floats(
    parts: Mapping[str, torch.Tensor], *, name: str, block: tuple[int, int] | None
) -> list[QuantizedWeight]:
    return [unpack_fp8(name, parts["weight"], parts["weight_scale"], block)]


def _unpack_mxfp4(parts: Mapping[str, torch.Tensor]) -> list[QuantizedWeight]:
    codes = low_nibble_first(parts["weight_packed"])
    scales = Factor(powers_of_two(parts["weight_scale"]))
    return [QuantizedWeight(codes, 4, 32, scales, "mxfp4", table=torch.tensor(E2M1))]
