"""The bytes of units as one payload: read out of a storage and written into it, whatever its layout and block size.

A payload holds T tokens of a sequence in the canonical layout: for each layer that stores KV, in the order of layers,
and for each of its KV heads the keys [T, k_head_dim], then the values [T, v_head_dim]: that of `quire.tiers.segment`.
A storage says where its blocks lie (`UnitPlaces`); the rest is the same for all. A payload may begin later in some
groups (`origins`, a token for each): the layers of such a group have T less so many tokens in it.

Invariants
    B1  only the bytes of the tokens asked for are read or written: a call for units that one alone may touch may run
        beside anything else, in any thread, and lets go of Python's lock while it copies.

Cost: one copy, by the native core at about the speed of memcpy; about 40 us of arithmetic beside it (28 layers), which
is several times that between copies that leave nothing of it in a core's caches: `UnitWriter` has less to do.
Without the core one call of ctypes for each run of bytes that is adjacent on both sides.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from quire.backends import native_module
from quire.errors import ArgumentError
from quire.memory.unit_pieces import UnitPieces, UnitPlaces, at_places
from quire.spec import KVGroup, KVSpec

__all__ = ["UnitStorage", "UnitWriter", "read_units", "write_units"]

_MAX_PLACES = 512  # buffers for one payload


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


class UnitWriter:
    """`write_units` again and again into the blocks of one table, as far as it can be computed ahead.

    units: int [groups, blocks], used by a plan that was prepared or settled for as long as there is writing.

    Every other payload is written from its last piece back. Threads that write neighbouring ones into memory that was
    never written before would else take the same pages' faults at the same time, each for a page of its own that
    the system has filled with zeros, all but one for nothing.
    """

    def __init__(self, storage: UnitStorage, units: Any) -> None:
        self._storage = storage
        self._units = np.asarray(units, np.int64)
        self._block_bytes = storage.block_size * sum(_group_bytes(storage))
        self._places: list[UnitPlaces] = []  # of each group; none where some blocks have no unit
        if self._units.size and self._units.min() >= 0 and self._units.max() < storage.num_blocks:
            self._places = [
                storage.unit_places(group, self._units[group.index]) for group in storage.spec.groups
            ]
        self._templates: dict[int, list[np.ndarray]] = {}  # by blocks
        self._in_order: dict[int, tuple[np.ndarray, list[Any]] | None] = {}  # likewise

    def write(
        self, first_block: int, stop_block: int, payload: np.ndarray, num_tokens: int, *, first: int = 0
    ) -> None:
        """Writes tokens `first` .. `num_tokens` of a payload that begins with block `first_block` of the table."""
        count = stop_block - first_block
        is_whole = first == 0 and num_tokens == count * self._storage.block_size and count > 0
        if not (
            is_whole
            and self._places
            and first_block >= 0
            and stop_block <= self._units.shape[1]
            and payload.nbytes == count * self._block_bytes
            and payload.dtype == np.uint8
            and payload.flags.c_contiguous
        ):
            write_units(
                self._storage, self._units[:, first_block:stop_block], payload, num_tokens, first=first
            )
            return
        pieces = self._pieces(first_block, stop_block)
        if first_block // count % 2:
            pieces = np.ascontiguousarray(pieces[::-1])
        _copy_rows(payload, pieces, to_storage=True)

    def places(self, first_block: int, stop_block: int) -> list[Any] | None:
        """Writable buffers that take the payload of these blocks one after the other, without its being copied.

        None where it would be scattered over more than 512 of them. They are the storage's own memory: to be written
        for as long as the units are there.
        """
        if not self._places or not 0 <= first_block < stop_block <= self._units.shape[1]:
            return None
        count = stop_block - first_block
        pieces = self._pieces(first_block, stop_block)
        if count not in self._in_order:
            self._in_order[count] = self._order_of(pieces)
        in_order = self._in_order[count]
        if in_order is None:
            return None
        order, kinds = in_order
        addresses = pieces[order, 1].tolist()
        return [kind.from_address(address) for kind, address in zip(kinds, addresses, strict=True)]

    @staticmethod
    def _order_of(pieces: np.ndarray) -> tuple[np.ndarray, list[Any]] | None:
        """Of pieces that are one row each and not too many, as they follow one another in the payload: which, and the
        type of each one's buffer. Wherever the blocks lie."""
        if len(pieces) > _MAX_PLACES or (pieces[:, 2] != 1).any():
            return None
        order = pieces[:, 0].argsort()
        return order, [ctypes.c_uint8 * num_bytes for num_bytes in pieces[order, 3].tolist()]

    def _pieces(self, first_block: int, stop_block: int) -> np.ndarray:
        """int64 [pieces, 5], see `_native.copy_rows`: of a payload of whole blocks."""
        count = stop_block - first_block
        templates = self._templates.get(count)
        if templates is None:
            templates = self._templates[count] = self._templates_of(count)
        parts = [
            at_places(template, places.addresses[:, :, first_block:stop_block])
            for template, places in zip(templates, self._places, strict=True)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _templates_of(self, count: int) -> list[np.ndarray]:
        size, groups = self._storage.block_size, self._storage.spec.groups
        starts = np.arange(count) * size
        none = (0,) * len(groups)
        return [
            self._storage.unit_pieces.template(
                group, places, count * size, none, starts, starts, starts + size
            )
            for group, places in zip(groups, self._places, strict=True)
        ]


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
    groups = storage.spec.groups
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
    if units.ndim != 2 or len(units) != len(groups) or units.shape[1] < -(-num_tokens // size):
        raise ArgumentError(
            f"expected units [{len(groups)}, {-(-num_tokens // size)}] for {num_tokens} tokens in blocks "
            f"of {size}, got {units.shape}"
        )
    if units.size and not (units.min() >= -1 and units.max() < storage.num_blocks):
        raise ArgumentError(
            f"expected units of -1 to {storage.num_blocks - 1}, got {units.min()} to {units.max()}"
        )
    if first == num_tokens:
        return
    parts: list[np.ndarray] = []
    for group in groups:
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
