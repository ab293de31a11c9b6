"""Identity of a saved cache's keys and values: a model's config, a digest of its weights, and whatever decides the
bits.

`fingerprint` digests every parameter and buffer: name, dtype, shape and bits, so that keys of one fine-tune are never
read into another. Packed weights (`accelerate`) count as the weights they stand for. Settings of the modules count as
well: the active adapter, scalings, epsilons. It is computed at each call, from the model's present state.

`engine_fingerprint` is for the tiers of an engine: equal fingerprints give equal bits for equal tokens. It adds the
dtype, the back end and its platform: instruction set, the very build of the kernels, torch and transformers. If the
weights were read from a source with files, safetensors or GGUF, the files are digested instead, and the digests of
large files are saved next to them, by path, size, times and inode, so that a later start reads nothing. Weights
computed from codes in those files count with the versions of the readers and of the rounding.

Cost: one pass of SHA-256 over the weights, about 1 to 2 s for each GiB; microseconds if the digests are saved.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from quire.backends import native_module
from quire.devices import device_of
from quire.file_digest import file_digest, sha256_of
from quire.model.prove.model_record import behaviour
from quire.modules.hooks import first_hook
from quire.spec import KVSpec
from quire.weights.codes import rounding
from quire.weights.load import LoadedModel
from quire.weights.packed_parameter import bytes_of
from quire.weights.quantized_modules import quantized_weights
from quire.weights.sources import LiveSource, WeightSource

__all__ = ["engine_fingerprint", "fingerprint", "stored_fingerprint"]

# Fields of a config that say where it came from or how a forward is run, and do not change the numbers.
_INCIDENTAL = frozenset({
    "_name_or_path", "transformers_version", "_attn_implementation", "_attn_implementation_internal", "use_cache",
    "output_attentions", "output_hidden_states", "return_dict", "architectures", "torch_dtype", "dtype",
    "_commit_hash", "experts_implementation", "_experts_implementation_internal",
})  # fmt: skip


def engine_fingerprint(loaded: LoadedModel, backend: str | None = None) -> bytes:
    """32 bytes that identify everything that decides the bits of this model's keys and values on this back end.

    To be called before the model is prepared.
    """
    files, device = loaded.source.files, device_of(backend)
    parts: dict[str, Any] = {
        "config": _config_digest(loaded.model),
        "weights": _files_digest(files) if files else _weights_digest(loaded.source),
        "dtype": loaded.spec.dtype,
        "torch": [torch.__version__, torch.backends.cpu.get_cpu_capability()],
        "transformers": transformers.__version__,
        "backend": device.name,
        "behaviour": behaviour(loaded.model),
    }
    if coded := _quantized_formats(loaded.model):
        parts["coded"] = coded
    if loaded.reader_versions:
        parts["reckoned_by"] = loaded.reader_versions
    if first_hook(loaded.model) is not None:
        parts["hooks"] = os.urandom(16).hex()  # their effect is unknown
    if device.is_native:
        native: Any = native_module()
        parts["kernels"] = [device.version, sha256_of(Path(native.__file__))]
    elif not device.is_host:
        parts["kernels"] = device.version
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()


def stored_fingerprint(fingerprint: bytes, spec: KVSpec, key_offsets: Mapping[int, torch.Tensor]) -> bytes:
    """`engine_fingerprint` of K and V in the formats of `spec`, with the key offsets, by layer; unchanged if they are
    stored in the model's dtype."""
    if spec.in_model_dtype is spec:
        return fingerprint
    formats = [[layer.k_format, layer.v_format] for layer in spec.layers]
    digest = hashlib.sha256(fingerprint + json.dumps(formats).encode())
    for layer, offset in sorted(key_offsets.items()):
        digest.update(layer.to_bytes(4, "little") + bytes_of(offset))
    return digest.digest()


def fingerprint(model: PreTrainedModel) -> dict[str, str]:
    """SHA-256 in hex of the model's config, of its weights, and of the settings of its modules: the active adapter, its
    scaling."""
    return {
        "config": _config_digest(model),
        "weights": _weights_digest(LiveSource(model)),
        "behaviour": hashlib.sha256((behaviour(model) + _quantized_formats(model)).encode()).hexdigest(),
    }


def _quantized_formats(model: PreTrainedModel) -> str:
    """The formats of the quantized weights and the rounding's version; "" if there are none. A quantized weight may
    dequantize to the values of a dense one."""
    formats = {name: packed.label for name, packed in quantized_weights(model).items()}
    return json.dumps([rounding.VERSION, formats], sort_keys=True) if formats else ""


def _weights_digest(source: WeightSource) -> str:
    digest = hashlib.sha256()
    for stored in source:
        digest.update(f"{stored.name} {stored.saved_type} {stored.shape}\n".encode())
        digest.update(bytes_of(stored.read()))
    return digest.hexdigest()


def _config_digest(model: PreTrainedModel) -> str:
    config = json.dumps(_plain(model.config.to_dict()), sort_keys=True, default=str)
    return hashlib.sha256(config.encode()).hexdigest()


def _files_digest(paths: tuple[Path, ...]) -> str:
    """Digest of files of weights, by name; saved digests are trusted."""
    return json.dumps(sorted((path.name, file_digest(path)) for path in paths))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items() if key not in _INCIDENTAL}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value
