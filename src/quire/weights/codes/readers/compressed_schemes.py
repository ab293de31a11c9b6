"""compressed-tensors' schemes: a quantization_config's settings for each module, compared with its tensors.

A module's scheme is that of the target that fits it: its name, else a pattern ("re:..."), else the name of its class or
of a base class; of several patterns, or classes, the first in alphabetical order, as in compressed-tensors. A quantized
weight that `ignore` names or no target fits is refused, and so is one whose tensors differ from its scheme.

Refused by name: NVFP4, 2:4 sparsity, and transforms, which would need rotations of activations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from quire.errors import LoadError
from quire.weights.codes.readers.checkpoint_weights import CheckpointModule, mismatch
from quire.weights.codes.readers.fp8 import blocks_of
from quire.weights.codes.readers.quantization_config import (
    TOOLS_CHANGE_NOTHING,
    Check,
    block,
    contradiction,
    flag,
    names,
    read_settings,
    refusal,
    whole_number,
    word,
)

__all__ = [
    "CHANGES_NOTHING",
    "READS",
    "require_floats",
    "require_groups",
    "require_type_of_codes",
    "scheme_of",
]

_INSTEAD = "take a checkpoint of the model in W8A16, W4A16, W8A8 or FP8, or in 16 bits"
_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized", "mxfp8-quantized",
    "dense", "mixed-precision",
)  # fmt: skip
_PRESET_OF_INTEGERS = re.compile(r"W([2-8])A(?:4|8|16|FP8)(_ASYM)?")
_PRESETS: dict[str, dict[str, Any]] = {
    "UNQUANTIZED": {},
    "INT8": {"num_bits": 8, "type": "int"},
    "FP8": {"num_bits": 8, "type": "float"},
    "FP8_DYNAMIC": {"num_bits": 8, "type": "float"},
    "FP8_BLOCK": {"num_bits": 8, "type": "float", "block_structure": (128, 128)},
    "MXFP8": {"num_bits": 8, "type": "float", "group_size": 32},
    "MXFP8A16": {"num_bits": 8, "type": "float", "group_size": 32},
    "MXFP4": {"num_bits": 4, "type": "float", "group_size": 32},
    "MXFP4A16": {"num_bits": 4, "type": "float", "group_size": 32},
}


def _weights(field: str, value: Any) -> dict[str, Any]:
    return read_settings(value, WEIGHTS_READS, WEIGHTS_CHANGE_NOTHING, field)


def _group(field: str, value: Any) -> dict[str, Any]:
    """A scheme, written in full or as a preset's name with its targets."""
    if not isinstance(value, (list, tuple)):
        return read_settings(value, GROUPS_READS, GROUPS_CHANGE_NOTHING, field)
    preset = field.rpartition(".")[2].upper()
    weights = _PRESETS.get(preset)
    if weights is None and (integer_preset := _PRESET_OF_INTEGERS.fullmatch(preset)):
        weights = {"num_bits": int(integer_preset[1]), "type": "int", "symmetric": not integer_preset[2]}
    if weights is None:
        raise refusal(field, "a scheme, or the name of a preset that is read", preset, _INSTEAD)
    return {"targets": names(field, value), "weights": weights or None}


def _groups(field: str, value: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(value, Mapping):
        raise refusal(field, "an object of schemes", value)
    return {name: _group(f"{field}.{name}", group) for name, group in value.items()}


def _actorder(field: str, value: Any) -> str:
    """Old versions wrote true for "group"."""
    if isinstance(value, bool):
        return "group" if value else "weight"
    return word("group", "weight", "static", "dynamic")(field, value)


def _sparsity(field: str, value: Any) -> None:
    dense = {"format": word("dense", instead=_INSTEAD)}
    read_settings(value, dense, ("targets", "ignore", "global_sparsity", "sparsity_structure"), field)


def _transforms(field: str, value: Any) -> None:
    def none(group: str, transforms: Any) -> None:
        if transforms:
            raise refusal(group, "no transforms of activations", transforms, _INSTEAD)

    read_settings(value, {"config_groups": none}, (), field)


_FORMAT = word(*_FORMATS, instead=_INSTEAD)
# The method that found the scales, and the types of tensors, which the headers give.
WEIGHTS_CHANGE_NOTHING = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
WEIGHTS_READS: dict[str, Check] = {
    "num_bits": whole_number(2, 3, 4, 5, 6, 7, 8),
    "type": word("int", "float"),
    "symmetric": flag(),
    "strategy": word("tensor", "channel", "group", "block"),
    "group_size": whole_number(-1, at_least=1),
    "block_structure": block,
    "dynamic": flag(False),
    "actorder": _actorder,
}
GROUPS_CHANGE_NOTHING = ("input_activations", "output_activations")  # not quantized here
GROUPS_READS: dict[str, Check] = {"targets": names, "weights": _weights, "format": _FORMAT}
# Keys and values have the engine's formats. The tensors show whether there are codes (quantization_status).
CHANGES_NOTHING = TOOLS_CHANGE_NOTHING | {
    "quantization_status", "kv_cache_scheme", "global_compression_ratio", "version",
}  # fmt: skip
READS: dict[str, Check] = {
    "config_groups": _groups,
    "format": _FORMAT,
    "ignore": names,
    "sparsity_config": _sparsity,
    "transform_config": _transforms,
}


def scheme_of(
    config: Mapping[str, Any], module: str, module_of: Callable[[str], CheckpointModule]
) -> Mapping[str, Any]:
    """The quantization settings of the module's weights. A target of two schemes belongs to the later one.

    *raises:* LoadError: no scheme fits, or the module is ignored or has a scheme without weights.
    """
    field = f"cannot read the weight {module}.weight: expected"
    of_model = module_of(module)
    known_as = (of_model.name, module)
    by_target = {
        target: group
        for group in config.get("config_groups", {}).values()
        for target in group.get("targets", [])
    }
    for ignored in config.get("ignore", []):
        if ignored in of_model.classes or _is_name(ignored, known_as):
            raise LoadError(f"{field} no codes, since quantization_config.ignore names it by {ignored!r}")
    targets = sorted(by_target, key=lambda target: ("re:" in target, target))
    fits = [target for target in targets if _is_name(target, known_as)]
    fits += [target for target in targets if target in of_model.classes]
    if not fits:
        raise LoadError(f"{field} a scheme of config_groups that fits the module, got targets {targets}")
    if (weights := by_target[fits[0]].get("weights")) is None:
        raise LoadError(
            f"{field} a scheme with weights in quantization_config.config_groups for a quantized module, "
            f"got none by the target {fits[0]!r}"
        )
    return weights


def _is_name(target: str, known_as: tuple[str, ...]) -> bool:
    if target.startswith("re:"):
        return any(re.match(target.removeprefix("re:"), name) for name in known_as)
    return target in known_as


def require_type_of_codes(name: str, scheme: Mapping[str, Any], kind: str, bits: int | None) -> None:
    """*raises:* LoadError: the scheme and the tensors differ in their codes. bits: None: any."""
    for key, saved in (("type", kind), ("num_bits", bits)):
        if saved is not None and scheme.get(key, saved) != saved:
            raise contradiction(name, f"config_groups: {key}", scheme[key], f"codes of {saved}")


def require_floats(name: str, scheme: Mapping[str, Any], bits: int, parts: Mapping[str, str]) -> None:
    """*raises:* LoadError: the scheme or the tensors give a weight of floats zeros, an order or other bits."""
    require_type_of_codes(name, scheme, "float", bits)
    if not scheme.get("symmetric", True):
        raise contradiction(name, "config_groups: symmetric", "false", "floats, which have no zeros")
    for part in ("weight_zero_point", "weight_g_idx"):
        if part in parts:
            raise mismatch(name, "floats without zeros and order,", "", parts[part])


def require_groups(
    name: str,
    scheme: Mapping[str, Any],
    shape: tuple[int, int],
    of_scales: tuple[int, ...],
    parts: Mapping[str, str],
    *,
    has_even_groups: bool = False,
) -> None:
    """even: all groups must have one size.

    *raises:* LoadError: the scales' shape differs from `strategy`, `group_size` and `block_structure`.
    """
    outputs, inputs = shape
    size, of_block, strategy = (
        scheme.get("group_size", -1),
        scheme.get("block_structure"),
        scheme.get("strategy"),
    )
    per_output = ((outputs, 1), (outputs,))
    expected: dict[str, tuple[tuple[int, ...], ...]] = {}
    if of_block is not None:
        expected["block_structure"] = (blocks_of(shape, of_block),)
    if size > 0:
        expected["group_size"] = ((outputs, -(-inputs // size)), *(per_output if size >= inputs else ()))
        if has_even_groups and size < inputs and inputs % size:
            raise contradiction(
                name, "config_groups: group_size", size, f"{inputs} inputs in groups of one size"
            )
    if strategy == "tensor":
        expected["strategy"] = ((), (1,), (1, 1))
    elif strategy == "channel":
        expected["strategy"] = (*per_output, *(((1,), (1, 1), ()) if outputs == 1 else ()))
    for field, shapes in expected.items():
        if tuple(of_scales) not in shapes:
            setting = list(scheme[field]) if field == "block_structure" else scheme[field]
            saved = f"scales of {list(of_scales)}, while the config gives {list(shapes[0])}"
            raise contradiction(name, f"config_groups: {field}", setting, saved)
    field = {"group": "group_size", "block": "block_structure"}.get(strategy or "")
    if field is not None and field not in expected:
        raise contradiction(name, "config_groups: strategy", strategy, f"no {field} with it")
    is_ordered = scheme.get("actorder") in ("group", "dynamic") and of_scales[1:] not in ((), (1,))
    if is_ordered and "weight_g_idx" not in parts:
        raise contradiction(name, "config_groups: actorder", scheme["actorder"], "no weight_g_idx")
