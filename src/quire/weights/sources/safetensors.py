"""The weights of a checkpoint in safetensors files, chosen as transformers does in a folder or in the Hub's cache.

Cost: opening reads the files' headers; nothing is downloaded unless requested.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from quire.errors import LoadError
from quire.weights.sources.source import CheckpointTensor

__all__ = ["SafetensorsSource", "checkpoint_file"]

_TYPES: dict[str, torch.dtype | str] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


class SafetensorsSource:
    """The tensors of `files`. See `WeightSource`.

    *raises:* LoadError: a file is broken or cut short.
    """

    def __init__(self, files: tuple[Path, ...]) -> None:
        self.files = files
        self._tensors = [tensor for path in files for tensor in _tensors_of(path)]

    @classmethod
    def of_checkpoint(
        cls,
        folder: str,
        revision: str | None = None,
        *,
        may_download: bool = False,
        other_names: Sequence[str] = (),
    ) -> SafetensorsSource | None:
        """The source of a folder, or of a Hub id in the local cache; None if its weights are no safetensors files.

        may_download: downloads files of a Hub id that are not in the cache. other_names: further names of its file or
        index, without extension, if it has none of transformers' names.

        *raises:* LoadError: an index or a file is broken.
        """
        find = partial(checkpoint_file, folder, revision=revision, may_download=may_download)
        names = [(SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)]
        names += [(f"{name}.safetensors", f"{name}.safetensors.index.json") for name in other_names]
        for whole_name, index_name in names:
            if (whole := find(whole_name)) is not None:
                return cls((whole,))
            if (index := find(index_name)) is not None:
                paths = {name: find(name) for name in _files_of(index)}
                missing = [name for name, path in paths.items() if path is None]
                if missing and Path(folder).is_dir():
                    raise LoadError(f"expected {missing[0]}, which {index} names, {folder} has no such file")
                return cls(tuple(path for path in paths.values() if path is not None))
        return None

    def __iter__(self) -> Iterator[CheckpointTensor]:
        return iter(self._tensors)


def checkpoint_file(
    folder: str, name: str, revision: str | None = None, *, may_download: bool = False
) -> Path | None:
    """A file of a folder, or of a Hub id in the local cache, downloaded if it `may_download`; None if absent."""
    path = cached_file(
        folder,
        name,
        revision=revision,
        local_files_only=not may_download,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if path is None else Path(path)


def _files_of(index: Path) -> list[str]:
    try:
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return sorted({name for name in files if isinstance(name, str)})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"expected {index} as an index with a weight_map, it is broken: {error!r}") from error


def _tensors_of(path: Path) -> Iterator[CheckpointTensor]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # no mapping
                part: Any = file.get_slice(name)
                kind: str = part.get_dtype()
                saved_type = _TYPES.get(kind, kind)
                read: Callable[[], torch.Tensor] = partial(_read, path, name)
                yield CheckpointTensor(name, tuple(part.get_shape()), saved_type, read, path)
    except (SafetensorError, OSError) as error:
        raise LoadError(f"expected a safetensors file, {path} is broken or cut short: {error}") from error


def _read(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)
