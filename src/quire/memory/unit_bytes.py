"""The bytes of units as one payload: read out of a storage and written into it, whatever its layout and block size.

A payload holds T tokens of a sequence in the canonical layout: for each layer that stores KV, in the order of layers,
and for each of its KV heads the keys [T, k_head_dim], then the values [T, v_head_dim]: that of `quire.tiers.segment`.
A storage says where its blocks lie (`UnitPlaces`); the rest is the same for all. A payload may begin later in some
groups (`origins`, a token for each): the layers of such a group have T less so many tokens in it.

Invariants
    B1  only the bytes of the tokens asked for are read or written: a call for units that one alone may touch may run
        beside anything else, in any thread, and lets go of Python's lock while it copies.

Cost: one copy, by the native core at about the speed of memcpy; about 80 us of arithmetic beside it (28 layers).
Without the core one call of ctypes for each run of bytes that is adjacent on both sides.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from quire.backends import native_module
from quire.errors import ArgumentError
from quire.memory.unit_pieces import UnitPieces, UnitPlaces
from quire.spec import KVGroup, KVSpec

__all__ = ["UnitStorage", "read_units", "write_units"]


class UnitStorage(Protocol):
    """What these functions ask of a storage."""

    spec: KVSpec
    unit_pieces: UnitPieces
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
            table = storage.unit_pieces.of(group, places, total, origins, kept * size, starts, stops)
            parts.append(table)
    if parts:
        _copy_rows(payload, parts[0] if len(parts) == 1 else np.concatenate(parts), to_storage)


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
