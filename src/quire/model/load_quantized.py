"""A model out of a checkpoint whose weights are quantized in safetensors files, made without the tools that wrote it.

transformers knows how a checkpoint's tensors are called in its models and which of them it merges; here it is given
the checkpoint as if it were plain. A quantized weight is unpacked when transformers asks for it (`quire.quantized`),
one at a time, and widened to the dtype that the model computes in. transformers' own quantizers would want the package
of each tool, and most of them a GPU.

Not here: GGUF files (`load_gguf`), and models that a quantizer of transformers' has loaded (`load.not_plain`).

Invariants
    W1  a weight is the format's own dequantization, rounded once from float32 to the dtype.
    W2  every tensor of the checkpoint is plain, a part of a quantized weight, or refused by name.

Cost: the model in `dtype`, and while it is loaded the codes and the float32 form of one weight, or of one expert.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import GenerationConfig, PreTrainedModel

from quire.errors import LoadError
from quire.model.mapped_weights import MappedWeights
from quire.model.sources import SafetensorsSource
from quire.quantized.readers import StoredWeight, method_of, stored_weights

__all__ = ["load_quantized", "quantization_of"]


def quantization_of(config: Any) -> dict[str, Any] | None:
    """What a model's config says of its quantized weights; None where they are plain."""
    said = getattr(config, "quantization_config", None) or getattr(config, "compression_config", None)
    if said is None:
        return None
    return dict(said) if isinstance(said, Mapping) else said.to_dict()


def load_quantized(
    kind: Any, where: str, source: SafetensorsSource | None, config: Any, dtype: torch.dtype, **options: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model in `dtype`, and transformers' report of the loading.

    kind: the class of transformers that makes it, an auto class or a model's. where: the folder or Hub id, for what is
    said of generation there. config: of the model; not changed. options: as `from_pretrained` takes them.

    *raises:* LoadError: its weights are no safetensors files, or not understood; others as transformers raises them.
    """
    quantization = quantization_of(config) or {}
    if source is None:
        raise LoadError(
            f"expected weights that are quantized by {method_of(quantization)} in safetensors files, {where} has none"
        )
    config = _plain_config(config)
    with torch.device("meta"):
        if hasattr(kind, "from_config"):
            trusted = {"trust_remote_code": options.get("trust_remote_code", False)}
            kind = type(kind.from_config(config, dtype=dtype, **trusted))
    tensors = {tensor.name: tensor for tensor in source}
    with ExitStack() as files:
        opened: dict[Path, Any] = {
            path: files.enter_context(safe_open(path, framework="pt")) for path in source.files
        }
        reading = _Reading(opened, {name: tensor.path for name, tensor in tensors.items() if tensor.path})
        found = stored_weights(quantization, tensors, reading.tensor)
        plain = tensors.keys() - found.names
        state = {name: opened[reading.paths[name]].get_slice(name) for name in sorted(plain)}
        state |= {weight.name: _Widened(weight, reading, dtype) for weight in found.weights}
        model, report = kind.from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=dtype,
            output_loading_info=True,
            **_passed_on(options),
        )
    model.config.name_or_path = where
    _read_generation_config(model, where, options)
    return model, report


class _Reading:
    """The tensors of open files by name, one reader at a time."""

    def __init__(self, opened: dict[Path, Any], paths: dict[str, Path]) -> None:
        self._opened, self.paths = opened, paths
        self._mapped = MappedWeights()
        self.lock = threading.Lock()

    def tensor(self, name: str) -> torch.Tensor:
        return self._opened[self.paths[name]].get_tensor(name)

    def release(self, names: Mapping[str, str]) -> None:
        """Give back the pages of tensors that are not read again."""
        for name in names.values():
            self._mapped.release(self.tensor(name))


class _Widened:
    """A quantized weight as transformers takes tensors that are not read yet: `[...]` reads it."""

    def __init__(self, weight: StoredWeight, reading: _Reading, dtype: torch.dtype) -> None:
        self._weight, self._reading, self._dtype = weight, reading, dtype

    def __getitem__(self, _: Any) -> torch.Tensor:
        with (
            self._reading.lock
        ):  # transformers asks from several threads, and would have several weights in float32
            widened = self._weight.widened(self._reading.tensor, self._dtype)
            self._reading.release(self._weight.parts)
        return widened


def _plain_config(config: Any) -> Any:
    plain = type(config).from_dict(config.to_dict())
    for name in ("quantization_config", "compression_config"):
        if hasattr(plain, name):
            delattr(plain, name)
    plain._attn_implementation = config._attn_implementation
    return plain


def _passed_on(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those that say something of a model without a place."""
    return {name: options[name] for name in ("attn_implementation", "key_mapping") if name in options}


def _read_generation_config(model: PreTrainedModel, where: str, options: Mapping[str, Any]) -> None:
    """As `from_pretrained` does it for a model that has a place."""
    named = {name: options[name] for name in ("revision", "local_files_only") if name in options}
    try:
        model.generation_config = GenerationConfig.from_pretrained(where, **named)
    except OSError:  # there is none
        return
