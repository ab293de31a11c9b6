"""Where the bytes of tokens lie in a payload: the one form in which keys and values leave the pool.

Swapped out sequences, tiers, snapshots' segments and peers hold payloads. A payload is the same whatever storage,
block size or layout the tokens came from. One of T tokens holds

    for each layer that stores KV, in the order of layers
        for each of its KV heads
            the keys [T, k_head_dim], then the values [T, v_head_dim], little endian; of a latent layer, whose values
            are a part of its keys, the keys alone; of a layer of another format the rows as they are stored

It may begin later in some groups (`origins`, a token for each group): layers of such a group have T less so many tokens
in it. Not the copying: `memory.block_bytes` does that. Not what is needed to trust a payload: `tiers.segment` writes
that before it.

Cost: O(layers) a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from quire.spec.kv_spec import KVSpec

__all__ = ["PayloadLayout", "StoredLayer"]


class StoredLayer(NamedTuple):
    """A layer that stores KV. number: of the model's layers. group: whose block table it has. stored_v_dim: see
    `LayerSpec`. row_elements: see there too. formats: of K and V."""

    number: int
    group: int
    num_kv_heads: int
    k_head_dim: int
    stored_v_dim: int
    row_elements: tuple[int, ...]
    formats: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class PayloadLayout:
    """What the payloads of one model have in common. dtype: what rows are stored in, as `KVSpec.kv_dtype` has it.
    dtype_bytes: of an element that rows are counted in. element: its dtype, in which rows are that have no format."""

    dtype: str
    dtype_bytes: int
    layers: tuple[StoredLayer, ...]
    element: str = ""

    @classmethod
    def of(cls, spec: KVSpec) -> PayloadLayout:
        group_of = {layer: group.index for group in spec.groups for layer in group.layers}
        layers = (
            StoredLayer(
                *(number, group_of[number], one.num_kv_heads, one.k_head_dim, one.stored_v_dim),
                one.row_elements(spec.dtype_bytes),
                (one.k_format, one.v_format),
            )
            for number, one in enumerate(spec.layers)
            if one.stores_kv
        )
        return cls(spec.kv_dtype, spec.dtype_bytes, tuple(layers), spec.dtype)

    @cached_property
    def shapes(self) -> list[list[int | str]]:
        """(num_kv_heads, k_head_dim, stored_v_dim) of each layer, and its formats where it has others than the dtype:
        what tells models apart."""
        return [
            [one.num_kv_heads, one.k_head_dim, one.stored_v_dim, *(one.formats if any(one.formats) else ())]
            for one in self.layers
        ]

    @cached_property
    def layer_bytes(self) -> tuple[int, ...]:
        """Bytes of a token in each layer."""
        return tuple(one.num_kv_heads * sum(one.row_elements) * self.dtype_bytes for one in self.layers)

    @cached_property
    def bytes_per_token(self) -> int:
        return sum(self.layer_bytes)

    def num_bytes(self, num_tokens: int, origins: Sequence[int] | None = None) -> int:
        """Of a payload of so many tokens; an origin behind them is as if it were at their end."""
        if origins is None:
            return num_tokens * self.bytes_per_token
        return sum(
            max(0, num_tokens - origins[one.group]) * size
            for one, size in zip(self.layers, self.layer_bytes, strict=True)
        )

    def num_tokens(self, num_bytes: int, origins: Sequence[int]) -> int | None:
        """Of a payload of so many bytes; None where no payload has so many."""
        lacking = sum(
            origins[one.group] * size for one, size in zip(self.layers, self.layer_bytes, strict=True)
        )
        count, rest = divmod(num_bytes + lacking, self.bytes_per_token)
        return None if rest or max(origins) > count else count

    def layer_starts(self, num_tokens: int, origins: Sequence[int]) -> dict[int, int]:
        """By its number, the byte at which each layer begins."""
        found: dict[int, int] = {}
        start = 0
        for one, size in zip(self.layers, self.layer_bytes, strict=True):
            found[one.number] = start
            start += (num_tokens - origins[one.group]) * size
        return found

    def rows(self, num_tokens: int) -> Iterator[tuple[int, slice]]:
        """In order: a layer's number, and where the keys, or the values, of one of its heads lie: [tokens, width]."""
        start = 0
        for one in self.layers:
            for dim in one.row_elements * one.num_kv_heads:
                if not dim:
                    continue
                stop = start + num_tokens * dim * self.dtype_bytes
                yield one.number, slice(start, stop)
                start = stop
