"""Which parameter of a model each tensor of a GGUF file becomes.

The package `gguf` knows how parameters of Hugging Face models are called in a file; the architecture's processor knows
those that it does not.

Cost: a look at each parameter's name.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

__all__ = ["tensor_names"]

_SUFFIXES = (".weight", ".bias")


def tensor_names(architecture: str, shape: PreTrainedModel, processor: Any) -> dict[str, str]:
    """Parameters of `shape`, which may lie on torch's meta device, by the names of the file's tensors."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    [kind] = [kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture]
    known = get_tensor_name_map(kind, shape.config.num_hidden_layers)
    names: dict[str, str] = {}
    for place in shape.state_dict():
        suffix = next((suffix for suffix in _SUFFIXES if place.endswith(suffix)), "")
        stem = place.removesuffix(suffix)
        # Some files were made of a model without its head, whose parameters lack the first part of the name.
        stored = known.get_name(stem) or known.get_name(stem.partition(".")[2])
        if stored is None:
            processor.perform_fallback_tensor_mapping(names, suffix, "", place)
            continue
        names[stored + suffix] = place
        if not suffix:  # a file has it with the suffix or without, and experts' gate and up apart or merged
            names.setdefault(f"{stored}.weight", place)
            processor.perform_fallback_tensor_mapping(names, suffix, "", place)
    return names
