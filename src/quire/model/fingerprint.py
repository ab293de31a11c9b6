"""Whose keys and values a saved cache holds: a model's config, a digest of its weights, and what decides the bits.

`fingerprint` digests every parameter and buffer: name, dtype, shape and bits, so that keys of one fine-tune are never
read into another. Packed weights (`accelerate`) count as the weights they were packed from. Not kept: a weight may be
changed in place without a trace, so it is computed each time it is asked for.

`world` is for the tiers of an engine: equal worlds give equal bits for equal tokens. It adds the dtype, the back end
and what it runs on: instruction set, the very build of the kernels, torch and transformers. Where `load` has read the
weights itself their files are digested instead, and the digests of large ones are kept beside them, by path, size,
times and inode, so that a later start reads nothing.

Cost: one pass of SHA-256 over the weights, about 1 to 2 s for each GiB; microseconds where the digests are kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from quire.backends import choose_backend, native_module
from quire.model.load import LoadedModel
from quire.model.plain_weights import packed_weight

__all__ = ["fingerprint", "world"]

_DIGESTS = "quire-sha256.json"  # beside the files it is about
_LEAST_KEPT = 64 << 20  # bytes of a file whose digest is worth keeping

# Fields of a config that say where it came from or how a forward is run, not what the numbers are.
_INCIDENTAL = frozenset({
    "_name_or_path", "transformers_version", "_attn_implementation", "_attn_implementation_internal", "use_cache",
    "output_attentions", "output_hidden_states", "return_dict", "architectures", "torch_dtype", "dtype",
    "_commit_hash", "experts_implementation", "_experts_implementation_internal",
})  # fmt: skip


def world(loaded: LoadedModel, backend: str | None = None) -> bytes:
    """32 bytes that stand for all that decides the bits of this model's keys and values, run by this back end.

    To be asked for before the model is prepared.
    """
    files = loaded.mapped.paths() if loaded.mapped is not None else []
    weights = _files_digest(files) if files else fingerprint(loaded.model)["weights"]
    parts = {
        "config": _config_digest(loaded.model),
        "weights": weights,
        "dtype": loaded.spec.dtype,
        "torch": [torch.__version__, torch.backends.cpu.get_cpu_capability()],
        "transformers": transformers.__version__,
        "backend": choose_backend(backend, needs="BlockManager"),
    }
    if parts["backend"] == "native":
        native: Any = native_module()
        parts["kernels"] = [native.isa(), _sha256(Path(native.__file__))]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()


def fingerprint(model: PreTrainedModel) -> dict[str, str]:
    """SHA-256 in hex of the model's config and of its weights."""
    digest = hashlib.sha256()
    for name, tensor in _tensors(model):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        # numpy has no bfloat16; the bits are what counts.
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return {"config": _config_digest(model), "weights": digest.hexdigest()}


def _config_digest(model: PreTrainedModel) -> str:
    config = json.dumps(_plain(model.config.to_dict()), sort_keys=True, default=str)
    return hashlib.sha256(config.encode()).hexdigest()


def _files_digest(paths: list[str]) -> str:
    """Of files of weights, by name; those kept are believed."""
    return json.dumps(sorted((Path(path).name, _kept_digest(Path(path))) for path in paths))


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
    with suppress(OSError):  # a folder that is not ours to write in: it is computed again next time
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".quire-")
        with os.fdopen(descriptor, "w") as file:
            json.dump(kept, file)
        os.replace(name, path.parent / _DIGESTS)
    return digest


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight once, by its first name, and every buffer that is saved."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            whole = f"{prefix}.{name}"
            if parameter is not None:
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield whole, parameter
            elif (packed := packed_weight(module, name)) is not None:
                owner, unpack = packed
                if id(owner) not in seen:
                    seen.add(id(owner))
                    yield whole, unpack()
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}", buffer


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items() if key not in _INCIDENTAL}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value
