"""The findings of the proof of a model, saved next to its packed weights, so that the next start need not prove it
again.

The proof (`prepare`) costs three small forwards and their comparisons, a second for half a billion weights; its
findings are a few names: the fused modules, with their form, the modules whose forward is replaced, and whether the
decoder is one call. That there are findings implies that the adapters of state layers were proved
(`quire.model.prove.state_proof`). They hold only for the model that was proved: the key names everything that the
findings follow from.

    file   _MAGIC, SHA-256 of the rest, then JSON: {"key": ..., "found": ...}
    key    the files of packed weights (which name their sources and the variant), the bytes of every other parameter
           and buffer, the config, the settings of the modules (`prove.model_record`), dtype, longest sequence and back
           end, the versions of Python, torch and transformers, the vector instructions torch uses, and size and time of
           every source file of this package and of the model's
    name   SHA-256 of the key, .proof

Invariants
    P1  findings are used only under exactly the key of their proof, from a file whose checksum matches. Otherwise the
        model is proved as without a file, and the file is written again.
    P2  only a model read by `load`, all of whose linear weights, quantized or not, are mapped from files of packed
        weights, has a key.
    P3  a refusal is never saved. A failure to write is one warning.

Cost: a hash of the parameters that are not packed (norms: under a megabyte), and a `stat` of a few hundred files.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from quire.atomic_file import AtomicFile
from quire.backends import native_module
from quire.model.prove.model_record import behaviour
from quire.modules.hooks import first_hook
from quire.saved_folder import SavedFolder
from quire.weights.dense_weights import dense_weight, is_packed
from quire.weights.packed_parameter import bytes_of

if TYPE_CHECKING:
    from quire.weights.load import LoadedModel

__all__ = ["SavedProof"]

_MAGIC = b"quire proof 1\n"
_SUFFIX = ".proof"
_MAX_HASHED_BYTES = 64 << 20  # of parameters that are not packed: norms take less


class SavedProof:
    """The findings in `folder` for a prepared model, JSON: `findings` (None: there are none) and `save`."""

    def __init__(self, folder: SavedFolder, key: dict[str, Any]) -> None:
        self._folder = folder
        self._key = json.dumps(key, sort_keys=True)
        self.path = folder.path / (hashlib.sha256(self._key.encode()).hexdigest()[:32] + _SUFFIX)
        self.findings: Any = self._read()

    @classmethod
    def for_model(
        cls, folder: SavedFolder, packed_weights: Sequence[Path], loaded: LoadedModel, max_model_len: int
    ) -> SavedProof | None:
        """The proof of a model whose linear layers are all mapped from the files `packed_weights` of `folder`; None if
        the model has no key."""
        rest = _hash_of_tensors(loaded.model)
        if rest is None or first_hook(loaded.model) is not None:
            return None
        classes = {type(module) for module in loaded.model.modules()}
        native = native_module()
        files = {*_own_files(), *_files_of(base.__module__ for cls in classes for base in cls.__mro__)}
        return cls(
            folder,
            {
                "packed_weights": [path.name for path in packed_weights],
                "rest": rest,
                "config": loaded.model.config.to_json_string(use_diff=False),
                "behaviour": hashlib.sha256(behaviour(loaded.model).encode()).hexdigest(),
                "spec": repr(loaded.spec),
                "max_model_len": max_model_len,
                "isa": None if native is None else native.isa(),
                "torch_isa": torch.backends.cpu.get_cpu_capability(),
                "versions": [platform.python_version(), torch.__version__, transformers.__version__],
                "files": sorted(filter(None, map(_stamp, files))),
            },
        )

    def save(self, findings: Any) -> None:
        """Write `findings`, JSON, for the next start."""
        body = json.dumps({"key": self._key, "found": findings}).encode()
        content = _MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n" + body
        try:
            self._folder.make_room(len(content))
            with AtomicFile(self.path) as file:
                file.write(content)
        except OSError as error:
            self._folder.warn_not_saved("the proof of the model is", error)

    def _read(self) -> Any:
        try:
            with self._folder.open(self.path) as file:
                content = file.read()
        except OSError:
            return None
        head, body = content[: len(_MAGIC) + 65], content[len(_MAGIC) + 65 :]
        if head != _MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n":
            return None
        proof = json.loads(body)
        return proof["found"] if proof["key"] == self._key else None


def _hash_of_tensors(model: torch.nn.Module) -> str | None:
    """Hash of name, shape, dtype and bytes of every parameter and buffer that is not packed; None if they are too
    large."""
    tensors = [
        (name, tensor)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if not is_packed(tensor)  # whose files are in the key
    ]
    if sum(tensor.numel() * tensor.element_size() for _, tensor in tensors) > _MAX_HASHED_BYTES:
        return None
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        if tensor.numel():
            digest.update(bytes_of(dense_weight(tensor)))
    return digest.hexdigest()


def _own_files() -> list[str]:
    """Every source file of this package, the extension included."""
    files = []
    for folder, _, names in os.walk(Path(__file__).parents[1]):
        files += [os.path.join(folder, name) for name in names if name.endswith((".py", ".so", ".pyd"))]
    return files


def _files_of(modules: Iterable[str]) -> list[str]:
    files = (getattr(sys.modules.get(name), "__file__", None) for name in modules)
    return [file for file in files if file is not None]


def _stamp(path: str) -> list[Any] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return [path, status.st_size, status.st_mtime_ns]
