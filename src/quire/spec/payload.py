"""The layout of tokens' bytes in a payload: the one form in which keys and values leave the pool.

Swapped out sequences, tiers, snapshots' segments and peers have payloads. A payload does not depend on the storage,
block size or layout that the tokens came from. A payload of T tokens consists of

    for each layer that stores KV, in the order of layers
        for each of its KV heads
            the keys [T, k_head_dim], then the values [T, v_head_dim], little endian; for a latent layer, whose values
            are a part of its keys, the keys alone; for a layer of another format its stored rows

Some groups may start later (`origins`, a token for each group): their layers have that many tokens less. Not the
copying (`memory.block_bytes`), nor the header by which a payload is verified (`tiers.segment`).

Cost: O(layers) a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from quire.spec.kv_spec import KVSpec

__all__ = ["PayloadLayout", "StoredLayer"]


class StoredLayer(NamedTuple):
    """A layer that stores KV. number: in the model. group: of its block table. stored_v_dim, row_elements: as in
    `LayerSpec`. formats: of K and V."""

    number: int
    group: int
    num_kv_heads: int
    k_head_dim: int
    stored_v_dim: int
    row_elements: tuple[int, ...]
    formats: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class PayloadLayout:
    """The layout shared by all payloads of one model. dtype: format of rows, by `KVSpec.kv_dtype`. dtype_bytes: of an
    element, the unit of rows. element: its dtype, which rows without a format have."""

    dtype: str
    dtype_bytes: int
    layers: tuple[StoredLayer, ...]
    element: str = ""

    @classmethod
    def from_spec(cls, spec: KVSpec) -> PayloadLayout:
        group_of = {layer: group.index for group in spec.groups for layer in group.layers}
        layers = (
            StoredLayer(
                *(number, group_of[number], layer.num_kv_heads, layer.k_head_dim, layer.stored_v_dim),
                layer.row_elements(spec.dtype_bytes),
                (layer.k_format, layer.v_format),
            )
            for number, layer in enumerate(spec.layers)
            if layer.stores_kv
        )
        return cls(spec.kv_dtype, spec.dtype_bytes, tuple(layers), spec.dtype)

    @cached_property
    def shapes(self) -> list[list[int | str]]:
        """(num_kv_heads, k_head_dim, stored_v_dim) of each layer, and its formats if they differ from the dtype: the
        identity of the model."""
        return [
            [
                layer.num_kv_heads,
                layer.k_head_dim,
                layer.stored_v_dim,
                *(layer.formats if any(layer.formats) else ()),
            ]
            for layer in self.layers
        ]

    @cached_property
    def layer_bytes(self) -> tuple[int, ...]:
        """Bytes of a token in each layer."""
        return tuple(layer.num_kv_heads * sum(layer.row_elements) * self.dtype_bytes for layer in self.layers)

    @cached_property
    def bytes_per_token(self) -> int:
        return sum(self.layer_bytes)

    def num_bytes(self, num_tokens: int, origins: Sequence[int] | None = None) -> int:
        """Bytes of a payload of so many tokens; an origin after them counts as their end."""
        if origins is None:
            return num_tokens * self.bytes_per_token
        return sum(
            max(0, num_tokens - origins[layer.group]) * size
            for layer, size in zip(self.layers, self.layer_bytes, strict=True)
        )

    def num_tokens(self, num_bytes: int, origins: Sequence[int]) -> int | None:
        """Tokens of a payload of so many bytes; None if no payload has this size."""
        lacking = sum(
            origins[layer.group] * size for layer, size in zip(self.layers, self.layer_bytes, strict=True)
        )
        count, rest = divmod(num_bytes + lacking, self.bytes_per_token)
        return None if rest or max(origins) > count else count

    def layer_starts(self, num_tokens: int, origins: Sequence[int]) -> dict[int, int]:
        """The byte at which each layer begins, by its number."""
        starts: dict[int, int] = {}
        start = 0
        for layer, size in zip(self.layers, self.layer_bytes, strict=True):
            starts[layer.number] = start
            start += (num_tokens - origins[layer.group]) * size
        return starts

    def differences(self, payload: np.ndarray, other: np.ndarray) -> list[tuple[int, int]]:
        """(number, first differing token) of each layer in which two payloads of the same tokens differ, in order.

        payload, other: uint8 of equal size, dense. O(bytes).
        """
        if np.array_equal(payload, other):
            return []
        num_tokens = payload.nbytes // self.bytes_per_token
        found: dict[int, int] = {}
        for layer, rows in self.rows(num_tokens):
            differs = (payload[rows] != other[rows]).reshape(num_tokens, -1).any(axis=1)
            if differs.any():
                found[layer] = min(found.get(layer, num_tokens), int(differs.argmax()))
        return list(found.items())

    def rows(self, num_tokens: int) -> Iterator[tuple[int, slice]]:
        """In order: a layer's number, and the slice of one of its heads' keys, or values: [tokens, width]."""
        start = 0
        for layer in self.layers:
            for dim in layer.row_elements * layer.num_kv_heads:
                if not dim:
                    continue
                stop = start + num_tokens * dim * self.dtype_bytes
                yield layer.number, slice(start, stop)
                start = stop
