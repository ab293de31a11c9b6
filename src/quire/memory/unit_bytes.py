"""The bytes of units as one payload: read out of a storage and written into it, whatever its layout and block size.

A payload holds T tokens of a sequence in the canonical layout: for each layer that stores KV, in the order of layers,
and for each of its KV heads the keys [T, k_head_dim], then the values [T, v_head_dim]: that of `quire.tiers.segment`.
A storage says where its blocks lie (`UnitPlaces`); the rest is the same for all. A payload may begin later in some
groups (`origins`, a token for each): the layers of such a group have T less so many tokens in it.

Invariants
    B1  only the bytes of the tokens asked for are read or written: a call for units that one alone may touch may run
        beside anything else, in any thread, and lets go of Python's lock while it copies.

Cost: one copy, by the native core at about the speed of memcpy; about 50 us of arithmetic beside it. Without the core
one call of ctypes for each run of bytes that is adjacent on both sides.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from quire.backends import native_module
from quire.errors import ArgumentError
from quire.spec import KVGroup, KVSpec

__all__ = ["UnitPlaces", "UnitStorage", "read_units", "write_units"]


@dataclass(frozen=True, eq=False)
class UnitPlaces:
    """Where blocks of a group lie, bytes. Keys and values apart: index 0 and 1 of each.

    addresses: int64 [2, layers of the group, blocks], of token 0 of head 0. head_strides, token_strides.
    """

    addresses: np.ndarray
    head_strides: tuple[int, int]
    token_strides: tuple[int, int]


class UnitStorage(Protocol):
    """What these functions ask of a storage."""

    spec: KVSpec
    block_size: int
    num_blocks: int
    dtype: Any

    def unit_places(self, group: KVGroup, units: np.ndarray) -> UnitPlaces:
        """Of int64 [blocks], all of them used by a plan that was prepared or settled."""
        ...

    def settle(self, plan: Any) -> None:
        """Have memory behind the units of a plan, and its copies done, for somebody who writes their bytes himself.

        As `prepare`, but without tables, and without taking a place that only running sequences have.
        """
        ...

    def commit_ahead(self, first: int, stop: int) -> bool:
        """Have memory behind units `first` .. `stop` before anything is written there; from any thread. Whether it was
        done."""
        ...


def read_units(
    storage: UnitStorage,
    units: Any,
    num_tokens: int,
    *,
    first: int = 0,
    origins: Sequence[int] | None = None,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """The payload of tokens 0 .. `num_tokens`, uint8; of them those from `first` on are read.

    units: int [groups, blocks], the unit of each block of each group; block 0 holds token 0. What lies in blocks
    whose unit is -1, and before `first`, is left as it is (zeros in a new payload). origins: where the payload begins
    in each group, 0 .. num_tokens; what lies before is not in it. out: a payload to fill.
    """
    if out is None:
        origins = _checked(storage, origins)
        per_token = _group_bytes(storage)
        num_bytes = sum(max(0, num_tokens - at) * own for at, own in zip(origins, per_token, strict=True))
        whole = first == 0 and not any(origins) and (np.asarray(units) >= 0).all()
        out = np.empty(num_bytes, np.uint8) if whole else np.zeros(num_bytes, np.uint8)
    _copy(storage, units, out, num_tokens, first, origins, to_storage=False)
    return out


def write_units(
    storage: UnitStorage,
    units: Any,
    payload: np.ndarray,
    num_tokens: int,
    *,
    first: int = 0,
    origins: Sequence[int] | None = None,
) -> None:
    """Writes tokens `first` .. `num_tokens` of a payload of that many tokens, or of more, into units; see `read_units`.

    How many tokens a payload has follows from its length; those behind `num_tokens` are not written, nor are those of
    a group before its origin.
    """
    _copy(storage, units, payload, num_tokens, first, origins, to_storage=True)


def _copy(
    storage: UnitStorage,
    units: Any,
    payload: np.ndarray,
    num_tokens: int,
    first: int,
    origins: Sequence[int] | None,
    *,
    to_storage: bool,
) -> None:
    units = np.asarray(units, np.int64)
    origins = _checked(storage, origins)
    group_bytes = _group_bytes(storage)
    per_token = sum(group_bytes)
    # As if it had all tokens in all groups.
    num_bytes = payload.nbytes + sum(at * own for at, own in zip(origins, group_bytes, strict=True))
    total = num_bytes // per_token
    if payload.dtype != np.uint8 or not payload.flags.c_contiguous or num_bytes != total * per_token:
        raise ArgumentError(
            f"expected a dense payload of uint8, {per_token} for each token, "
            f"got {payload.nbytes} bytes of {payload.dtype}"
        )
    if not 0 <= first <= num_tokens <= total or max(origins) > total:
        raise ArgumentError(
            f"expected tokens {first} .. {num_tokens} within a payload of {total}, which begins at {list(origins)}"
        )
    size = storage.block_size
    blocks = np.arange(first // size, -(-num_tokens // size))
    if units.ndim != 2 or len(units) != len(storage.spec.groups) or units.shape[1] < -(-num_tokens // size):
        raise ArgumentError(
            f"expected units [{len(storage.spec.groups)}, {-(-num_tokens // size)}] for {num_tokens} tokens in blocks "
            f"of {size}, got {units.shape}"
        )
    if units.size and not (units.min() >= -1 and units.max() < storage.num_blocks):
        raise ArgumentError(
            f"expected units of -1 to {storage.num_blocks - 1}, got {units.min()} to {units.max()}"
        )
    if first == num_tokens:
        return
    before = _bytes_before(storage.spec, storage.dtype.itemsize, total, origins)
    parts: list[np.ndarray] = []
    for group in storage.spec.groups:
        origin = origins[group.index]
        kept = blocks[(units[group.index, blocks] >= 0) & ((blocks + 1) * size > origin)]
        if len(kept):
            starts, stops = (
                np.maximum(kept * size, max(first, origin)),
                np.minimum((kept + 1) * size, num_tokens),
            )
            places = storage.unit_places(group, units[group.index, kept])
            parts += _pieces(
                storage, group, places, kept * size, starts, stops, origin, total - origin, before
            )
    if parts:
        _copy_rows(payload, np.concatenate(parts), to_storage)


def _pieces(
    storage: UnitStorage,
    group: KVGroup,
    places: UnitPlaces,
    block_starts: np.ndarray,
    starts: np.ndarray,
    stops: np.ndarray,
    origin: int,
    count: int,
    before: dict[int, int],
) -> list[np.ndarray]:
    """int64 [n, 5] for keys and for values: see `_native.copy_rows`. starts, stops: tokens of each block. The payload
    has `count` tokens of the group from `origin` on; before: where each layer begins in it."""
    itemsize = storage.dtype.itemsize
    heads = np.arange(group.num_kv_heads)
    head_bytes = (group.k_head_dim + group.v_head_dim) * itemsize
    layers = np.array([before[layer] for layer in group.layers])[:, None, None]
    parts: list[np.ndarray] = []
    for kind, dim in enumerate((group.k_head_dim, group.v_head_dim)):
        row_bytes, stride = dim * itemsize, places.token_strides[kind]
        own = group.k_head_dim * itemsize * kind  # values lie behind the keys of their head
        pieces = np.empty((len(group.layers), len(heads), len(starts), 5), np.int64)
        pieces[..., 0] = layers + count * (heads[:, None] * head_bytes + own) + (starts - origin) * row_bytes
        pieces[..., 1] = (
            places.addresses[kind][:, None]
            + heads[:, None] * places.head_strides[kind]
            + (starts - block_starts) * stride
        )
        num_rows = stops - starts
        if stride == row_bytes:
            pieces[..., 2], pieces[..., 3] = 1, num_rows * row_bytes
        else:
            pieces[..., 2], pieces[..., 3] = num_rows, row_bytes
        pieces[..., 4] = stride
        parts.append(pieces.reshape(-1, 5))
    return parts


def _copy_rows(payload: np.ndarray, pieces: np.ndarray, to_storage: bool) -> None:
    native = native_module()
    if native is not None:
        native.copy_rows(payload.ctypes.data, pieces, to_storage)
        return
    base = payload.ctypes.data
    for offset, address, num_rows, row_bytes, stride in pieces.tolist():
        for row in range(num_rows):
            ours, theirs = base + offset + row * row_bytes, address + row * stride
            ctypes.memmove(theirs if to_storage else ours, ours if to_storage else theirs, row_bytes)


def _checked(storage: UnitStorage, origins: Sequence[int] | None) -> Sequence[int]:
    num_groups = len(storage.spec.groups)
    if origins is None:
        return (0,) * num_groups
    if len(origins) != num_groups or min(origins) < 0:
        raise ArgumentError(f"expected {num_groups} origins of at least 0, got {list(origins)}")
    return origins


def _group_bytes(storage: UnitStorage) -> list[int]:
    """Bytes of a token in each group."""
    spec = storage.spec
    return [group.bytes_per_token // spec.dtype_bytes * storage.dtype.itemsize for group in spec.groups]


def _bytes_before(spec: KVSpec, itemsize: int, total: int, origins: Sequence[int]) -> dict[int, int]:
    """Where each layer that stores KV begins in a payload."""
    origin_of = {layer: origins[group.index] for group in spec.groups for layer in group.layers}
    found: dict[int, int] = {}
    num_bytes = 0
    for index, layer in enumerate(spec.layers):
        if layer.shares_kv_with is None:
            found[index] = num_bytes
            num_bytes += layer.elements_per_token * itemsize * (total - origin_of[index])
    return found
