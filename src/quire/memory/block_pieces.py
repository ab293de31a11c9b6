"""Tables of pieces for `_native.copy_rows`: where the rows of blocks and the rows of a payload lie.

Segments resemble each other: most tables differ only in the addresses of their blocks. So the part that follows from
the payload's shape is computed once for each shape; the latest shapes are cached.

A payload of one block whose layout in the storage equals that in the payload is one piece for each layer.

Cost: about 4 us for a cached shape, 55 us for a new one (28 layers of 8 heads, one block).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.spec import KVGroup, KVSpec
from quire.spec.payload import PayloadLayout

__all__ = ["BlockPieces", "BlockPlaces", "at_places"]

_MAX_TABLES = 64  # shapes; a segment of a model with windows has a few


@dataclass(frozen=True, eq=False)
class BlockPlaces:
    """Where blocks of a group lie, in bytes. Index 0 is for keys, 1 for values; latent layers have keys only.

    addresses: int64 [2 or 1, layers of the group, blocks], of token 0 of head 0. head_strides, token_strides: from one
    head or token to the next. to_values: from the beginning of a block's keys to that of its values, if equal for all
    blocks.
    """

    addresses: np.ndarray
    head_strides: tuple[int, ...]
    token_strides: tuple[int, ...]
    to_values: int | None = None


def at_places(template: np.ndarray, addresses: np.ndarray) -> np.ndarray:
    """int64 [pieces, 5]: the pieces of a template for blocks at these `BlockPlaces.addresses`."""
    pieces = template.copy()
    pieces[..., 1] += addresses[: len(template), :, None, :]
    return pieces.reshape(-1, 5)


class BlockPieces:
    """Makes the tables of pieces of a storage of `spec`. Several threads may use it."""

    def __init__(self, spec: KVSpec) -> None:
        self.layout = PayloadLayout.from_spec(spec)
        self._tables: dict[tuple[object, ...], np.ndarray] = {}

    def pieces(
        self,
        group: KVGroup,
        places: BlockPlaces,
        total: int,
        origins: Sequence[int],
        block_starts: np.ndarray,
        starts: np.ndarray,
        stops: np.ndarray,
    ) -> np.ndarray:
        """int64 [pieces, 5], see `_native.copy_rows`: tokens `starts` to `stops` of blocks beginning at `block_starts`.

        total, origins: of the payload, see `BlockStorage.read_blocks`.
        """
        return at_places(
            self.template(group, places, total, origins, block_starts, starts, stops), places.addresses
        )

    def template(
        self,
        group: KVGroup,
        places: BlockPlaces,
        total: int,
        origins: Sequence[int],
        block_starts: np.ndarray,
        starts: np.ndarray,
        stops: np.ndarray,
    ) -> np.ndarray:
        """The template that `at_places` takes: `pieces` independent of where blocks lie. Read-only."""
        key = (
            group.index, total, tuple(origins), places.head_strides, places.token_strides, places.to_values,
            block_starts.tobytes(), starts.tobytes(), stops.tobytes(),
        )  # fmt: skip
        table = self._tables.get(key)
        if table is None:
            table = self._table(group, places, total, origins, block_starts, starts, stops)
            if len(self._tables) >= _MAX_TABLES:
                self._tables.clear()
            self._tables[key] = table
        return table

    def _table(
        self,
        group: KVGroup,
        places: BlockPlaces,
        total: int,
        origins: Sequence[int],
        block_starts: np.ndarray,
        starts: np.ndarray,
        stops: np.ndarray,
    ) -> np.ndarray:
        """[kinds, layers, heads, blocks, 5], as if token 0 of each block lay at address 0; or [1, layers, 1, 1, 5]."""
        itemsize, origin = self.layout.dtype_bytes, origins[group.index]
        heads = np.arange(group.num_kv_heads)[:, None]
        dims = group.row_elements
        head_bytes = sum(dims) * itemsize
        starts_of = self.layout.layer_starts(total, origins)
        layers = np.array([starts_of[layer] for layer in group.layers])[:, None, None]
        num_held = total - origin
        if (
            len(starts) == 1
            and starts[0] == block_starts[0] == origin
            and stops[0] - starts[0] == num_held
            and places.token_strides == tuple(dim * itemsize for dim in dims)
            and places.head_strides == (num_held * head_bytes,) * len(dims)
            and places.to_values == num_held * sum(dims[:-1]) * itemsize
        ):
            num_bytes = group.num_kv_heads * num_held * head_bytes
            table = np.empty((1, len(group.layers), 1, 1, 5), np.int64)
            table[..., 0] = layers
            table[..., 1:] = 0, 1, num_bytes, num_bytes
            return table
        table = np.empty((len(dims), len(group.layers), len(heads), len(starts), 5), np.int64)
        for kind, dim in enumerate(dims):
            row_bytes, stride = dim * itemsize, places.token_strides[kind]
            own = dims[0] * itemsize * kind  # values lie behind the keys of their head
            pieces = table[kind]
            pieces[..., 0] = (
                layers + (total - origin) * (heads * head_bytes + own) + (starts - origin) * row_bytes
            )
            pieces[..., 1] = heads * places.head_strides[kind] + (starts - block_starts) * stride
            num_rows = stops - starts
            if stride == row_bytes:
                pieces[..., 2], pieces[..., 3] = 1, num_rows * row_bytes
            else:
                pieces[..., 2], pieces[..., 3] = num_rows, row_bytes
            pieces[..., 4] = stride
        return table
