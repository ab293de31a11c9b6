"""The tensors of a cache file, layer by layer: their names, and the check that they can be a cache of this model.

    layers.0.k, layers.0.v              [rows, tokens, heads, width], of the tokens that the next step may need; codes
                                        [rows, tokens, heads, stored elements]
    layers.0.k_scale, layers.0.v_scale  scales of codes [rows, tokens, heads], with groups as a fourth dimension
    layers.0.k_offset                   float32 [heads, width], if keys in codes have an offset
    layers.0.conv_states.0, layers.0.recurrent_states.0   states by number, as the next step needs them, without the
                                        past recorded for `crop`

Invariants
    F2  `check_layers` accepts only tensors that fit the layers of this cache and that a step can continue from: all
        layers have the same rows, each the visible tokens of its window, and a state layer has its states, each in the
        shape from the model's config (if `quire.spec` knows it).

Cost: some 10 us a layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch

from quire.devices import Device
from quire.errors import UnsupportedModelError
from quire.hf.cache_formats import CacheFormats
from quire.hf.file_header import BadHeaderError, CacheDescription, FileHeader, FileTensor
from quire.hf.layers import RowLayer
from quire.hf.state_layers import STATES, BoundStates
from quire.hf.stored_shape import StoredShape
from quire.spec.state_spec import state_specs

__all__ = ["FileCache", "FileLayer", "RowPart", "check_layers", "offset_name", "row_parts", "state_name"]

_MOST_ROWS = 1 << 20
_AUTOCAST = frozenset(
    {torch.bfloat16, torch.float16}
)  # dtypes that a float32 model may store under torch.autocast


class RowPart(NamedTuple):
    """One tensor of a layer's rows: of K (0) or of V (1), the numbers or codes, or the scales."""

    which: int
    is_scale: bool

    def tensor(self, shape: StoredShape, num_tokens: int) -> FileTensor:
        """The tensor of `num_tokens` tokens in each row."""
        token = torch.zeros(shape.token_bytes(self.which), dtype=torch.uint8)
        part = shape.part(token, self.which, is_scale=self.is_scale)
        return FileTensor(part.dtype, (shape.num_rows, num_tokens, *part.shape[1:]))


@dataclass(frozen=True)
class FileLayer:
    """shape, first: of the rows, which hold the positions from `first` on; None if the layer has none. states: by name
    of `STATES` and number."""

    shape: StoredShape | None = None
    first: int = 0
    states: Mapping[tuple[str, int], FileTensor] = field(default_factory=dict)

    @property
    def state_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.states.values())


class FileCache(Protocol):
    """The members of a `QuireCache` that saving and loading use; it describes them."""

    layers: list[Any]
    config: Any
    backend: Device
    formats: CacheFormats

    def open_all(self, shapes: dict[int, StoredShape]) -> None: ...
    def prepare_for(self, positions: dict[int, tuple[int, int]]) -> None: ...
    def config_shapes(self, num_rows: int, dtype: torch.dtype) -> dict[int, StoredShape]: ...
    def reset(self) -> None: ...


def row_parts(layer: int, shape: StoredShape) -> dict[str, RowPart]:
    """The tensors of a layer's rows, by name."""
    kinds = (False, True) if shape.is_coded else (False,)
    return {
        f"layers.{layer}.{'kv'[which]}{'_scale' if is_scale else ''}": RowPart(which, is_scale)
        for which in (0, 1)
        for is_scale in kinds
    }


def offset_name(layer: int) -> str:
    return f"layers.{layer}.k_offset"


def state_name(layer: int, name: str, number: int) -> str:
    return f"layers.{layer}.{name}.{number}"


def check_layers(header: FileHeader, cache: FileCache, dtypes: frozenset[torch.dtype]) -> list[FileLayer]:
    """The contents of each layer of `cache`, which is empty and has the file's formats.

    dtypes: floating point dtypes of the model's weights. *raises:* BadHeaderError: they do not fit.
    """
    shapes = cache.config_shapes(1, torch.float32)
    remaining = dict(header.tensors)
    layers: list[FileLayer] = []
    for index, layer in enumerate(cache.layers):
        shape, first = None, 0
        if isinstance(layer, RowLayer) and {f"layers.{index}.k", f"layers.{index}.v"} <= remaining.keys():
            shape, first = _take_rows(remaining, header.description, layer, shapes.get(index), dtypes)
        states = _take_states(remaining, layer, dtypes) if isinstance(layer, BoundStates) else {}
        layers.append(FileLayer(shape, first, states))
    if remaining:
        raise BadHeaderError(
            f"expected tensors of the {len(layers)} layers of this model's cache, got others: "
            f"{', '.join(repr(name[:60]) for name in list(remaining)[:3])}"
        )
    missing = [index for index in shapes if layers[index].shape is None]
    if missing and any(entry.shape for entry in layers):
        raise BadHeaderError(f"expected keys and values in every layer, got none in layers {missing}")
    sizes = [
        (name, tensor.shape[0]) for name, tensor in header.tensors.items() if not name.endswith(".k_offset")
    ]
    for name, num_rows in sizes:
        if num_rows != sizes[0][1]:
            raise BadHeaderError(f"expected {sizes[0][1]} rows in every layer, got {num_rows} - in {name}")
    if header.description.num_tokens or any(entry.states for entry in layers):
        for index, layer in enumerate(cache.layers):
            if isinstance(layer, BoundStates) and not layers[index].states:
                raise BadHeaderError(f"expected states in every state layer, got none in layers.{index}")
    _check_state_sizes(layers, cache.config)
    return layers


def _take_rows(
    remaining: dict[str, FileTensor],
    description: CacheDescription,
    layer: RowLayer,
    config_shape: StoredShape | None,
    dtypes: frozenset[torch.dtype],
) -> tuple[StoredShape, int]:
    """The shape of the layer's rows and their first position. Removes their tensors from `remaining`."""
    where = f"layers.{layer.index}"
    k, v = remaining[f"{where}.k"], remaining[f"{where}.v"]
    if len(k.shape) != 4 or len(v.shape) != 4 or k.shape[:2] != v.shape[:2] or 0 in k.shape[2:] + v.shape[2:]:
        raise BadHeaderError(f"expected k and v [rows, tokens, heads, width], got {k} and {v} - in {where}")
    num_rows, num_tokens, length = *k.shape[:2], description.num_tokens
    if not 1 <= num_rows <= _MOST_ROWS:
        raise BadHeaderError(f"expected 1 to {_MOST_ROWS} rows, got {num_rows} - in {where}")
    visible = min(length, layer.window - 1) if layer.window else length
    if not visible <= num_tokens <= length:
        raise BadHeaderError(f"expected {visible} to {length} tokens, got {num_tokens} - in {where}")
    shape = StoredShape(num_rows, (k.shape[2], v.shape[2]), (k.shape[3], v.shape[3]), k.dtype)
    if config_shape is not None and config_shape.is_coded:
        if (name := description.coded_dtypes.get(str(layer.index))) is None:
            raise BadHeaderError(
                f"expected coded_dtypes with the dtype of every layer in codes, got none of {where}"
            )
        shape = replace(config_shape, num_rows=num_rows, dtype=getattr(torch, name))
    elif (
        config_shape is not None
        and layer.index not in description.own_shapes
        and (shape.num_heads, shape.widths) != (config_shape.num_heads, config_shape.widths)
    ):
        raise BadHeaderError(
            f"expected heads {config_shape.num_heads} of widths {config_shape.widths}, got {shape.num_heads} of "
            f"{shape.widths} - in {where}"
        )
    if dtypes and shape.dtype not in dtypes | (_AUTOCAST if torch.float32 in dtypes else frozenset()):
        names = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise BadHeaderError(f"expected {names}, got {shape.dtype} - in {where}")
    expected = {name: part.tensor(shape, num_tokens) for name, part in row_parts(layer.index, shape).items()}
    if shape.formats[0] and length and (offset := offset_name(layer.index)) in remaining:
        expected[offset] = FileTensor(torch.float32, (shape.num_heads[0], shape.widths[0]))
    for name, tensor in expected.items():
        if (got := remaining.pop(name, None)) != tensor:
            raise BadHeaderError(f"expected {tensor}, got {got or 'none'} - in {name}")
    return shape, length - num_tokens


def _take_states(
    remaining: dict[str, FileTensor], layer: BoundStates, dtypes: frozenset[torch.dtype]
) -> dict[tuple[str, int], FileTensor]:
    """The layer's states. Removes their tensors from `remaining`."""
    states: dict[tuple[str, int], FileTensor] = {}
    most_bytes = max(4, *(dtype.itemsize for dtype in dtypes)) if dtypes else 8  # models have none wider
    for name in STATES:
        for number in range(layer.number_of_states):
            tensor = remaining.pop(where := state_name(layer.index, name, number), None)
            if tensor is None:
                continue
            if len(tensor.shape) < 2 or 0 in tensor.shape:
                raise BadHeaderError(f"expected a state [rows, ...], got {tensor} - in {where}")
            if not tensor.dtype.is_floating_point or tensor.dtype.itemsize > most_bytes:
                raise BadHeaderError(
                    f"expected floating point numbers of at most {most_bytes} bytes, got {tensor} - in {where}"
                )
            states[name, number] = tensor
    return states


def _check_state_sizes(layers: list[FileLayer], config: Any) -> None:
    """Compare the channels of convolutions, and the numbers of recurrent states, with the config's."""
    try:
        specs = state_specs(config)
    except UnsupportedModelError:
        return
    for spec in specs:
        shapes = {item.name: item.shape for item in spec.fields}
        if not shapes.keys() <= {"convolution", "recurrent"} or spec.layer >= len(layers):
            continue
        channels = shapes["convolution"][1] if "convolution" in shapes else 0
        numbers = math.prod(shapes["recurrent"]) if "recurrent" in shapes else 0
        for state, expected, last in (("conv_states", channels, -1), ("recurrent_states", numbers, None)):
            tensors = [tensor for (name, _), tensor in layers[spec.layer].states.items() if name == state]
            got = sum(math.prod(tensor.shape[1:last]) for tensor in tensors)
            if tensors and got != expected:
                raise BadHeaderError(
                    f"expected {expected} {state} for each row, got {got} - in layers.{spec.layer}"
                )
