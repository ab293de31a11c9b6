"""compressed-tensors: weights of integers or 8-bit floats, by schemes that each fit some modules.

    pack-quantized         weight_packed int32 [N, K * bits / 32], weight_scale [N, groups], weight_shape; asymmetric:
                           weight_zero_point int32 [N * bits / 32, groups]; by activation order: weight_g_idx [K]
    int-quantized, naive   weight int8 [N, K], weight_scale, and weight_zero_point int8 if asymmetric
    float-, mxfp8-quantized weight float8 [N, K], weight_scale for a block, a group, an output or all
    mxfp4-pack-quantized   weight_packed uint8 [N, K / 2], weight_scale uint8 [N, K / 32]

Saved integers are signed; packed ones have 2**(bits - 1) added, and so has a code. A value is (code - zero) * scale.
Of schemes that quantize activations too (W8A8, FP8) only the weights are used; activations are not quantized.
The scheme of each module: `compressed_schemes`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from quire.errors import LoadError
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
from quire.weights.codes.readers.compressed_schemes import (
    CHANGES_NOTHING,
    READS,
    require_floats,
    require_groups,
    require_type_of_codes,
    scheme_of,
)
from quire.weights.codes.readers.fp8 import FLOATS_OF_8, fp8_form, unpack_fp8
from quire.weights.codes.readers.mxfp4 import E2M1, MXFP4_FORM, low_nibble_first, powers_of_two
from quire.weights.codes.readers.packed import even_groups, groups_by_index, sizes_of_groups, unpack
from quire.weights.codes.readers.quantization_config import contradiction, read_settings
from quire.weights.codes.weight import Factor, QuantizedWeight

__all__ = ["compressed_tensors"]

_DROPPED = (
    "input_scale",
    "input_zero_point",
    "output_scale",
    "k_scale",
    "v_scale",
    "q_scale",
    "weight_shape",
)


def compressed_tensors(checkpoint: CheckpointReader) -> CheckpointWeights:
    """The quantized weights of a compressed-tensors checkpoint.

    *raises:* LoadError: an unsupported format, scheme or field, or shapes that do not fit each other.
    """
    config, headers = read_settings(checkpoint.config, READS, CHANGES_NOTHING), checkpoint.headers
    weights = []
    for prefix in prefixes_of(headers, "weight_scale"):
        name, key = prefix + "weight", "weight_packed"
        if prefix + key not in headers:
            key = "weight"
        keys = ("weight_scale", "weight_zero_point", "weight_g_idx")
        parts = {part: prefix + part for part in (key, *keys) if prefix + part in headers}
        if key not in parts:
            raise LoadError(f"cannot read the weight {name}: the checkpoint has {prefix}weight_scale alone")
        scheme = scheme_of(config, prefix.removesuffix("."), checkpoint.module_of)
        saved = headers[parts[key]].saved_type
        form: Callable[[Callable[[str], torch.Tensor]], CodeForm]
        if saved == torch.int32 and key == "weight_packed":
            shape, bits = _packed_shape(name, prefix, scheme, checkpoint)
            group_size = _check_integers(name, scheme, shape, parts, headers)
            form = partial(
                _form_of_integers, bits=bits, shape=shape, group_size=group_size, parts=parts, headers=headers
            )
            unpack_it = partial(
                _unpack_packed, name=name, shape=shape, bits=bits, scheme=scheme, group_size=group_size
            )
        elif saved == torch.int8:
            shape = matrix(name, parts[key], headers, torch.int8)
            require_type_of_codes(name, scheme, "int", None)
            group_size = _check_integers(name, scheme, shape, parts, headers)
            form = partial(
                _form_of_integers, bits=8, shape=shape, group_size=group_size, parts=parts, headers=headers
            )
            unpack_it = partial(_unpack_int8, name=name, scheme=scheme, group_size=group_size)
        elif saved in FLOATS_OF_8:
            shape = matrix(name, parts[key], headers, *FLOATS_OF_8)
            require_floats(name, scheme, 8, parts)
            _require_scales_of_floats(name, parts["weight_scale"], shape, headers)
            require_groups(
                name, scheme, shape, headers[parts["weight_scale"]].shape, parts, has_even_groups=True
            )
            of_block = scheme.get("block_structure")
            form = partial(fp8_form, name=name, scale=parts["weight_scale"], block=of_block, headers=headers)
            unpack_it = partial(_unpack_floats, name=name, block=of_block)
        elif saved == torch.uint8 and headers[parts["weight_scale"]].saved_type == torch.uint8:
            rows, columns = matrix(name, parts[key], headers, torch.uint8)
            shape = (rows, columns * 2)
            require_floats(name, scheme, 4, parts)
            of_scales = tuple(headers[parts["weight_scale"]].shape)
            if of_scales != (rows, columns // 16) or columns % 16:
                raise mismatch(name, "weight_scale of", [rows, columns // 16], list(of_scales))
            require_groups(name, scheme, shape, of_scales, parts, has_even_groups=True)
            form = _form_of_mxfp4
            unpack_it = partial(_unpack_mxfp4)
        else:
            raise mismatch(name, "its codes as int32, int8, float8 or (MXFP4) uint8", "", saved)
        weights.append(CheckpointWeight(name, shape, parts, form, unpack_it))
    dropped = {name for name in headers if name.rpartition(".")[2] in _DROPPED}
    return CheckpointWeights(tuple(weights), frozenset(dropped))


def _packed_shape(
    name: str, prefix: str, scheme: Mapping[str, Any], checkpoint: CheckpointReader
) -> tuple[tuple[int, int], int]:
    """Outputs and inputs of packed integers, and their bits."""
    headers, shape_name = checkpoint.headers, prefix + "weight_shape"
    rows, words = matrix(name, prefix + "weight_packed", headers, torch.int32)
    require_parts(name, [shape_name], headers)
    require_type(name, shape_name, headers, torch.int64, torch.int32)
    shape = checkpoint.tensor(shape_name).flatten().tolist()
    if len(shape) != 2 or min(shape) < 1 or shape[0] != rows:
        raise mismatch(name, f"{shape_name} of", [rows, "inputs"], shape)
    inputs = shape[1]
    bits = scheme.get("num_bits") or words * 32 // inputs
    require_type_of_codes(name, scheme, "int", None)
    if not 2 <= bits <= 8 or words != -(-inputs * bits // 32):
        expected = [rows, -(-inputs * bits // 32)]
        if "num_bits" in scheme:
            saved = f"words of {[rows, words]}, while the config gives {expected}"
            raise contradiction(name, "config_groups: num_bits", bits, saved)
        raise mismatch(name, f"words of {bits} bits a code", expected, [rows, words])
    return (rows, inputs), bits


def _check_integers(
    name: str, scheme: Mapping[str, Any], shape: tuple[int, int], parts: Mapping[str, str], headers: Headers
) -> int | None:
    """The inputs of a group, if the scheme has them.

    *raises:* LoadError: scales or zeros whose types or shapes differ from the scheme.
    """
    require_type(name, parts["weight_scale"], headers, *FLOATS)
    of_scales = tuple(headers[parts["weight_scale"]].shape)
    rows, groups = (*of_scales, 1, 1)[:2] if len(of_scales) < 2 else of_scales[:2]
    may_be_one = groups == 1 and rows == 1
    if len(of_scales) > 2 or not 1 <= groups <= shape[1] or (rows != shape[0] and not may_be_one):
        raise mismatch(name, "weight_scale of", [shape[0], "groups"], list(of_scales))
    if "weight_zero_point" in parts:
        require_type(name, parts["weight_zero_point"], headers, torch.int8, torch.int32)
    elif not scheme.get("symmetric", True):
        raise contradiction(name, "config_groups: symmetric", "false", "no weight_zero_point")
    if "weight_g_idx" in parts:
        require_type(name, parts["weight_g_idx"], headers, torch.int32, torch.int64)
    require_groups(name, scheme, shape, of_scales, parts)
    return scheme.get("group_size") if scheme.get("group_size", -1) > 0 else None


def _require_scales_of_floats(name: str, scale: str, shape: tuple[int, int], headers: Headers) -> None:
    """Accept floats, and bytes as exponents (MXFP8)."""
    require_type(name, scale, headers, *FLOATS, torch.float8_e8m0fnu, torch.uint8)
    expected = (shape[0], shape[1] // 32)
    if headers[scale].saved_type == torch.uint8 and (
        tuple(headers[scale].shape) != expected or shape[1] % 32
    ):
        raise mismatch(name, "exponents of", list(expected), list(headers[scale].shape))


def _form_of_mxfp4(tensor: Callable[[str], torch.Tensor]) -> CodeForm:
    return MXFP4_FORM


def _form_of_integers(
    tensor: Callable[[str], torch.Tensor],
    *,
    bits: int,
    shape: tuple[int, int],
    group_size: int | None,
    parts: Mapping[str, str],
    headers: Headers,
) -> CodeForm:
    inputs, of_scales = shape[1], headers[parts["weight_scale"]].shape
    groups = 1 if len(of_scales) < 2 else of_scales[1]
    size = min(group_size or -(-inputs // groups), inputs)
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


def _unpack_packed(
    parts: Mapping[str, torch.Tensor],
    *,
    name: str,
    shape: tuple[int, int],
    bits: int,
    scheme: Mapping[str, Any],
    group_size: int | None,
) -> list[QuantizedWeight]:
    outputs, inputs = shape
    codes = unpack(parts["weight_packed"], bits, inputs)
    scales = _scales_of(parts, outputs)
    zeros: torch.Tensor | float = float(1 << bits - 1)
    if (saved := parts.get("weight_zero_point")) is not None:
        if saved.dtype == torch.int32:
            words = -(-outputs * bits // 32)
            if saved.shape != (words, scales.shape[1]):
                raise mismatch(name, "zero points", [words, scales.shape[1]], list(saved.shape))
            zeros = unpack(saved.T, bits, outputs).T.contiguous()
        else:
            zeros = _zeros_of(name, saved, scales, 1 << bits - 1)
        _check_zeros(name, zeros, bits, scheme)
    return [_integers(name, codes, bits, scales, zeros, parts.get("weight_g_idx"), group_size)]


def _unpack_int8(
    parts: Mapping[str, torch.Tensor], *, name: str, scheme: Mapping[str, Any], group_size: int | None
) -> list[QuantizedWeight]:
    codes = parts["weight"].view(torch.uint8) ^ 128
    scales = _scales_of(parts, codes.shape[0])
    zeros: torch.Tensor | float = 128.0
    if (saved := parts.get("weight_zero_point")) is not None:
        zeros = _zeros_of(name, saved, scales, 128)
        _check_zeros(name, zeros, 8, scheme)
    return [_integers(name, codes, 8, scales, zeros, parts.get("weight_g_idx"), group_size)]


def _scales_of(parts: Mapping[str, torch.Tensor], outputs: int) -> torch.Tensor:
    """[N, groups]; one scale for all outputs is repeated for each."""
    scales = parts["weight_scale"]
    scales = scales.reshape(-1, 1) if scales.dim() < 2 else scales
    return scales.expand(outputs, -1).contiguous()


def _zeros_of(name: str, saved: torch.Tensor, scales: torch.Tensor, middle: int) -> torch.Tensor:
    """Signed zero points that are not packed -> zeros of codes."""
    zeros = saved.reshape(-1, 1) if saved.dim() < 2 else saved
    if zeros.dim() != 2 or zeros.shape not in (scales.shape, (1, scales.shape[1])):
        raise mismatch(name, "zeros", list(scales.shape), list(saved.shape))
    zeros = zeros.to(torch.int64) + middle
    if int(zeros.min()) < 0 or int(zeros.max()) >= 2 * middle:
        raise mismatch(name, "zero points from", [-middle, middle - 1], int(zeros.max()) - middle)
    return zeros.to(torch.uint8).expand(scales.shape).contiguous()


def _check_zeros(name: str, zeros: torch.Tensor, bits: int, scheme: Mapping[str, Any]) -> None:
    if scheme.get("symmetric") and not bool((zeros == 1 << bits - 1).all()):
        raise contradiction(name, "config_groups: symmetric", "true", "zero points that are not 0")


def _integers(
    name: str,
    codes: torch.Tensor,
    bits: int,
    scales: torch.Tensor,
    zeros: torch.Tensor | float,
    group_of: torch.Tensor | None,
    group_size: int | None,
) -> QuantizedWeight:
    inputs, groups = codes.shape[1], scales.shape[1]
    order = None
    # -1: the order is unchanged.
    if group_of is not None and not (group_of.shape == (inputs,) and bool((group_of == -1).all())):
        sizes, order = groups_by_index(name, group_of, inputs, groups)
        codes = codes if order is None else codes[:, order]
    else:
        sizes = sizes_of_groups(inputs, group_size or -(-inputs // groups))
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
