"""The fields of a `quantization_config`: each is read, or has no effect, or is refused by its name.

A reader lists the fields that it reads, each with a check, and those without effect: how the codes were made, how a
tool would run them, which modules were left out (the tensors show that). A field in neither list is refused, unless its
value turns it off (null, false, "", [], {}). Null counts as absent.

Cost: one check of each field.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from quire.errors import LoadError

__all__ = [
    "AUTO_ROUND_CHANGES_NOTHING",
    "TOOLS_CHANGE_NOTHING",
    "Check",
    "block",
    "contradiction",
    "flag",
    "names",
    "read_settings",
    "refusal",
    "rename_fields",
    "settings_by_pattern",
    "whole_number",
    "word",
]

Check = Callable[[str, Any], Any]
"""(the field's name, its value) -> the value for the reader. *raises:* LoadError: another type or value."""

TOOLS_CHANGE_NOTHING = frozenset({
    # the method and the tool, and the tool's notes
    "quant_method", "meta", "quantizer", "uri", "model_name_or_path", "model_file_base_name",
    # how the codes were found
    "damp_percent", "damp_auto_increment", "true_sequential", "static_groups", "mse", "act_group_aware", "hyb_act",
    "tokenizer", "dataset", "model_seqlen", "batch_size", "pad_token_id", "cache_block_outputs", "v2", "v2_alpha",
    "gptaq", "foem", "hessian", "failsafe", "fallback", "mock_quantization", "parallel_packing", "pack_impl",
    "offload_to_disk", "offload_to_disk_path", "duo_scaling", "apply_clip", "max_calib_samples",
    "max_calib_seq_len", "n_parallel_calib_samples",
    # how a tool would run them
    "use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config", "max_input_length", "do_fuse",
    "fuse_max_seq_len", "modules_to_fuse", "dequantize", "run_compressed", "use_optimized_inference", "activation",
    # which modules have codes: the tensors show that
    "block_name_to_quantize", "module_name_preceding_first_block", "modules_in_block_to_quantize", "lm_head",
    "modules_to_not_convert", "modules_to_convert", "ignored_layers",
})  # fmt: skip

AUTO_ROUND_CHANGES_NOTHING = frozenset({
    "packing_format",  # `method_of` has read it
    "autoround_version", "iters", "lr", "minmax_lr", "nsamples", "seqlen", "amp", "low_gpu_mem_usage",
    "gradient_accumulate_steps", "enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input",
    "enable_torch_compile", "model_free", "to_quant_block_names", "quant_block_list", "supported_types", "backend",
    "scale_dtype",
    # of activations, keys and values, which are not quantized
    "act_bits", "act_group_size", "act_sym", "act_dynamic", "act_data_type", "static_kv_dtype",
    "static_kv_granularity", "static_attention_dtype", "static_attention_granularity",
})  # fmt: skip

_MAX_SHOWN = 80  # characters of a value


def read_settings(
    settings: Any,
    reads: Mapping[str, Check],
    change_nothing: Collection[str],
    path: str = "quantization_config",
) -> dict[str, Any]:
    """The fields that a reader reads, checked; null fields are left out.

    settings: from the file. path: their name in the file.

    *raises:* LoadError: a field of another type or value, or an unknown one.
    """
    if not isinstance(settings, Mapping):
        raise refusal(path, "an object of fields", settings)
    checked: dict[str, Any] = {}
    for key, value in settings.items():
        field = f"{path}.{key}"
        if value is None:
            continue
        if key in reads:
            checked[key] = reads[key](field, value)
        elif key not in change_nothing and not _is_off(value):
            raise refusal(field, "no such field: its effect is not known", value)
    return checked


def rename_fields(settings: Any, synonyms: Mapping[str, str]) -> Any:
    """The fields under the names that a reader uses; if both names of a field occur, they stay."""
    if not isinstance(settings, Mapping):
        return settings
    return {
        synonyms[key] if key in synonyms and synonyms[key] not in settings else key: value
        for key, value in settings.items()
    }


def _is_off(value: Any) -> bool:
    return value is False or (isinstance(value, (str, list, tuple, Mapping)) and not value)


def whole_number(*allowed: int, at_least: int | None = None) -> Check:
    """A whole number: a value of `allowed`, or from `at_least` on."""
    words = [str(number) for number in allowed] + ([] if at_least is None else [f"at least {at_least}"])
    expected = "a whole number: " + " or ".join(words)

    def check(field: str, value: Any) -> int:
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if not is_number or not (value in allowed or (at_least is not None and value >= at_least)):
            raise refusal(field, expected, value)
        return value

    return check


def word(*allowed: str, instead: str = "") -> Check:
    """A word of `allowed`, in any case. instead: what to do about another value."""

    def check(field: str, value: Any) -> str:
        if not isinstance(value, str) or value.lower() not in allowed:
            raise refusal(field, " or ".join(allowed), value, instead)
        return value.lower()

    return check


def flag(*allowed: bool) -> Check:
    """true or false, or the allowed value alone."""

    def check(field: str, value: Any) -> bool:
        if not isinstance(value, bool) or value not in (allowed or (True, False)):
            raise refusal(field, " or ".join(str(value).lower() for value in allowed or (True, False)), value)
        return value

    return check


def names(field: str, value: Any) -> list[str]:
    """Names and patterns ("re:...") of modules."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
        raise refusal(field, "a list of names", value)
    for name in value:
        if name.startswith("re:"):
            _compile(field, name.removeprefix("re:"))
    return list(value)


def block(field: str, value: Any) -> tuple[int, int]:
    """The outputs and inputs that share a scale, as a list or as "128x128"."""
    sizes: Any = value
    if isinstance(value, str):
        parts = value.lower().split("x")
        sizes = [int(part) for part in parts] if all(part.strip().isdecimal() for part in parts) else None
    is_list = isinstance(sizes, (list, tuple)) and len(sizes) == 2
    if not is_list or not all(isinstance(size, int) and size > 0 and size is not True for size in sizes):
        raise refusal(field, "two whole numbers above 0, as [128, 128] or '128x128'", value)
    return sizes[0], sizes[1]


def settings_by_pattern(
    reads: Mapping[str, Check], change_nothing: Collection[str]
) -> Callable[[str, Any], dict[str, dict[str, Any]]]:
    """A check of settings of modules, by patterns of their names."""

    def check(field: str, value: Any) -> dict[str, dict[str, Any]]:
        if not isinstance(value, Mapping):
            raise refusal(field, "an object of settings by pattern", value)
        checked = {}
        for pattern, settings in value.items():
            _compile(field, pattern.removeprefix("+:").removeprefix("-:"))
            pattern_settings = {} if settings is None else settings
            checked[pattern] = read_settings(pattern_settings, reads, change_nothing, f"{field}.{pattern}")
        return checked

    return check


def _compile(field: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise refusal(field, "patterns of names", pattern, str(error)) from error


def refusal(field: str, expected: str, got: Any, instead: str = "") -> LoadError:
    shown = repr(got)
    shown = shown if len(shown) <= _MAX_SHOWN else shown[: _MAX_SHOWN - 3] + "..."
    return LoadError(
        f"cannot read {field}: expected {expected}, got {shown}; "
        + (
            instead
            or "take a checkpoint of the model with settings that Quire reads, or the model in 16 bits"
        )
    )


def contradiction(name: str, field: str, setting: Any, saved: str) -> LoadError:
    """The error for a weight `name` whose tensors contradict the config."""
    return LoadError(
        f"cannot read the weight {name}: expected quantization_config.{field} = {setting}, got {saved}; "
        "the config and the tensors are not of one checkpoint"
    )
