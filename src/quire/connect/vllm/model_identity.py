"""The fingerprint of a vLLM's keys and values: equal fingerprints mean that one process may use the blocks of another.

It covers the weights (SHA-256 of their files), the model's config, dtypes, quantization, block size and layers. It also
covers the kernels: the attention back end, the versions of vLLM and torch, and the device.

Cost: see `file_digest`; the digests of large files are saved next to them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.errors import ArgumentError
from quire.file_digest import file_digest

__all__ = ["adapter_digest", "kv_fingerprint", "weights_digest"]

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_INCIDENTAL = ("_name_or_path", "transformers_version")


def kv_fingerprint(
    vllm_config: Any, layer_bytes: Mapping[str, int], builds: Mapping[str, str], weights: str
) -> bytes:
    """32 bytes. layer_bytes: of a block, by layer. builds: versions and devices by name. weights: `weights_digest`, or
    a version's name."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    config = {key: value for key, value in model.hf_config.to_dict().items() if key not in _INCIDENTAL}
    parts = {
        "config": config,
        "weights": weights,
        "dtype": str(model.dtype),
        "cache_dtype": str(cache.cache_dtype),
        "quantization": str(model.quantization),
        "block_size": cache.block_size,
        "layer_bytes": sorted(layer_bytes.items()),
        "attention": str(getattr(getattr(vllm_config, "attention_config", None), "backend", None)),
        "builds": dict(builds),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).digest()


def weights_digest(vllm_config: Any) -> str:
    """Of the files from which vLLM has read the weights.

    *raises:* ArgumentError: there are no such files on this machine.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    if str(load.load_format) == "dummy":
        return f"dummy weights, seed {model.seed}"
    files = _weight_files(_local_path(str(model.model), model.revision))
    if not files:
        raise ArgumentError(
            f"expected files of weights for {model.model!r} on this machine, found none; name the weights by "
            "`model_version` in kv_connector_extra_config, another text for other weights"
        )
    return _files_digest(files)


def adapter_digest(path: str) -> str:
    """Of the files of a LoRA adapter, a folder or a Hub id."""
    files = _weight_files(_local_path(path, None))
    return _files_digest(files) if files else f"adapter {path}"


def _files_digest(files: list[Path]) -> str:
    digests = sorted((path.name, file_digest(path)) for path in files)
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()


def _local_path(name: str, revision: str | None) -> Path:
    if Path(name).exists():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError):
        return Path(name)


def _weight_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted({file for pattern in _WEIGHTS for file in path.glob(pattern)})
