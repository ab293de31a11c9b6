"""The weights of a GGUF file: the codes of each tensor and the name of their quantization, memory-mapped, not copied.

The package `gguf` reads the file (`pip install "quire-kv[gguf]"`) and converts codes to float32.

Cost: opening reads the header, a tenth of a second for a large vocabulary; a tensor costs its pages, `to_float32` 4
bytes a value.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire.errors import LoadError
from quire.weights.sources.source import CheckpointTensor

__all__ = ["GGUFSource", "dequantizer_versions", "is_gguf", "to_float32"]

_CHUNK_VALUES = 1 << 22  # `gguf` has two copies of so many values while it converts them
_DENSE_TYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
}  # fmt: skip


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf" and path.is_file()


class GGUFSource:
    """The tensors of the GGUF file `path`. See `WeightSource`.

    *raises:* LoadError: the package is missing, or the file is broken, cut short, or a part of a split one.
    """

    def __init__(self, path: Path) -> None:
        missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
        if missing:
            raise LoadError(
                f"expected the packages gguf and accelerate to read {path}, {' and '.join(missing)} not installed; "
                'pip install "quire-kv[gguf]"'
            )
        self.path = path
        self.files = (path,)
        try:
            self._reader = _reader(path)
        except Exception as error:  # any error of numpy or the package for bytes that are no GGUF
            raise LoadError(
                f"expected a GGUF file, {path} ({path.stat().st_size} bytes) is broken or cut short: "
                f"{' '.join(str(error).split()) or type(error).__name__}"
            ) from error
        parts = self.field("split.count") or 1
        if parts > 1:
            raise LoadError(
                f"expected a whole GGUF file, {path} is one of {parts} parts; join them with "
                "`llama-gguf-split --merge FIRST.gguf WHOLE.gguf`"
            )

    @property
    def architecture(self) -> str:
        """The file's name of its kind of model, such as "gemma3"."""
        return str(self.field("general.architecture") or "")

    @property
    def dtype(self) -> torch.dtype:
        """The type to compute in: bfloat16 for quantized weights, else the narrowest floating type in the file."""
        types = {tensor.saved_type for tensor in self}
        if any(isinstance(saved_type, str) for saved_type in types) or torch.bfloat16 in types:
            return torch.bfloat16
        return torch.float16 if torch.float16 in types else torch.float32

    def field(self, name: str) -> Any:
        """A value of the file's header; None if it is absent or a list."""
        field = self._reader.get_field(name)
        return None if field is None or len(field.data) != 1 else field.contents()

    @property
    def field_names(self) -> tuple[str, ...]:
        """The keys of the file's header, in its order."""
        return tuple(name for name in self._reader.fields if not name.startswith("GGUF."))

    def value(self, name: str) -> Any:
        """A value of the file's header: scalars, lists of numbers and truth values; for a list of texts its length.

        *raises:* KeyError: no such key.
        """
        field = self._reader.fields[name]
        return _read_list(field.parts[-1]) if not field.data else field.contents()

    @property
    def num_words(self) -> int:
        """Number of words in the file's vocabulary; 0 without one."""
        return self._list_length("tokenizer.ggml.tokens")

    @property
    def num_merges(self) -> int:
        """Number of merges in the file; 0 if they follow from its words."""
        return self._list_length("tokenizer.ggml.merges")

    def _list_length(self, name: str) -> int:
        """The length of a list of the header."""
        field = self._reader.get_field(name)
        return 0 if field is None else int(struct.unpack_from("<Q", field.parts[-1], 4)[0])

    def __iter__(self) -> Iterator[CheckpointTensor]:
        for tensor in self._reader.tensors:
            kind = tensor.tensor_type.name
            saved_type: torch.dtype | str = _DENSE_TYPES[kind] if kind in _DENSE_TYPES else kind  # noqa: SIM401
            yield CheckpointTensor(
                tensor.name,
                tuple(int(size) for size in reversed(tensor.shape)),
                saved_type,
                partial(_to_torch, tensor),
                self.path,
                tensor.data_offset,
            )


def to_float32(tensor: CheckpointTensor) -> torch.Tensor:
    """The values of a GGUF tensor in float32, as the package `gguf` computes them."""
    codes = tensor.read()
    if not isinstance(tensor.saved_type, str):
        return codes.to(torch.float32)
    from gguf import GGMLQuantizationType, dequantize

    kind = GGMLQuantizationType[tensor.saved_type]
    rows = codes.numpy().reshape(-1, codes.shape[-1])
    values = np.empty((rows.shape[0], tensor.shape[-1]), dtype=np.float32)
    step = max(1, _CHUNK_VALUES // tensor.shape[-1])
    for start in range(0, rows.shape[0], step):
        values[start : start + step] = dequantize(rows[start : start + step], kind)
    return torch.from_numpy(values).reshape(tensor.shape)


def _read_list(data: Any) -> Any:
    """Reads the list whose kind, length and values are in `data`; for texts only their number."""
    from gguf import GGUFReader, GGUFValueType

    kind, count = struct.unpack_from("<IQ", data)
    if kind in (GGUFValueType.STRING, GGUFValueType.ARRAY):
        return int(count)
    number = np.dtype(GGUFReader.gguf_scalar_to_np[GGUFValueType(kind)]).newbyteorder("<")
    return np.frombuffer(data[12:], number, count).tolist()


def dequantizer_versions() -> str:
    """The versions that, with its file, determine the float32 values of a tensor."""
    return f"gguf {version('gguf')}, transformers {version('transformers')}"


def _to_torch(tensor: Any) -> torch.Tensor:
    data = torch.from_numpy(np.asarray(tensor.data))
    return data.view(torch.bfloat16) if tensor.tensor_type.name == "BF16" else data


def _reader(path: Path) -> Any:
    """The package's reader of the file, without parsing lists of the header (a vocabulary).

    It would make four numpy arrays of every word: 700 MB and 10 s for 262 144 of them.
    """
    from gguf import GGUFReader, GGUFValueType

    class _HeaderReader(GGUFReader):
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            data: Any = self.data
            kind, count = struct.unpack_from("<IQ", data, orig_offs)
            stop = orig_offs + 12
            if kind == GGUFValueType.STRING:
                for _ in range(count):
                    stop += 8 + struct.unpack_from("<Q", data, stop)[0]
            else:
                stop += count * np.dtype(self.gguf_scalar_to_np[GGUFValueType(kind)]).itemsize
            return stop - orig_offs, [data[orig_offs:stop]], [], [GGUFValueType.ARRAY]

    return _HeaderReader(path, "c")
