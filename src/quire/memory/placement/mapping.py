"""Changes of the blocks at positions of address ranges: extents, the count of mappings, and undoing a failed change.

Not an owner: it counts no references and commits no memory. `placement_heap` calls it with committed blocks.

An *extent* is a run of positions that lead to a run of neighbours in a file, or to no block: one call to the machine,
and one mapping of the operating system.

Invariants
    M1  a range's `num_mappings` is 1 and the number of places in its layer buffers where two extents meet: never fewer
        than the machine has, because the machine may merge mappings of different layer buffers too.
    M2  a change that fails leaves entries, counts and mappings as before.
    M3  positions that lead to all blocks of a huge page, in its order and from an address on that is a multiple of its
        size, were mapped by one call, so that one page table entry translates them. The call that completes the page
        maps all of it.

Cost: one call to the machine for each extent and layer buffer that differ; numpy over the positions given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

from quire.errors import BackendError, CapacityError
from quire.memory.placement.address_range import AddressRange
from quire.memory.placement.heap_files import HeapFiles, with_capacity_error

__all__ = ["Change", "change", "num_edges"]

_ATTEMPTS = 4  # of an undo: a call that failed may succeed the next time

# A range, positions of it (distinct integers) and the block for each of them, -1 for none.
Change: TypeAlias = tuple[AddressRange, Any, Any]


def change(files: HeapFiles, changes: list[Change], *, populate: bool = True) -> list[np.ndarray]:
    """Lead positions (ascending) to blocks. Returns the blocks they led to before, -1 for none. `populate` as in `map`.

    *raises:* CapacityError: the machine refuses, or the budget is exceeded (unmapping is always allowed).
    """
    budget = files.backend.budget
    old: list[np.ndarray] = []
    growth: list[int] = []
    for address_range, positions, block_ids in changes:
        edges = np.union1d(positions, positions + 1)
        before = num_edges(files, address_range, edges)
        old.append(address_range.entries[positions + 1] - 1)
        address_range.entries[positions + 1] = block_ids + 1
        growth.append(num_edges(files, address_range, edges) - before)
    done: list[tuple[AddressRange, int, int, int]] = []  # layer buffer, and [start, stop) of positions
    try:
        if any((block_ids >= 0).any() for _, _, block_ids in changes):
            budget.check(sum(growth))
        for number, (address_range, positions, block_ids) in enumerate(changes):
            moved = np.flatnonzero(old[number] != block_ids)
            extents: dict[bool, list[tuple[int, int, int]]] = {}  # by whether the layer buffer merges
            for layer_buffer, size in enumerate(address_range.piece_bytes):
                merging = _merges(files, layer_buffer, size)
                if merging not in extents:
                    extents[merging] = [
                        (int(positions[moved[start]]), int(block_ids[moved[start]]), stop - start)
                        for start, stop in _extents(
                            files, positions[moved], block_ids[moved], merging=merging
                        )
                    ]
                for position, block_id, count in extents[merging] if size else []:
                    whole = _whole_pages(files, address_range, layer_buffer, position, block_id, count)
                    done.append((address_range, layer_buffer, whole[0], whole[0] + whole[2]))
                    with_capacity_error(_map_extent, files, address_range, layer_buffer, *whole, populate)
    except BaseException:
        for (address_range, positions, _), before in zip(reversed(changes), reversed(old), strict=True):
            address_range.entries[positions + 1] = before + 1
        for address_range, layer_buffer, start, stop in reversed(done):
            _restore(files, address_range, layer_buffer, start, stop)
        raise
    for (address_range, _, _), more in zip(changes, growth, strict=True):
        address_range.num_mappings += more
        budget.add(more)
    return old


def num_edges(files: HeapFiles, address_range: AddressRange, edges: np.ndarray) -> int:
    """How many of these edges (edge e is before position e) separate two extents, summed over all layer buffers."""
    left, right = address_range.entries[edges] - 1, address_range.entries[edges + 1] - 1
    num_layer_buffers = {True: 0, False: 0}  # by whether neighbours merge
    for layer_buffer, size in enumerate(address_range.piece_bytes):
        if size:
            num_layer_buffers[_merges(files, layer_buffer, size)] += 1
    return sum(
        layer_buffers * int(np.count_nonzero(~_joined(files, left, right, merging=merging)))
        for merging, layer_buffers in num_layer_buffers.items()
        if layer_buffers
    )


def _joined(files: HeapFiles, left: np.ndarray, right: np.ndarray, *, merging: bool) -> np.ndarray:
    """Whether neighbouring positions that lead to these blocks belong to one extent."""
    joined = (left < 0) & (right < 0)
    if merging:
        joined |= (left >= 0) & files.adjacent(left, right)
    return joined


def _merges(files: HeapFiles, layer_buffer: int, size: int) -> bool:
    """Whether a layer buffer's neighbours are adjacent in the file: only if the range maps all of each piece."""
    return files.backend.merges and size == files.piece_bytes[layer_buffer]


def _extents(
    files: HeapFiles, positions: np.ndarray, block_ids: np.ndarray, *, merging: bool
) -> Iterator[tuple[int, int]]:
    """Cut [0, len) into runs that one call to the machine maps."""
    if not len(positions):
        return
    joined = np.diff(positions) == 1
    joined &= _joined(files, block_ids[:-1], block_ids[1:], merging=merging)
    if not files.backend.merges:
        joined[:] = False
    cuts = (np.flatnonzero(~joined) + 1).tolist()
    yield from zip([0, *cuts], [*cuts, len(positions)], strict=True)


def _map_extent(
    files: HeapFiles,
    address_range: AddressRange,
    layer_buffer: int,
    position: int,
    block_id: int,
    count: int,
    populate: bool,
) -> None:
    """Map one extent: positions from `position` on to neighbours from `block_id` on, or unmap it if that is -1."""
    size = address_range.piece_bytes[layer_buffer]
    address = address_range.address + address_range.offsets[layer_buffer] + position * size
    if block_id < 0:
        files.backend.unmap(address, count * size)
    else:
        files.backend.map(address, count * size, *files.place(block_id, layer_buffer), populate=populate)


def _whole_pages(
    files: HeapFiles, address_range: AddressRange, layer_buffer: int, position: int, block_id: int, count: int
) -> tuple[int, int, int]:
    """The extent (position, block, number), extended to the whole of the huge pages that it completes (M3)."""
    each = files.frame_blocks[layer_buffer]
    if (
        block_id < 0
        or not each
        or (position - block_id) % each
        or address_range.piece_bytes[layer_buffer] != files.piece_bytes[layer_buffer]
    ):
        return position, block_id, count
    stop = position + count
    first, last = position // each * each, -(-stop // each) * each
    if first < position and not _is_completed(
        files, address_range, layer_buffer, first, block_id - position + first
    ):
        first = position
    if last > stop and not _is_completed(
        files, address_range, layer_buffer, last - each, block_id - position + last - each
    ):
        last = stop
    return first, block_id - position + first, last - first


def _is_completed(
    files: HeapFiles, address_range: AddressRange, layer_buffer: int, position: int, block_id: int
) -> bool:
    """Whether `block_id` begins a frame that is a huge page, and positions from `position` on lead to all of it."""
    each = files.frame_blocks[layer_buffer]
    if not files.is_huge[layer_buffer][block_id // each] or position + each > address_range.num_positions:
        return False
    entries = address_range.entries[position + 1 : position + 1 + each]
    # Its ends first: they usually decide, as a growing sequence has no block at the last position yet.
    return bool(
        entries[0] == block_id + 1 and entries[-1] == block_id + each and (np.diff(entries) == 1).all()
    )


def _restore(files: HeapFiles, address_range: AddressRange, layer_buffer: int, start: int, stop: int) -> None:
    """Lead positions [start, stop) where the entries say again. If the machine refuses every attempt, its mapping
    stays: a failed call has kept the old one (B1)."""
    merging = _merges(files, layer_buffer, address_range.piece_bytes[layer_buffer])
    block_ids = address_range.block_ids(start, stop)
    for first, last in _extents(files, np.arange(start, stop), block_ids, merging=merging):
        extent = start + first, int(block_ids[first]), last - first
        whole = _whole_pages(files, address_range, layer_buffer, *extent)
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(OSError, CapacityError, BackendError):
                _map_extent(files, address_range, layer_buffer, *whole, True)
                break
