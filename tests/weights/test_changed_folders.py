"""Checkpoints with one changed field or tensor: the same weights, or a refusal that names the change.

A few of the changes in the default suite, all of them in CI.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support import changed_folders
from support.changed_folders import CHECKPOINTS, REMOVED, VALUES, Folder
from transformers import AutoModelForCausalLM

from quire.errors import QuireError
from quire.weights import load
from quire.weights.codes.readers import (
    awq,
    bitsandbytes,
    checkpoint_weights,
    compressed_schemes,
    fp8,
    gptq,
    mxfp4,
)
from quire.weights.load import without_weights

READERS: dict[str, Any] = {
    "gptq": gptq, "auto-round": gptq, "awq": awq, "compressed-tensors": compressed_schemes, "fp8": fp8,
    "fbgemm_fp8": fp8, "bitsandbytes": bitsandbytes, "mxfp4": mxfp4,
}  # fmt: skip
NAMES = [*CHECKPOINTS, "mxfp4"]
GROUP = ("quantization_config", "config_groups", "group_0")

# What says again what the tensors say, where they have it.
SAID_BY_TENSORS: dict[str, dict[str, Sequence[Any]]] = {
    "sym": {"gptq": (True, False), "awq": (True, False), "auto-round": (True, False)},
    "zero_point": {"awq": (True, False)},
    "desc_act": {"gptq": (True, False), "auto-round": (True, False), "awq": (False,)},
    "checkpoint_format": {"gptq by activation order": ("gptq_v2",), "auto-round": ("gptq", "gptq_v2")},
    "format": {"auto-round": ("gptq", "gptq_v2")},
    "num_bits": {"w8a8": (2, 3, 4, 5)},
    "actorder": {"": (False,), "w4a16 by activation order": (True, False), "w8a8": (True, False, "group")},
    "weights": {"w4a16": ({},), "w4a16 by activation order": ({},), "w8a8": ({},), "compressed mxfp4": ({},)},
}
# Other words for what is there, or for the default.
ALIKE: dict[str, Sequence[Any]] = {
    "checkpoint_format": ("gptq", "gemm"), "format": ("gptq", "gemm"), "version": ("gemm",), "method": ("gptq",),
    "scale_fmt": ("float",), "targets": (["Linear"], ["re:.*"]), "ignore": ([], ["Embedding"]),
    "is_marlin_format": (False,), "load_in_4bit": (False,), "load_in_8bit": (False,), "_load_in_4bit": (True, False),
    "_load_in_8bit": (True, False), "group_size": (-1,), "sparsity_config": ({},), "transform_config": ({},),
    "dynamic": ({}, False), "extra_config": ({},), "bits": (4,), "w_bit": (4,), "q_group_size": (64,),
    "strategy": ("group", "channel"), "backend": VALUES, "type": ("float",), "symmetric": (True,),
}  # fmt: skip


# Settings that give the same tensors other values (`tests/weights/test_checkpoint_methods.py` compares them).
OBEYED: set[tuple[str, str, Any]] = {
    ("gptq", "checkpoint_format", "gptq_v2"), ("gptq by activation order", "sym", False),
    ("w4a16", "group_size", 33), ("w4a16 by activation order", "group_size", 33),
}  # fmt: skip


def may_change_nothing(name: str, path: tuple[str, ...], value: Any, folder: Folder) -> bool:
    field, quantization = path[-1], folder.config["quantization_config"]
    if value is REMOVED or value is None or field in READERS[quantization["quant_method"]].CHANGES_NOTHING:
        return True
    if path[:3] == GROUP and field in (
        *compressed_schemes.GROUPS_CHANGE_NOTHING,
        *compressed_schemes.WEIGHTS_CHANGE_NOTHING,
    ):
        return True
    if field == "twist":
        return value is False or value in ("", [], {})
    if value == value_at(folder.config, path):
        return True
    by_tensors = SAID_BY_TENSORS.get(field, {})
    key = name if name in by_tensors else quantization["quant_method"]
    return any(
        value == one and type(value) is type(one)
        for one in (*by_tensors.get(key, by_tensors.get("", ())), *ALIKE.get(field, ()))
    )


def value_at(config: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        config = config.get(key, {})
    return config


def paths(folder: Folder) -> list[tuple[str, ...]]:
    """Of all fields that its reader takes, those that are there, some that change nothing, and one that is unknown."""
    quantization = folder.config["quantization_config"]
    reader = READERS[quantization["quant_method"]]
    fields = dict.fromkeys((*quantization, *reader.READS, *sorted(reader.CHANGES_NOTHING)[::9], "twist"))
    found = [("quantization_config",), *(("quantization_config", field) for field in fields)]
    if reader is compressed_schemes:
        weights = dict.fromkeys(
            (*compressed_schemes.WEIGHTS_READS, *compressed_schemes.WEIGHTS_CHANGE_NOTHING, "twist")
        )
        found += [
            (*GROUP, field) for field in (*compressed_schemes.GROUPS_READS, "input_activations", "twist")
        ]
        found += [(*GROUP, "weights", field) for field in weights]
    return found


def refusal(folder: Folder) -> str | None:
    """Why it does not open; None where it opens, with the weights that it had. Other errors than Quire's go through."""
    try:
        loaded = load(folder.path)
    except QuireError as error:
        return str(error)
    for key, weight in loaded.model.state_dict().items():
        torch.testing.assert_close(weight, folder.weights[key].to(weight.dtype), rtol=4e-7, atol=0, msg=key)
    without_weights(folder.path)
    return None


def plan_refusal(folder: Folder) -> str | None:
    try:
        without_weights(folder.path)
    except QuireError as error:
        return str(error)
    return None


def fault(folder: Folder, named: Sequence[str], may_open: bool) -> str | None:
    """What is wrong with how a changed folder is met; None: nothing. named: a refusal names one of these."""
    try:
        refused, planned = refusal(folder), plan_refusal(folder)
    except Exception as error:
        return repr(error)
    for said in (refused, planned):
        if said is not None and ("\n" in said or not any(name in said for name in named)):
            return said
    if refused is None and not may_open:
        return "was ignored"
    return "is refused by the plan alone" if refused is None and planned is not None else None


def read_fault(
    folder: Folder, config: Any, named: Sequence[str], may_open: bool, other_values: bool
) -> str | None:
    """The same of the readers alone, for some of the modules: faster by far than a model."""
    tensors = folder.tensors_of_two
    try:
        found = checkpoint_weights(config, folder.headers, tensors.__getitem__)
        read = {
            weight.name: weight.dequantize(tensors.__getitem__, torch.float32) for weight in found.weights
        }
    except QuireError as error:
        said = str(error)
        return None if any(name in said for name in named) and "\n" not in said else said
    except Exception as error:
        return repr(error)
    if not may_open:
        return "was ignored"
    if other_values:
        return None
    for name, weight in read.items():
        if not torch.allclose(weight, folder.weights[name], rtol=4e-7, atol=0):
            return f"{name} has other values"
    return None if read.keys() == folder.coded_of_two else "weights in codes are not read"


def check_fields(name: str, folder: Folder, every: int, *, whole: bool) -> None:
    """whole: a model is loaded of each changed folder, and planned."""
    cases = [(path, value) for path in paths(folder) for value in VALUES]
    faults = []
    for path, value in cases[NAMES.index(name) % every :: every]:
        config = changed_folders.changed(folder.config, path, value)
        other_values = isinstance(value, (str, bool, int)) and (name, path[-1], value) in OBEYED
        may_open = may_change_nothing(name, path, value, folder) or other_values
        named = [path[-1], "quant_method"] if len(path) == 1 else [path[-1]]
        named += [*folder.config["quantization_config"], "gptq"] if path[-1] == "quant_method" else []
        if whole and other_values:
            continue
        if whole:
            folder.write(config)
            said = fault(folder, named, may_open)
        elif isinstance(quantization := config.get("quantization_config"), dict) and quantization:
            said = read_fault(folder, quantization, named, may_open, other_values)
        else:
            continue
        if said is not None:
            faults.append(f"{'.'.join(path)} = {'removed' if value is REMOVED else repr(value)}: {said}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_field_is_obeyed_or_refused_by_name(name: str, tmp_path: Path) -> None:
    folder = changed_folders.make(tmp_path, name)
    assert refusal(folder) is None
    check_fields(name, folder, 29, whole=False)
    check_fields(name, folder, 397, whole=True)


@pytest.mark.ci
@pytest.mark.parametrize("name", NAMES)
def test_every_changed_field_is_obeyed_or_refused_by_name(name: str, tmp_path: Path) -> None:
    folder = changed_folders.make(tmp_path, name)
    check_fields(name, folder, 1, whole=False)
    check_fields(name, folder, 23, whole=True)


def tensor_fault(
    folder: Folder, name: str, what: str, tensors: dict[str, torch.Tensor], *, whole: bool
) -> str | None:
    """What is wrong with how the tensors are met, of which `name` was changed. whole: a model is loaded in any case."""
    module = name.partition("_proj")[0]
    few = {key: tensors[key] for key in folder.tensors_of_two if key in tensors}
    try:
        found = checkpoint_weights(
            folder.config["quantization_config"], changed_folders.headers_of(few), few.__getitem__
        )
        read = {weight.name: weight.dequantize(few.__getitem__, torch.float32) for weight in found.weights}
    except QuireError as error:
        return None if module in str(error) and "\n" not in str(error) else str(error)
    except Exception as error:
        return repr(error)
    expected = folder.weights
    fits = read.keys() == folder.coded_of_two and all(read[key].shape == expected[key].shape for key in read)
    if not fits or whole:
        folder.write(tensors=tensors)
        try:
            load(folder.path)
        except QuireError as error:
            return None if module in str(error) and "\n" not in str(error) else str(error)
        except Exception as error:
            return repr(error)
        if not fits:
            return "was ignored"
    was, now = folder.tensors[name], tensors.get(name)
    if now is not None and was.is_floating_point() and now.is_floating_point() and now.shape == was.shape:
        return None  # other numbers
    bad = [key for key in read if not torch.allclose(read[key], expected[key], rtol=4e-7, atol=0)]
    return f"{bad[0]} has other values" if bad else None


def check_tensors(name: str, folder: Folder, every: int, every_whole: int) -> None:
    faults, count = [], NAMES.index(name)
    for tensor in folder.tensors_of_two:
        for what, tensors in changed_folders.changed_tensors(folder.tensors, tensor):
            count += 1
            if count % every == 0:
                said = tensor_fault(folder, tensor, what, tensors, whole=count % every_whole == 0)
                faults += [] if said is None else [f"{tensor} {what}: {said}"]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_tensor_is_refused_by_name(name: str, tmp_path: Path) -> None:
    check_tensors(name, changed_folders.make(tmp_path, name), 7, 7)


@pytest.mark.ci
@pytest.mark.parametrize("name", NAMES)
def test_every_changed_tensor_is_refused_by_name(name: str, tmp_path: Path) -> None:
    check_tensors(name, changed_folders.make(tmp_path, name), 1, 1)


# Of config.json. Tensors are named where a number says what shapes they have, or how many there are.
CONFIG_FIELDS = (
    "model_type", "architectures", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "hidden_act", "rms_norm_eps", "tie_word_embeddings",
    "attention_bias", "max_position_embeddings", "dtype", "eos_token_id", "layer_types", "twist",
)  # fmt: skip
_PROMPT = torch.tensor([[5, 17, 80, 3, 44, 9]])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(_PROMPT).logits


def config_fault(folder: Folder, field: str) -> str | None:
    """What is wrong with how Quire meets a config.json that was changed in `field`, beside transformers."""
    try:
        theirs, report = AutoModelForCausalLM.from_pretrained(
            folder.path, dtype="auto", output_loading_info=True
        )
        expected = None if report["missing_keys"] else logits(theirs)
    except Exception:
        expected = None
    try:
        loaded = load(folder.path)
    except QuireError as error:
        said = str(error)
        planned = plan_refusal(folder)
        names = (field, field.replace("_", " "), "tensors", "expected model.", "expected lm_head.")
        bad = [
            one for one in (said, planned or field) if "\n" in one or not any(name in one for name in names)
        ]
        return bad[0] if bad else None
    except Exception as error:
        return repr(error)
    if expected is None:
        return "opens, where transformers does not"
    return None if torch.equal(logits(loaded.model), expected) else "has other logits than transformers"


def check_config(tmp_path: Path, every: int) -> None:
    plain = changed_folders.plain_model()
    plain.save_pretrained(tmp_path)
    folder = Folder(tmp_path, json.loads((tmp_path / "config.json").read_text()), {}, {})
    faults = []
    for field, value in [(field, value) for field in CONFIG_FIELDS for value in VALUES][::every]:
        folder.write(changed_folders.changed(folder.config, (field,), value))
        if (said := config_fault(folder, field)) is not None:
            faults.append(f"{field} = {'removed' if value is REMOVED else repr(value)}: {said}")
    assert not faults, "\n".join(faults)


def test_a_changed_config_is_transformers_model_or_refused_by_name(tmp_path: Path) -> None:
    check_config(tmp_path, 41)


@pytest.mark.ci
def test_every_changed_config_is_transformers_model_or_refused_by_name(tmp_path: Path) -> None:
    check_config(tmp_path, 1)
