"""Saves a QuireCache in a file and loads it for the same model only.

    8 bytes    "QUIREKV1"
    8 bytes    length of the header, little endian
    32 bytes   SHA-256 of the header
    header     JSON: fingerprint, kv_dtype, and for each layer its contents, with the SHA-256 of every tensor
    payload    the tensors' bytes in the header's order, without gaps

Keys and values lie token after token, row after row, as in memory; a layer with a window has only its visible tokens.
Codes lie as codes, with zeros in a token's padding, and key offsets behind the values. States lie as the next step
needs them, without the past recorded for `crop`. Loading executes and unpickles nothing; every byte of the file is
covered by a checksum or compared.

Invariants
    C1  `save` leaves the old file or the whole new file under the path, whenever it is interrupted.
    C2  `load` fills the cache with verified bytes of this model, or leaves it empty and raises.

Cost: a pass of SHA-256 over the model's weights, and one over the cache; on another device than this machine, a copy of
the cache in host memory (`save`) or of a layer's keys or values (`load`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from quire.atomic_file import AtomicFile
from quire.devices import Device
from quire.errors import ArgumentError, CapacityError, LoadError, QuireError
from quire.hf.cache_formats import CacheFormats
from quire.hf.file_header import BadHeaderError, FileHeader, FileLayer, check_layers, parse
from quire.hf.file_states import check_states
from quire.hf.layer_rows import bytes_of_row
from quire.hf.layers import RowLayer
from quire.hf.state_layers import STATES, BoundStates
from quire.hf.stored_shape import StoredShape
from quire.memory.device_buffer import read, write
from quire.model.fingerprint import fingerprint
from quire.sizes import format_size

__all__ = ["load", "save"]

_MAGIC = b"QUIREKV1"
_FRONT = len(_MAGIC) + 8 + 32
_MAX_HEADER = 64 << 20


class _Cache(Protocol):
    """The members of a `QuireCache` that are used here; it describes them."""

    layers: list[Any]
    config: Any
    backend: Device
    formats: CacheFormats

    def open_all(self, shapes: dict[int, StoredShape]) -> None: ...
    def prepare_for(self, positions: dict[int, tuple[int, int]]) -> None: ...
    def config_shapes(self, num_rows: int, dtype: torch.dtype) -> dict[int, StoredShape]: ...
    def reset(self) -> None: ...


def save(cache: _Cache, path: Path, model: PreTrainedModel) -> None:
    """See `QuireCache.save`."""
    if not path.parent.is_dir():
        raise ArgumentError(
            f"expected a folder that is there to save a cache in, got {path.parent}; make it, or save "
            f"{path.name} elsewhere"
        )
    if path.is_dir():
        raise ArgumentError(f"expected the name of a file to save a cache in, got the folder {path}")
    config_shapes = cache.config_shapes(1, torch.float32)
    _check_states(cache.layers)
    layers = [
        _describe(layer, index, config_shapes.get(index), cache.formats.offsets.get(index))
        for index, layer in enumerate(cache.layers)
    ]
    header: dict[str, Any] = {"fingerprint": fingerprint(model), "layers": [entry for entry, _ in layers]}
    if cache.formats.coded:
        header["kv_dtype"] = cache.formats.kv_dtype
    payload = [part for _, tensors in layers for tensor in tensors for part in tensor]
    front = json.dumps(header, sort_keys=True).encode()
    with AtomicFile(path) as file:
        file.write(_MAGIC + len(front).to_bytes(8, "little") + hashlib.sha256(front).digest() + front)
        for part in payload:
            file.write(part.numpy().data)


def load(cache: _Cache, path: Path, model: PreTrainedModel, *, any_kv_dtype: bool) -> None:
    """See `QuireCache.load`; `cache` is empty and made for `model`. any_kv_dtype: take the file's formats."""
    try:
        with open(path, "rb") as file:
            header = _read_header(file, path)
            _check_model(header, path, model)
            _check_formats(cache, header, path, any_kv_dtype)
            check_layers(header.layers, cache.layers, cache.config_shapes(1, torch.float32), _dtypes(model))
            check_states(header.layers, cache.layers, cache.config, _dtypes(model))
            _fill(cache, file, header, path)
    except BadHeaderError as error:
        cache.reset()
        raise _refused(path, f"its header does not describe a cache of this model: {error}") from error
    except OSError as error:
        cache.reset()
        raise LoadError(f"cannot read the cache file {path}: {error.strerror or error}") from error
    except BaseException:
        cache.reset()
        raise


# Writing


def _check_states(layers: list[Any]) -> None:
    holds = any(isinstance(layer, RowLayer) and layer.length for layer in layers)
    missing = [
        index
        for index, layer in enumerate(layers)
        if holds and isinstance(layer, BoundStates) and not layer.has_states
    ]
    if missing:
        raise ArgumentError(
            f"expected states in every state layer, got none in layers {missing}; a model that keeps them in its own "
            "modules (RecurrentGemma) cannot continue from a file"
        )


_Parts = list[torch.Tensor]  # uint8, contiguous, one after another


def _describe(
    layer: Any, index: int, config_shape: StoredShape | None, offset: torch.Tensor | None
) -> tuple[dict[str, Any], list[_Parts]]:
    """A layer's entry in the header, and its tensors in the payload. offset: its key offset."""
    entry: dict[str, Any] = {"rows": None, "states": None}
    tensors: list[_Parts] = []
    if isinstance(layer, RowLayer) and layer.is_initialized:
        shape = layer.shape
        first = layer.first_kept()
        entry["rows"] = {
            "num_rows": shape.num_rows,
            "num_heads": list(shape.num_heads),
            "widths": list(shape.widths),
            "dtype": str(shape.dtype).removeprefix("torch."),
            "first": first,
            "length": layer.length,
            "sha256": [],
        }
        if config_shape is not None and (shape.num_heads, shape.widths) != (
            config_shape.num_heads,
            config_shape.widths,
        ):
            entry["rows"]["foretold"] = False
        for which in (0, 1):
            device = layer.rows[which].device
            parts = [read(device, place) for place in _rows_of(layer, which, first, layer.length)]
            if shape.is_coded and len(padding := shape.padding(which)):
                for part in parts:
                    part.view(-1, shape.token_bytes(which))[:, padding] = 0  # padding has no meaning
            entry["rows"]["sha256"].append(_digest(parts))
            tensors.append(parts)
        if shape.is_coded:
            entry["rows"]["formats"] = list(shape.formats)
            entry["rows"]["offset"] = None
        if offset is not None and layer.length:
            tensors.append([_bytes_of(offset)])
            entry["rows"]["offset"] = _digest(tensors[-1])
    if isinstance(layer, BoundStates):
        states: list[dict[str, Any]] = []
        for state in range(layer.number_of_states):
            described: dict[str, Any] = {
                "has_previous_state": layer.has_previous_state[state],
                "conv_kernel_size": layer.conv_kernel_size[state],
            }
            for name in STATES:
                tensor = layer.saved(name, state)
                described[name] = None
                if tensor is not None:
                    parts = [_bytes_of(tensor.detach().contiguous())]
                    described[name] = {
                        "dtype": str(tensor.dtype).removeprefix("torch."),
                        "shape": list(tensor.shape),
                        "sha256": _digest(parts),
                    }
                    tensors.append(parts)
            states.append(described)
        entry["states"] = states
    elif not isinstance(layer, RowLayer) and isinstance(
        layer, (CacheLayerMixin, LinearAttentionCacheLayerMixin)
    ):  # a layer that stores nothing is neither
        raise ArgumentError(
            f"expected layers that a cache file can store, got {type(layer).__name__} in layer {index}; such caches "
            "cannot be saved"
        )
    return entry, tensors


def _dtypes(model: PreTrainedModel) -> frozenset[torch.dtype]:
    return frozenset(weight.dtype for weight in model.parameters() if weight.dtype.is_floating_point)


def _rows_of(layer: RowLayer, which: int, first: int, stop: int) -> Iterator[torch.Tensor]:
    """The bytes of positions [first, stop), row by row, as they lie."""
    rows = layer.rows[which]
    for row in range(rows.num_rows):
        yield bytes_of_row(rows, row, first, stop)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _digest(parts: _Parts) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.numpy().data)
    return digest.hexdigest()


# Reading


def _read_header(file: BinaryIO, path: Path) -> FileHeader:
    size = os.fstat(file.fileno()).st_size
    front = file.read(_FRONT)
    if len(front) < _FRONT or front[: len(_MAGIC)] != _MAGIC:
        raise _refused(
            path,
            f"expected a cache file of Quire, which begins with {_MAGIC!r}, got {front[: len(_MAGIC)]!r}",
        )
    length = int.from_bytes(front[len(_MAGIC) : len(_MAGIC) + 8], "little")
    most = min(_MAX_HEADER, size - _FRONT)
    if length > most:
        raise _refused(
            path,
            f"expected a header of at most {most} bytes, got {length}; it is cut short or damaged in its header",
        )
    text = file.read(length)
    if hashlib.sha256(text).digest() != front[len(_MAGIC) + 8 :]:
        raise _refused(path, "expected the checksum that the header was written with, got another")
    header = parse(text)
    expected = _FRONT + length + header.num_bytes
    if size != expected:
        raise _refused(
            path, f"expected {_byte_count(expected)} bytes, got {size}; it is cut short or was added to"
        )
    return header


def _check_model(header: FileHeader, path: Path, model: PreTrainedModel) -> None:
    model_fingerprint = fingerprint(model)
    saved = {
        "behaviour": model_fingerprint["behaviour"],
        **header.fingerprint,
    }  # earlier files lack "behaviour"
    for part, description in (
        ("config", "config"),
        ("weights", "weights"),
        ("behaviour", "state of its modules: adapters on or off, scalings, hooks"),
    ):
        if saved[part] != model_fingerprint[part]:
            raise _refused(
                path,
                f"it was saved for a model with another {description} (expected SHA-256 "
                f"{model_fingerprint[part][:12]}..., this model's, got {saved[part][:12]}...)",
            )


def _check_formats(cache: _Cache, header: FileHeader, path: Path, any_kv_dtype: bool) -> None:
    """Check the file's formats against the empty cache's, or give the cache the file's."""
    try:
        stored = CacheFormats(cache.config, header.kv_dtype, None, cache.backend)
    except QuireError as error:
        raise _refused(path, f"its keys and values are stored as {header.kv_dtype!r}: {error}") from error
    if any_kv_dtype:
        cache.formats = stored
    elif not stored.same_as(cache.formats):
        raise _refused(
            path,
            f"expected keys and values of kv_dtype={cache.formats.kv_dtype!r}, got {header.kv_dtype!r}; load "
            "it without kv_dtype",
        )
    # Layers that stayed in the model's dtype because of sinks or soft caps.
    model_dtype_layers = {
        index
        for index in cache.formats.coded
        if index < len(header.layers)
        and (rows := header.layers[index].rows) is not None
        and not rows.shape.is_coded
    }
    if model_dtype_layers:
        cache.formats.settle({}, frozenset(model_dtype_layers))


def _fill(cache: _Cache, file: BinaryIO, header: FileHeader, path: Path) -> None:
    stored = {index: layer.rows for index, layer in enumerate(header.layers) if layer.rows is not None}
    # The first token opens rows that are empty here.
    filled = {index: rows for index, rows in stored.items() if rows.length}
    cache.open_all({index: rows.shape for index, rows in filled.items()})
    # All memory first, so that a lack of memory is found before anything is read.
    cache.prepare_for({index: (rows.first, rows.length) for index, rows in filled.items()})
    for layer, entry in zip(cache.layers, header.layers, strict=True):
        if entry.states is not None:
            layer.charge.resize(entry.state_bytes, f"the saved states of layer {layer.index}")
    for index, (layer, entry) in enumerate(zip(cache.layers, header.layers, strict=True)):
        if (rows := filled.get(index)) is not None:
            for which in (0, 1):
                device = layer.rows[which].device
                places = list(_rows_of(layer, which, rows.first, rows.length))
                parts = places if device.is_host else [torch.empty_like(place) for place in places]
                _read_into(file, parts, rows.sha256[which], path)
                if not device.is_host:
                    for place, part in zip(places, parts, strict=True):
                        write(device, place, part)
            offset: torch.Tensor | None = None
            if rows.offset is not None:
                offset = torch.empty(rows.offset_shape, dtype=torch.float32)
                _read_into(file, [_bytes_of(offset)], rows.offset, path)
            cache.formats.set_offset(index, offset)
            layer.mark_filled(rows.first, rows.length)
        if entry.states is not None:
            _fill_states(layer, file, entry, path)


def _fill_states(layer: BoundStates, file: BinaryIO, entry: FileLayer, path: Path) -> None:
    for number, state in enumerate(entry.states or ()):
        tensors: dict[str, torch.Tensor] = {}
        for name, stored in state.tensors.items():
            try:
                tensors[name] = torch.empty(stored.shape, dtype=stored.dtype)
            except RuntimeError as error:
                raise CapacityError(
                    f"cannot take {format_size(stored.num_bytes)} from the operating system for a saved state: "
                    f"{str(error).splitlines()[0]}"
                ) from error
            _read_into(file, [_bytes_of(tensors[name])], stored.sha256, path)
        layer.fill_state(
            number,
            tensors,
            has_previous_state=state.has_previous_state,
            conv_kernel_size=state.conv_kernel_size,
        )


def _read_into(file: BinaryIO, parts: _Parts, digest: str, path: Path) -> None:
    for part in parts:
        target = part.numpy().data
        if (count := file.readinto(target)) != len(target):  # type: ignore[attr-defined]  # buffered readers have it
            raise _refused(path, f"expected {len(target)} more bytes, got {count}; it is cut short")
    if (got := _digest(parts)) != digest:
        raise _refused(
            path, f"expected a tensor with SHA-256 {digest[:12]}..., got one with {got[:12]}...: damaged"
        )


def _byte_count(num_bytes: int) -> str:
    return str(num_bytes) if num_bytes < 1 << 63 else f"2**{num_bytes.bit_length() - 1} or more"


def _refused(path: Path, reason: str) -> LoadError:
    return LoadError(
        f"cannot load the cache file {path}: {reason}; the file is not used, compute the prompt again"
    )
