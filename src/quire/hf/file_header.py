"""The header of a cache file: a safetensors header whose metadata describes the cache and has two digests.

    8 bytes   length of the header, little endian
    header    JSON: {"__metadata__": {"header_sha256", "data_sha256", "quire_cache"}, then for each tensor
              name: {"dtype", "shape", "data_offsets"}}
    data      the tensors' bytes in the header's order, without gaps

`data_sha256` is the digest of the data; `header_sha256` that of everything before the data, computed with zeros in its
own place. So every byte of the file is covered, which safetensors itself does not do. Both have a fixed place, so that
the data can be written before their digest is known.

The file is untrusted: a digest proves that it is as written, not who wrote it. No size in the header exceeds what the
file holds, and `file_layers` compares the tensors with the cache before anything is allocated.

Invariants
    F1  `read_header` returns a header whose every field has its type and its range, or raises BadHeaderError.

Cost: some 10 us a tensor.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, BinaryIO, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, Json, StringConstraints, ValidationError

from quire.errors import ArgumentError, QuireError

__all__ = [
    "BadHeaderError",
    "CacheDescription",
    "FileHeader",
    "FileTensor",
    "header_bytes",
    "read_header",
    "with_digests",
]

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16,
    "I8": torch.int8, "U8": torch.uint8,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_NO_DIGEST = "0" * 64
_PREFIX = b'{"__metadata__":{"header_sha256":"'
_HEADER_SHA256 = slice(8 + len(_PREFIX), 8 + len(_PREFIX) + 64)
_DATA_SHA256 = slice(_HEADER_SHA256.stop + len('","data_sha256":"'), _HEADER_SHA256.stop + 17 + 64)
_MAX_HEADER = 64 << 20
_ALIGNMENT = 8

_Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_Size = Annotated[int, Field(ge=0, le=1 << 31)]


class BadHeaderError(QuireError):
    """A fault in a header: expected, got."""


class CacheDescription(BaseModel):
    """A saved cache, in addition to its tensors.

    fingerprint: that of `quire.model.fingerprint`. kv_dtype: the cache's. num_tokens: of each row, those that have left
    a window included. coded_dtypes: dtype of the decoded numbers, by layer in codes. own_shapes: layers whose heads and
    widths are not those that the config gives.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    format: Literal[1] = 1
    fingerprint: dict[str, _Sha256]
    kv_dtype: str
    num_tokens: Annotated[int, Field(ge=0, lt=1 << 31)]
    coded_dtypes: dict[str, Literal["float32", "bfloat16", "float16"]]
    own_shapes: list[int]


class _Metadata(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    header_sha256: _Sha256
    data_sha256: _Sha256
    quire_cache: Json[CacheDescription]


class _TensorEntry(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    dtype: Literal[tuple(_DTYPES)]  # type: ignore[valid-type]
    shape: Annotated[list[_Size], Field(max_length=8)]
    data_offsets: tuple[int, int]


class _SafetensorsHeader(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    __pydantic_extra__: dict[str, _TensorEntry] = Field(init=False)  # type: ignore

    metadata: _Metadata = Field(alias="__metadata__")


@dataclass(frozen=True)
class FileTensor:
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


@dataclass(frozen=True)
class FileHeader:
    """tensors: in the order of their data. data_sha256: of all data."""

    description: CacheDescription
    tensors: Mapping[str, FileTensor]
    data_sha256: str


def header_bytes(description: CacheDescription, tensors: Mapping[str, FileTensor]) -> bytes:
    """All bytes before the data, with zeros as digests. *raises:* ArgumentError: a dtype that safetensors lacks."""
    document: dict[str, Any] = {
        "__metadata__": {
            "header_sha256": _NO_DIGEST,
            "data_sha256": _NO_DIGEST,
            "quire_cache": description.model_dump_json(),
        }
    }
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise ArgumentError(
                f"expected tensors of a dtype that a cache file can store, {', '.join(_DTYPES)}, got {tensor.dtype} "
                f"for {name}; such caches cannot be saved"
            )
        begin, end = end, end + tensor.num_bytes
        document[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def with_digests(front: bytes, data_sha256: str) -> bytes:
    """The result of `header_bytes`, with its two digests."""
    sealed = bytearray(front)
    sealed[_DATA_SHA256] = data_sha256.encode()
    sealed[_HEADER_SHA256] = hashlib.sha256(sealed).hexdigest().encode()
    return bytes(sealed)


def read_header(file: BinaryIO) -> FileHeader:
    """The header of an open file, which then stands at the data. *raises:* BadHeaderError; OSError."""
    size = os.fstat(file.fileno()).st_size
    front = file.read(8 + len(_PREFIX))
    if front[8:] != _PREFIX:
        raise BadHeaderError(
            f"expected a cache file of Quire, a safetensors file whose header begins with {_PREFIX.decode()!r}, got "
            f"one that begins with {front[:16]!r}"
        )
    length = int.from_bytes(front[:8], "little")
    longest = min(_MAX_HEADER, size - 8)
    if not len(_PREFIX) <= length <= longest:
        raise BadHeaderError(
            f"expected a header of at most {longest} bytes, got {length}; it is cut short or damaged in its header"
        )
    front += file.read(length - len(_PREFIX))
    without_digest = bytearray(front)
    without_digest[_HEADER_SHA256] = _NO_DIGEST.encode()
    if hashlib.sha256(without_digest).hexdigest().encode() != front[_HEADER_SHA256]:
        raise BadHeaderError("expected the header's SHA-256 that it was written with, got another: damaged")
    header = _parse(front[8:])
    expected = len(front) + sum(tensor.num_bytes for tensor in header.tensors.values())
    if size != expected:
        raise BadHeaderError(f"expected {expected} bytes, got {size}; it is cut short or was added to")
    return header


def _parse(text: bytes) -> FileHeader:
    try:
        header = _SafetensorsHeader.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "the header"
        raise BadHeaderError(
            f"expected the header of a saved cache, got {_short(first['input'])} - in {_short(where)}: {first['msg']}"
        ) from error
    tensors: dict[str, FileTensor] = {}
    end = 0
    for name, entry in header.__pydantic_extra__.items():
        tensors[name] = FileTensor(_DTYPES[entry.dtype], tuple(entry.shape))
        begin, end = end, end + tensors[name].num_bytes
        if entry.data_offsets != (begin, end):
            raise BadHeaderError(
                f"expected the data of {tensors[name]} at {begin} to {end}, got {_short(entry.data_offsets)} - in "
                f"{_short(name)}"
            )
    return FileHeader(header.metadata.quire_cache, tensors, header.metadata.data_sha256)


def _short(value: Any) -> str:
    """A value from the file, shortened: it may be of any length."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:50]}... ({len(text)} characters)"
