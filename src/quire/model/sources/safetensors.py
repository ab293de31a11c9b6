"""The weights of a checkpoint in safetensors files, as transformers picks them from a folder or from the Hub's cache.

Cost: opening reads the files' headers; nothing is downloaded, unless that is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from quire.errors import LoadError
from quire.model.sources.source import StoredTensor

__all__ = ["SafetensorsSource"]

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
        cls, where: str, revision: str | None = None, *, may_download: bool = False
    ) -> SafetensorsSource | None:
        """Of a folder, or of a Hub id in the local cache; None where its weights are no safetensors files.

        may_download: what of a Hub id is not in the local cache.
        """
        found = partial(
            cached_file,
            where,
            revision=revision,
            local_files_only=not may_download,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if (whole := found(SAFE_WEIGHTS_NAME)) is not None:
            return cls((Path(whole),))
        if (index := found(SAFE_WEIGHTS_INDEX_NAME)) is None:
            return None
        names = sorted(set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()))
        paths = [found(name) for name in names]
        return cls(tuple(Path(path) for path in paths if path is not None))

    def __iter__(self) -> Iterator[StoredTensor]:
        return iter(self._tensors)


def _tensors_of(path: Path) -> Iterator[StoredTensor]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # no mapping
                part: Any = file.get_slice(name)
                kind: str = part.get_dtype()
                stored = _TYPES.get(kind, kind)
                read: Callable[[], torch.Tensor] = partial(_read, path, name)
                yield StoredTensor(name, tuple(part.get_shape()), stored, read, path)
    except (SafetensorError, OSError) as error:
        raise LoadError(f"expected a safetensors file, {path} is broken or cut short: {error}") from error


def _read(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)
