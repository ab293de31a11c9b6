"""Whose keys and values a saved cache holds: a model's config, a digest of its weights, and what decides the bits.

`fingerprint` digests every parameter and buffer: name, dtype, shape and bits, so that keys of one fine-tune are never
read into another. Packed weights (`accelerate`) count as the weights they stand for. What the modules are told to do
with the weights counts as well: which adapter is on, scalings, epsilons. It is computed each time it is asked for, of
the model as it is then.

`engine_fingerprint` is for the tiers of an engine: equal fingerprints give equal bits for equal tokens. It adds the
dtype, the back end and what it runs on: instruction set, the very build of the kernels, torch and transformers. Where
the weights were read from a source with files, safetensors or GGUF, the files are digested instead, and the digests
of large ones are kept beside them, by path, size, times and inode, so that a later start reads nothing. Weights that
follow from codes in those files count with the versions of what reads, widens and rounds them.

Cost: one pass of SHA-256 over the weights, about 1 to 2 s for each GiB; microseconds where the digests are kept.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from quire.atomic_file import AtomicFile
from quire.attention import device_of
from quire.backends import native_module
from quire.model.load import LoadedModel
from quire.model.packed_parameter import bytes_of
from quire.model.prove.hooks import first_hook
from quire.model.prove.model_record import behaviour
from quire.model.quantized import coded_weights
from quire.model.sources import LiveSource, WeightSource
from quire.quantized import rounding
from quire.spec import KVSpec

__all__ = ["engine_fingerprint", "fingerprint", "stored_fingerprint"]

_DIGESTS = "quire-sha256.json"  # beside the files it is about
_LEAST_KEPT = 64 << 20  # bytes of a file whose digest is worth keeping

# Fields of a config that say where it came from or how a forward is run, not what the numbers are.
_INCIDENTAL = frozenset({
    "_name_or_path", "transformers_version", "_attn_implementation", "_attn_implementation_internal", "use_cache",
    "output_attentions", "output_hidden_states", "return_dict", "architectures", "torch_dtype", "dtype",
    "_commit_hash", "experts_implementation", "_experts_implementation_internal",
})  # fmt: skip


def engine_fingerprint(loaded: LoadedModel, backend: str | None = None) -> bytes:
    """32 bytes that stand for all that decides the bits of this model's keys and values, run by this back end.

    To be asked for before the model is prepared.
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
    if coded := _coded(loaded.model):
        parts["coded"] = coded
    if loaded.dequantizer_versions:
        parts["reckoned_by"] = loaded.dequantizer_versions
    if first_hook(loaded.model) is not None:
        parts["hooks"] = os.urandom(16).hex()  # what they do cannot be told
    if device.is_native:
        native: Any = native_module()
        parts["kernels"] = [device.version, _sha256(Path(native.__file__))]
    elif not device.is_host:
        parts["kernels"] = device.version
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()


def stored_fingerprint(fingerprint: bytes, spec: KVSpec, key_offsets: Mapping[int, torch.Tensor]) -> bytes:
    """`engine_fingerprint` of K and V as `spec` keeps them, with what is taken off keys, by layer; the same where they
    are kept in the model's dtype."""
    if spec.in_model_dtype is spec:
        return fingerprint
    formats = [[layer.k_format, layer.v_format] for layer in spec.layers]
    digest = hashlib.sha256(fingerprint + json.dumps(formats).encode())
    for layer, offset in sorted(key_offsets.items()):
        digest.update(layer.to_bytes(4, "little") + bytes_of(offset))
    return digest.digest()


def fingerprint(model: PreTrainedModel) -> dict[str, str]:
    """SHA-256 in hex of the model's config, of its weights, and of what its modules are told to do with them: which
    adapter is on, how it is scaled."""
    return {
        "config": _config_digest(model),
        "weights": _weights_digest(LiveSource(model)),
        "behaviour": hashlib.sha256((behaviour(model) + _coded(model)).encode()).hexdigest(),
    }


def _coded(model: PreTrainedModel) -> str:
    """Which weights are held as codes, how made; "" where none is. They may dequantize to what others are."""
    formats = {name: packed.label for name, packed in coded_weights(model).items()}
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
    """Of files of weights, by name; those kept are believed."""
    return json.dumps(sorted((path.name, _kept_digest(path)) for path in paths))


def _kept_digest(path: Path) -> str:
    status = path.stat()
    if status.st_size < _LEAST_KEPT:
        return _sha256(path)
    stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    kept: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        read = json.loads((path.parent / _DIGESTS).read_text())
        kept = read if isinstance(read, dict) else {}
    entry = kept.get(path.name)
    if isinstance(entry, dict) and entry.get("stamp") == stamp and isinstance(entry.get("sha256"), str):
        return entry["sha256"]
    digest = _sha256(path)
    kept[path.name] = {"stamp": stamp, "sha256": digest}
    # A folder that is not ours to write in: it is computed again next time.
    with suppress(OSError), AtomicFile(path.parent / _DIGESTS) as file:
        file.write(json.dumps(kept).encode())
    return digest


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items() if key not in _INCIDENTAL}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value
