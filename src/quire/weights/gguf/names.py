"""The parameter of a model for each tensor of a GGUF file.

The package `gguf` has the file names of most parameters of Hugging Face models; the architecture's processor has the
others.

Cost: one look-up for each parameter name.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

__all__ = ["tensor_names"]

_SUFFIXES = (".weight", ".bias")


def tensor_names(architecture: str, shape: PreTrainedModel, processor: Any) -> dict[str, str]:
    """Parameter names of `shape`, which may be on torch's meta device, by the names of the file's tensors."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    [kind] = [kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture]
    known = get_tensor_name_map(kind, shape.config.num_hidden_layers)
    names: dict[str, str] = {}
    for place in shape.state_dict():
        suffix = next((suffix for suffix in _SUFFIXES if place.endswith(suffix)), "")
        stem = place.removesuffix(suffix)
        # Some files come from a model without its head, whose parameter names lack the first part.
        saved_name = known.get_name(stem) or known.get_name(stem.partition(".")[2])
        if saved_name is None:
            processor.perform_fallback_tensor_mapping(names, suffix, "", place)
            continue
        names[saved_name + suffix] = place
        if not suffix:  # files have it with or without the suffix, and experts' gate and up apart or merged
            names.setdefault(f"{saved_name}.weight", place)
            processor.perform_fallback_tensor_mapping(names, suffix, "", place)
    return names
