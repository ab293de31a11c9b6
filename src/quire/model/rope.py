"""Freezes rotary embeddings that switch with the length of the row.

`longrope` and `dynamic` rotary modules choose their frequencies by the largest position in the whole input. In a row of
many sequences one long sequence would change all others, and keys already stored. So a model is prepared for one range
of lengths:

    max_model_len within the original length: no module ever switches, and answers equal `model.generate`'s;
    beyond it: the long frequencies apply to every sequence, short ones included.

Cost: once per preparation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

__all__ = ["freeze", "kinds", "note", "original_length"]


def kinds(model: torch.nn.Module) -> set[str]:
    """The kinds of switching rotary embeddings in the model: longrope, dynamic, none."""
    return {rope_type for module in model.modules() for _, rope_type in _switching(module)}


def original_length(model: torch.nn.Module) -> int | None:
    """The longest length at which no rotary module switches; None if none ever does."""
    limits = [
        limit
        for module in model.modules()
        for layer_type, rope_type in _switching(module)
        if (limit := _limit(module, layer_type, rope_type)) is not None
    ]
    return min(limits, default=None)


def note(model: torch.nn.Module, max_model_len: int, longest: int) -> str:
    """The frequencies for sequences of `max_model_len`, and why; "" if no module ever switches."""
    limit = original_length(model)
    if limit is None:
        return ""
    setting = f"max_model_len {max_model_len}, {' and '.join(sorted(kinds(model)))} rotary embeddings of {limit} tokens"
    if max_model_len > limit:
        return f"{setting}: the frequencies for longer sequences hold for every sequence, short ones too"
    hint = f"; max_model_len of up to {longest} takes those for longer ones" if longest > limit else ""
    return f"{setting}: the frequencies for short sequences hold{hint}"


def freeze(model: torch.nn.Module, max_model_len: int) -> Callable[[], None]:
    """Freeze every module that `max_model_len` would switch at its long frequencies. Returns the undo."""
    undo: list[tuple[Any, str, Any]] = []

    def replace(module: Any, name: str, value: Any) -> None:
        undo.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    for module in model.modules():
        switching = _switching(module)
        if not switching:
            continue
        rope_types: Any = module.rope_type
        for layer_type, rope_type in switching:
            limit = _limit(module, layer_type, rope_type)
            if limit is None or max_model_len <= limit:
                continue
            prefix = f"{layer_type}_" if layer_type else ""
            frequencies, scaling = ROPE_INIT_FUNCTIONS[rope_type](  # type: ignore[operator]
                module.config, torch.device("cpu"), seq_len=max_model_len, layer_type=layer_type
            )
            replace(module, f"{prefix}inv_freq", frequencies.to(getattr(module, f"{prefix}inv_freq").device))
            if rope_type == "dynamic":
                replace(module, f"{prefix}attention_scaling", scaling)
            rope_types = "default" if layer_type is None else {**rope_types, layer_type: "default"}
        if rope_types is not module.rope_type:
            replace(module, "rope_type", rope_types)

    def restore() -> None:
        for module, name, value in reversed(undo):
            setattr(module, name, value)

    return restore


def _switching(module: Any) -> list[tuple[str | None, str]]:
    """(layer type, rope type) of the module's rotary embeddings that switch; layer type None if the module has a single
    type."""
    rope_type = getattr(module, "rope_type", None)
    kinds: list[tuple[str | None, Any]] = (
        list(rope_type.items()) if isinstance(rope_type, dict) else [(None, rope_type)]
    )
    return [
        (layer, kind) for layer, kind in kinds if isinstance(kind, str) and _switches(module, layer, kind)
    ]


def _switches(module: Any, layer_type: str | None, rope_type: str) -> bool:
    """Whether the frequencies change with the length. Factors of a GGUF file are longrope with equal factors for every
    length, and do not: see `quire.weights.gguf.rope_parameters`."""
    if rope_type != "longrope":
        return "dynamic" in rope_type
    parameters = _parameters(module, layer_type)
    return parameters.get("long_factor") != parameters.get("short_factor")


def _limit(module: Any, layer_type: str | None, rope_type: str) -> int | None:
    if rope_type == "longrope":
        return _parameters(module, layer_type).get("original_max_position_embeddings")
    return getattr(module, "original_max_seq_len", None)


def _parameters(module: Any, layer_type: str | None) -> Any:
    parameters = module.config.rope_parameters
    return parameters if layer_type is None else parameters[layer_type]
