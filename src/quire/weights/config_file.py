"""Checks a folder's config.json before transformers reads it: fields whose wrong values transformers would not name.

transformers checks all other fields, and names them. Fields of a language model within a larger one (`text_config`) are
checked too.

Cost: reading the file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.activations import ACT2FN

from quire.errors import LoadError
from quire.weights.checkpoint_files import read_json_object, refuse_adapter

__all__ = ["check_config"]


def _is_size(value: Any) -> bool:
    """Not a number below 0: some models have lists, or null."""
    return not isinstance(value, int) or value >= 0


def _is_count(value: Any) -> bool:
    return not isinstance(value, int) or value > 0


def _is_dtype(value: Any) -> bool:
    if isinstance(value, str):
        return isinstance(getattr(torch, value.removeprefix("torch."), None), torch.dtype)
    return isinstance(value, dict)  # one dtype per part of a model


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model_type": (lambda value: isinstance(value, str), "a name"),
    "quantization_config": (lambda value: isinstance(value, dict), "an object of fields"),
    "compression_config": (lambda value: isinstance(value, dict), "an object of fields"),
    **dict.fromkeys(("dtype", "torch_dtype"), (_is_dtype, "the name of a type of torch")),
    **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), (_is_size, "no number below 0")),
    **dict.fromkeys(
        ("num_attention_heads", "num_key_value_heads", "head_dim"), (_is_count, "a number above 0")
    ),
}


def check_config(folder: Path) -> None:
    """Check the config.json of a folder, with a clear error.

    *raises:* LoadError: the file is missing or broken, a field has an impossible value, or there is an adapter.
    """
    refuse_adapter(str(folder))
    path = folder / "config.json"
    if not path.is_file():
        raise LoadError(f"expected a model folder, {folder} has no config.json")
    config = read_json_object(path)
    _check_fields(path, "", config)
    if isinstance(text := config.get("text_config"), dict):
        _check_fields(path, "text_config.", text)


def _check_fields(path: Path, where: str, config: dict[str, Any]) -> None:
    for name, (is_right, expected) in _FIELDS.items():
        if (value := config.get(name)) is not None and not is_right(value):
            raise LoadError(f"cannot read {path}: expected {where}{name} as {expected}, got {value!r}")
    act = config.get("hidden_act")
    if isinstance(act, str) and act not in ACT2FN and "auto_map" not in config:
        raise LoadError(
            f"cannot read {path}: expected {where}hidden_act as one that transformers has, got {act!r}"
        )
