"""Parses the header of a cache file, and checks that its contents can be a cache of this model.

The file is untrusted: its checksum proves that it is as written, not who wrote it. Every field is checked here before
use, so that no size or type in the file decides what is allocated.

Invariants
    F1  `parse` returns a header whose every field has its type and its range, or raises BadHeaderError.
    F2  `check_layers` and then `file_states` accept only contents that fit the layers of this cache and that a step can
        continue from.

Cost: some 10 us a layer.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quire.errors import QuireError
from quire.hf.layers import RowLayer
from quire.hf.state_layers import STATES, BoundStates
from quire.hf.stored_shape import StoredShape
from quire.spec import FORMATS, format_of

__all__ = [
    "BadHeaderError",
    "FileHeader",
    "FileLayer",
    "FileRows",
    "FileState",
    "check_layers",
    "parse",
]

_FINGERPRINT = ("config", "weights", "behaviour")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MOST_ROWS, _MOST_TOKENS, _MOST_SIZE, _MOST_DIMENSIONS = 1 << 20, (1 << 31) - 1, 1 << 31, 8

_AUTOCAST = (torch.bfloat16, torch.float16)  # dtypes that a float32 model may store under torch.autocast


class BadHeaderError(QuireError):
    """A fault in a header: expected, got."""


@dataclass(frozen=True)
class FileRows:
    """Keys and values of positions [first, length). sha256: of K and of V. has_config_shape: the config gives the same
    shape. offset: SHA-256 of the offset of keys in codes, float32 [heads, width]; None without an offset."""

    shape: StoredShape
    first: int
    length: int
    sha256: tuple[str, str]
    has_config_shape: bool
    offset: str | None = None

    @property
    def offset_shape(self) -> tuple[int, int]:
        return self.shape.num_heads[0], self.shape.widths[0]

    @property
    def num_bytes(self) -> int:
        tokens = self.shape.num_rows * (self.length - self.first)
        offset = 0 if self.offset is None else 4 * math.prod(self.offset_shape)
        return tokens * (self.shape.token_bytes(0) + self.shape.token_bytes(1)) + offset


@dataclass(frozen=True)
class FileTensor:
    dtype: torch.dtype
    shape: tuple[int, ...]
    sha256: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FileState:
    """tensors: the present tensors of `STATES`, by name."""

    has_previous_state: bool
    conv_kernel_size: int | None
    tensors: Mapping[str, FileTensor]


@dataclass(frozen=True)
class FileLayer:
    """rows, states: None if the layer has none."""

    rows: FileRows | None
    states: tuple[FileState, ...] | None

    @property
    def state_bytes(self) -> int:
        return sum(tensor.num_bytes for state in self.states or () for tensor in state.tensors.values())


@dataclass(frozen=True)
class FileHeader:
    """fingerprint: as `quire.model.fingerprint.fingerprint`; "behaviour" is missing in earlier files. kv_dtype: of the
    cache, as one text; "auto" in earlier files."""

    fingerprint: Mapping[str, str]
    layers: tuple[FileLayer, ...]
    kv_dtype: str = "auto"

    @property
    def num_bytes(self) -> int:
        """Bytes of the payload."""
        return sum(_sizes(self.layers))


def _sizes(layers: tuple[FileLayer, ...]) -> Iterator[int]:
    for layer in layers:
        if layer.rows is not None:
            yield layer.rows.num_bytes
        yield layer.state_bytes


def parse(text: bytes) -> FileHeader:
    """*raises:* BadHeaderError."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadHeaderError(f"expected a header in JSON, got {len(text)} bytes that are not JSON") from error
    fingerprint = _get(document, "fingerprint", dict, "the header")
    for name in _FINGERPRINT:
        if name != "behaviour" or name in fingerprint:
            _sha256(_get(fingerprint, name, str, "fingerprint"), f"fingerprint.{name}")
    layers = _get(document, "layers", list, "the header")
    return FileHeader(
        {name: fingerprint[name] for name in _FINGERPRINT if name in fingerprint},
        tuple(_layer(entry, f"layers[{index}]") for index, entry in enumerate(layers)),
        _get(document, "kv_dtype", str, "the header") if "kv_dtype" in document else "auto",
    )


def _layer(entry: Any, where: str) -> FileLayer:
    rows = _get(entry, "rows", (dict, type(None)), where)
    states = _get(entry, "states", (list, type(None)), where)
    return FileLayer(
        None if rows is None else _rows(rows, f"{where}.rows"),
        None
        if states is None
        else tuple(_state(state, f"{where}.states[{at}]") for at, state in enumerate(states)),
    )


def _rows(entry: dict[str, Any], where: str) -> FileRows:
    k_heads, v_heads = _sizes_of(entry, "num_heads", where, 2, 2)
    k_width, v_width = _sizes_of(entry, "widths", where, 2, 2)
    length = _integer(entry, "length", where, 0, _MOST_TOKENS)
    digests = _get(entry, "sha256", list, where)
    if len(digests) != 2:
        raise BadHeaderError(f"expected 2 digests, got {len(digests)} - in {where}.sha256")
    k_digest, v_digest = (_sha256(digest, f"{where}.sha256") for digest in digests)
    formats = _formats(entry, where) if "formats" in entry else ("", "")
    offset = _get(entry, "offset", (str, type(None)), where) if "offset" in entry else None
    if any(formats) and k_heads != v_heads:
        raise BadHeaderError(
            f"expected as many heads of V as of K beside {formats}, got {v_heads} - in {where}"
        )
    if offset is not None and not (formats[0] and length):
        raise BadHeaderError(
            f"expected an offset only for keys in codes, got one for other keys - in {where}.offset"
        )
    return FileRows(
        StoredShape(
            _integer(entry, "num_rows", where, 1, _MOST_ROWS),
            (k_heads, v_heads),
            (k_width, v_width),
            _dtype(entry, where),
            formats,
        ),
        _integer(entry, "first", where, 0, length),
        length,
        (k_digest, v_digest),
        _get(entry, "foretold", bool, where) if "foretold" in entry else True,
        None if offset is None else _sha256(offset, f"{where}.offset"),
    )


def _formats(entry: dict[str, Any], where: str) -> tuple[str, str]:
    found = _get(entry, "formats", list, where)
    if len(found) != 2:
        raise BadHeaderError(f"expected 2 formats, got {len(found)} - in {where}.formats")
    for name in found:
        if type(name) is not str or (name and (name not in FORMATS or not format_of(name).is_coded)):
            raise BadHeaderError(f"expected formats of codes, got {_short(name)} - in {where}.formats")
    return found[0], found[1]


def _state(entry: Any, where: str) -> FileState:
    tensors = {}
    for name in STATES:
        stored = _get(entry, name, (dict, type(None)), where)
        if stored is not None:
            at = f"{where}.{name}"
            tensors[name] = FileTensor(
                _dtype(stored, at),
                _sizes_of(stored, "shape", at, 1, _MOST_DIMENSIONS),
                _sha256(_get(stored, "sha256", str, at), f"{at}.sha256"),
            )
    kernel = _get(entry, "conv_kernel_size", (int, type(None)), where)
    if kernel is not None:
        kernel = _integer(entry, "conv_kernel_size", where, 1, _MOST_SIZE)
    return FileState(_get(entry, "has_previous_state", bool, where), kernel, tensors)


def _get(entry: Any, name: str, kind: type | tuple[type, ...], where: str) -> Any:
    if not isinstance(entry, dict) or name not in entry:
        raise BadHeaderError(f"expected an object with {name}, got {_short(entry)} - as {where}")
    value = entry[name]
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if type(value) not in kinds:
        names = " or ".join("null" if item is type(None) else item.__name__ for item in kinds)
        raise BadHeaderError(f"expected {names}, got {_short(value)} - in {where}.{name}")
    return value


def _integer(entry: dict[str, Any], name: str, where: str, low: int, high: int) -> int:
    return _in_range(_get(entry, name, int, where), f"{where}.{name}", low, high)


def _in_range(value: Any, where: str, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise BadHeaderError(f"expected an integer of {low} to {high}, got {_short(value)} - in {where}")
    return value


def _sizes_of(entry: dict[str, Any], name: str, where: str, low: int, high: int) -> tuple[int, ...]:
    sizes = _get(entry, name, list, where)
    if not low <= len(sizes) <= high:
        raise BadHeaderError(f"expected {low} to {high} sizes, got {len(sizes)} - in {where}.{name}")
    return tuple(_in_range(size, f"{where}.{name}", 1, _MOST_SIZE) for size in sizes)


def _dtype(entry: dict[str, Any], where: str) -> torch.dtype:
    name = _get(entry, "dtype", str, where)
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise BadHeaderError(f"expected a floating point dtype, got {_short(name)} - in {where}.dtype")
    return dtype


def _sha256(value: Any, where: str) -> str:
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise BadHeaderError(f"expected a SHA-256 in hex, got {_short(value)} - in {where}")
    return value


def _short(value: Any) -> str:
    """A value from the file, shortened: it may be of any length."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:50]}... ({len(text)} characters)"


# Comparing with the cache


def check_layers(
    stored: tuple[FileLayer, ...],
    layers: list[Any],
    config_shapes: Mapping[int, StoredShape],
    dtypes: frozenset[torch.dtype],
) -> None:
    """*raises:* BadHeaderError: the stored layers do not fit this cache's layers.

    config_shapes: the shapes from the config, by layer; their number of rows and dtype are ignored. dtypes: floating
    point dtypes of the model's weights.
    """
    if len(stored) != len(layers):
        raise BadHeaderError(f"expected {len(layers)} layers, got {len(stored)}")
    num_rows: int | None = None
    length: int | None = None
    for index, (entry, layer) in enumerate(zip(stored, layers, strict=True)):
        where = f"layers[{index}]"
        if (rows := entry.rows) is not None:
            if not isinstance(layer, RowLayer):
                raise BadHeaderError(f"expected a layer without keys and values, got rows - in {where}.rows")
            _check_rows(rows, layer.window, config_shapes.get(index), dtypes, f"{where}.rows")
            num_rows = rows.shape.num_rows if num_rows is None else num_rows
            length = rows.length if length is None else length
            if (rows.shape.num_rows, rows.length) != (num_rows, length):
                raise BadHeaderError(
                    f"expected {num_rows} rows of {length} tokens in every layer, got {rows.shape.num_rows} of "
                    f"{rows.length} - in {where}.rows"
                )
        num_states = layer.number_of_states if isinstance(layer, BoundStates) else None
        got = None if entry.states is None else len(entry.states)
        if got != num_states:
            raise BadHeaderError(
                f"expected {'no' if num_states is None else num_states} states, got {'none' if got is None else got} "
                f"- in {where}.states"
            )
    missing = [index for index in config_shapes if num_rows is not None and stored[index].rows is None]
    if missing:
        raise BadHeaderError(f"expected keys and values in every layer, got none in layers {missing}")


def _check_rows(
    rows: FileRows, window: int, config_shape: StoredShape | None, dtypes: frozenset[torch.dtype], where: str
) -> None:
    shape = rows.shape
    if shape.is_coded and (config_shape is None or config_shape.formats != shape.formats):
        expected = (
            "the model's dtype" if config_shape is None or not config_shape.is_coded else config_shape.formats
        )
        raise BadHeaderError(
            f"expected keys and values in {expected}, got {shape.formats} - in {where}.formats"
        )
    if (
        config_shape is not None
        and (rows.has_config_shape or shape.is_coded)
        and (shape.num_heads, shape.widths) != (config_shape.num_heads, config_shape.widths)
    ):
        raise BadHeaderError(
            f"expected heads {config_shape.num_heads} of widths {config_shape.widths}, got {shape.num_heads} of "
            f"{shape.widths} - in {where}"
        )
    needed = max(0, rows.length - window + 1) if window else 0
    if rows.first > needed:
        raise BadHeaderError(
            f"expected the tokens from {needed} on, got those from {rows.first} on - in {where}"
        )
    is_autocast = shape.dtype in _AUTOCAST and torch.float32 in dtypes
    if dtypes and shape.dtype not in dtypes and not is_autocast:
        names = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise BadHeaderError(f"expected {names}, got {shape.dtype} - in {where}.dtype")
