"""Saves a QuireCache in a file and loads it for the same model only.

The file is a safetensors file, so any tool that reads these can read keys, values and states; `file_layers` has the
names of its tensors, `file_header` its metadata and its two digests. Keys and values lie token after token, row after
row, as in memory; a layer with a window has only its visible tokens. Codes and their scales are tensors of their own.
Loading executes and unpickles nothing.

Invariants
    C1  `save` leaves the old file or the whole new file under the path, whenever it is interrupted.
    C2  `load` fills the cache with verified bytes of this model, or leaves it empty and raises.

Cost: a pass of SHA-256 over the model's weights, and one over the cache, in pieces of 1 MiB: neither call makes a
second copy of the cache. States are read into memory of their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from quire.atomic_file import AtomicFile
from quire.errors import ArgumentError, CapacityError, LoadError, QuireError
from quire.hf.cache_formats import CacheFormats
from quire.hf.file_header import (
    BadHeaderError,
    CacheDescription,
    FileHeader,
    FileTensor,
    header_bytes,
    read_header,
    with_digests,
)
from quire.hf.file_layers import (
    FileCache,
    FileLayer,
    RowPart,
    check_layers,
    offset_name,
    row_parts,
    state_name,
)
from quire.hf.layer_rows import bytes_of_row
from quire.hf.layers import RowLayer
from quire.hf.state_layers import BoundStates
from quire.memory.device_buffer import read, write
from quire.model.fingerprint import fingerprint
from quire.sizes import format_size

__all__ = ["load", "save"]

_PIECE_BYTES = 1 << 20  # of a row, digested and written, or read, at a time


def save(cache: FileCache, path: Path, model: PreTrainedModel) -> None:
    """See `QuireCache.save`."""
    if not path.parent.is_dir():
        raise ArgumentError(
            f"expected a folder that is there to save a cache in, got {path.parent}; make it, or save "
            f"{path.name} elsewhere"
        )
    if path.is_dir():
        raise ArgumentError(f"expected the name of a file to save a cache in, got the folder {path}")
    _check_states(cache.layers)
    # The largest elements first, as safetensors does: all tensors are aligned.
    tensors = sorted(_saved_tensors(cache), key=lambda saved: -saved.tensor.dtype.itemsize)
    front = header_bytes(_description(cache, model), {saved.name: saved.tensor for saved in tensors})
    digest = hashlib.sha256()
    with AtomicFile(path) as file:
        file.write(front)
        for saved in tensors:
            for piece in saved.pieces:
                data = _bytes_of(piece).numpy().data
                digest.update(data)
                file.write(data)
        file.write(with_digests(front, digest.hexdigest()), 0)


def load(cache: FileCache, path: Path, model: PreTrainedModel, *, any_kv_dtype: bool) -> None:
    """See `QuireCache.load`; `cache` is empty and made for `model`. any_kv_dtype: take the file's formats."""
    try:
        with open(path, "rb") as file:
            header = read_header(file)
            _check_model(header, model)
            _check_formats(cache, header, any_kv_dtype)
            _fill(cache, file, header, check_layers(header, cache, _dtypes(model)))
    except BaseException as error:
        cache.reset()
        if isinstance(error, BadHeaderError):
            raise LoadError(
                f"cannot load the cache file {path}: {error}; the file is not used, compute the prompt again"
            ) from error
        if isinstance(error, OSError):
            raise LoadError(f"cannot read the cache file {path}: {error.strerror or error}") from error
        raise


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _row_pieces(
    layer: RowLayer, part: RowPart, first: int, stop: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Positions [first, stop) of all rows, a piece at a time: its bytes, the same in host memory, and `part` of these,
    [tokens, heads, ..]."""
    rows, shape = layer.rows[part.which], layer.shape
    step = max(1, _PIECE_BYTES // rows.token_bytes)
    for row in range(rows.num_rows):
        for begin in range(first, stop, step):
            place = bytes_of_row(rows, row, begin, min(begin + step, stop))
            held = read(rows.device, place)
            yield place, held, shape.part(held, part.which, is_scale=part.is_scale)


# Writing


class _SavedTensor(NamedTuple):
    """pieces: the tensor's data, dense in host memory, one after another."""

    name: str
    tensor: FileTensor
    pieces: Iterable[torch.Tensor]


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


def _description(cache: FileCache, model: PreTrainedModel) -> CacheDescription:
    config_shapes = cache.config_shapes(1, torch.float32)
    layers = [layer for layer in cache.layers if isinstance(layer, RowLayer) and layer.is_initialized]
    return CacheDescription(
        fingerprint=fingerprint(model),
        kv_dtype=cache.formats.kv_dtype,
        num_tokens=max((layer.length for layer in layers), default=0),
        coded_dtypes={
            str(layer.index): str(layer.shape.dtype).removeprefix("torch.")  # type: ignore[misc]
            for layer in layers
            if layer.shape.is_coded
        },
        own_shapes=[
            layer.index
            for layer in layers
            if (shape := config_shapes.get(layer.index)) is not None
            and (layer.shape.num_heads, layer.shape.widths) != (shape.num_heads, shape.widths)
        ],
    )


def _saved_tensors(cache: FileCache) -> Iterator[_SavedTensor]:
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, RowLayer) and layer.is_initialized:
            first, stop = layer.first_kept(), layer.length
            for name, part in row_parts(index, layer.shape).items():
                yield _SavedTensor(
                    name, part.tensor(layer.shape, stop - first), _dense_pieces(layer, part, first, stop)
                )
            offset = cache.formats.offsets.get(index)
            if offset is not None and layer.length:
                yield _saved_whole(offset_name(index), offset)
        if isinstance(layer, BoundStates):
            for name, number, _ in layer.tensors():
                state = layer.saved(name, number)
                assert state is not None
                yield _saved_whole(state_name(index, name, number), state.detach().contiguous())
        elif not isinstance(layer, RowLayer) and isinstance(
            layer, (CacheLayerMixin, LinearAttentionCacheLayerMixin)
        ):  # a layer that stores nothing is neither
            raise ArgumentError(
                f"expected layers that a cache file can store, got {type(layer).__name__} in layer {index}; such "
                "caches cannot be saved"
            )


def _dense_pieces(layer: RowLayer, part: RowPart, first: int, stop: int) -> Iterator[torch.Tensor]:
    for _, _, piece in _row_pieces(layer, part, first, stop):
        yield piece.contiguous()


def _saved_whole(name: str, tensor: torch.Tensor) -> _SavedTensor:
    return _SavedTensor(name, FileTensor(tensor.dtype, tuple(tensor.shape)), [tensor])


# Reading


def _dtypes(model: PreTrainedModel) -> frozenset[torch.dtype]:
    return frozenset(weight.dtype for weight in model.parameters() if weight.dtype.is_floating_point)


def _check_model(header: FileHeader, model: PreTrainedModel) -> None:
    expected, saved = fingerprint(model), header.description.fingerprint
    for part, description in (
        ("config", "config"),
        ("weights", "weights"),
        ("behaviour", "state of its modules: adapters on or off, scalings, hooks"),
    ):
        if (got := saved.get(part, "none")) != expected[part]:
            raise BadHeaderError(
                f"it was saved for a model with another {description} (expected SHA-256 {expected[part][:12]}..., "
                f"this model's, got {got[:12]}...)"
            )


def _check_formats(cache: FileCache, header: FileHeader, any_kv_dtype: bool) -> None:
    """Check the file's formats against the empty cache's, or give the cache the file's."""
    kv_dtype = header.description.kv_dtype
    try:
        stored = CacheFormats(cache.config, kv_dtype, None, cache.backend)
    except QuireError as error:
        raise BadHeaderError(f"its keys and values are stored as {kv_dtype!r}: {error}") from error
    if any_kv_dtype:
        cache.formats = stored
    elif not stored.same_as(cache.formats):
        raise BadHeaderError(
            f"expected keys and values of kv_dtype={cache.formats.kv_dtype!r}, got {kv_dtype!r}; load it without "
            "kv_dtype"
        )
    # Layers that stayed in the model's dtype because of sinks or soft caps.
    model_dtype_layers = {
        index
        for index in cache.formats.coded
        if f"layers.{index}.k" in header.tensors and f"layers.{index}.k_scale" not in header.tensors
    }
    if model_dtype_layers:
        cache.formats.settle({}, frozenset(model_dtype_layers))


def _fill(cache: FileCache, file: BinaryIO, header: FileHeader, layers: list[FileLayer]) -> None:
    length = header.description.num_tokens
    # The first token opens rows that are empty here.
    shapes = {index: entry.shape for index, entry in enumerate(layers) if entry.shape is not None and length}
    cache.open_all(shapes)
    # All memory first, so that a lack of memory is found before anything is read.
    cache.prepare_for({index: (layers[index].first, length) for index in shapes})
    for layer, entry in zip(cache.layers, layers, strict=True):
        if entry.states:
            layer.charge.resize(entry.state_bytes, f"the saved states of layer {layer.index}")
    parts = {
        name: (index, part)
        for index, shape in shapes.items()
        for name, part in row_parts(index, shape).items()
    }
    reader = _DigestReader(file)
    others: dict[str, torch.Tensor] = {}  # offsets and states
    for name, tensor in header.tensors.items():
        if name in parts:
            index, part = parts[name]
            _fill_rows(cache.layers[index], part, layers[index].first, length, reader)
        elif tensor.num_bytes:
            others[name] = _empty(name, tensor)
            reader.read_into(others[name])
    if reader.digest.hexdigest() != header.data_sha256:
        raise BadHeaderError(
            "expected the tensors' SHA-256 that they were written with, got another: damaged"
        )
    for index in shapes:
        cache.formats.set_offset(index, others.get(offset_name(index)))
        cache.layers[index].mark_filled(layers[index].first, length)
    for index, entry in enumerate(layers):
        for name, number in entry.states:
            cache.layers[index].fill_state(name, number, others[state_name(index, name, number)])


def _fill_rows(layer: RowLayer, part: RowPart, first: int, stop: int, reader: _DigestReader) -> None:
    device = layer.rows[part.which].device
    for place, held, piece in _row_pieces(layer, part, first, stop):
        dense = piece if piece.is_contiguous() else torch.empty(piece.shape, dtype=piece.dtype)
        reader.read_into(dense)
        if dense is not piece:
            piece.copy_(dense)
        if not device.is_host:
            write(device, place, held)


def _empty(name: str, tensor: FileTensor) -> torch.Tensor:
    try:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    except RuntimeError as error:
        raise CapacityError(
            f"cannot take {format_size(tensor.num_bytes)} from the operating system for a saved state, {name}: "
            f"{str(error).splitlines()[0]}"
        ) from error


class _DigestReader:
    """Reads a file's data from its present place on; `digest` is of all bytes read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file: Any = file
        self.digest = hashlib.sha256()

    def read_into(self, target: torch.Tensor) -> None:
        data = _bytes_of(target).numpy().data
        if (count := self._file.readinto(data)) != len(data):
            raise BadHeaderError(f"expected {len(data)} more bytes, got {count}; it is cut short")
        self.digest.update(data)
