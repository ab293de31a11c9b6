"""A pool of reference-counted blocks of memory that are mapped into address ranges; one block may be mapped into
several.

Not a cache: it knows no tokens. `VirtualStorage` and the drop-in cache of `generate()` decide what a block holds.

A *block* has a *piece* in every *layer buffer*: the keys of layer 0, its values, those of layer 1, ... The pieces of a
layer buffer lie side by side in a heap, block after block, so that consecutive blocks at consecutive positions are one
mapping in each layer buffer. A heap holds `blocks_per_heap` blocks: block u is in heap u // blocks_per_heap. The first
use of one of its blocks makes a heap; `trim` frees a heap without used blocks.

    held    taken by `allocate`, `claim` or `hold`: one reference for each time
    mapped  one reference for each position of a range that leads to it
    free    no reference; its memory stays with the heap until `trim`

Invariants
    P1  a block's references are its holds and the positions it is mapped at; a free block is mapped nowhere.
    P2  a call that fails leaves every reference, range and mapping as before; memory that it committed for a free block
        stays until `trim`.
    P3  the mappings counted are never fewer than those the operating system has; no `map` takes them beyond the budget
        (unmapping the middle of a mapping may: it makes two of one).
    P4  blocks and positions that are freed or unmapped with a step go when `complete` is called with that step, not
        before.

Cost: `map` a call to the machine for each run of neighbours and layer buffer; bookkeeping is numpy over the positions
given; `allocate` is O(blocks of all heaps).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from quire.errors import ArgumentError, CapacityError, InvariantError
from quire.memory.placement.address_range import AddressRange
from quire.memory.placement.backend import PlacementBackend
from quire.memory.placement.heap_files import HeapFiles
from quire.memory.placement.mapping import Change, change, num_edges
from quire.memory.placement.memfd import MemfdBackend
from quire.memory.placement.references import References

__all__ = ["DEFAULT_PIECE_BYTES", "PlacementHeap"]

DEFAULT_PIECE_BYTES = 64 << 10
MAX_PIECE_BYTES = 2 << 20
_HEAP_BYTES = 256 << 20  # at least; files are sparse, so a large heap costs nothing
_MAX_HEAPS = 64  # each is an open file and a mapping


class PlacementHeap:
    """Blocks of one piece in each layer buffer.

    piece_bytes: of each layer buffer, a multiple of the machine's page. max_blocks: blocks at most; as many as the
    machine's memory holds if not given. blocks_per_heap: by default enough for a heap of 256 MiB. backend: memory of
    this machine (memfd) if not given.

    *raises:* ArgumentError: a size out of range.
    """

    def __init__(
        self,
        piece_bytes: Sequence[int],
        *,
        max_blocks: int | None = None,
        blocks_per_heap: int | None = None,
        backend: PlacementBackend | None = None,
    ) -> None:
        backend = MemfdBackend() if backend is None else backend
        self.piece_bytes = tuple(piece_bytes)
        check_piece_bytes(self.piece_bytes, backend.page_bytes)
        self.block_bytes = sum(self.piece_bytes)
        if max_blocks is None:
            max_blocks = max(1, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // self.block_bytes)
        if blocks_per_heap is None:
            heap_bytes = max(_HEAP_BYTES, -(-max_blocks * self.block_bytes // _MAX_HEAPS))
            blocks_per_heap = min(max(8, -(-heap_bytes // self.block_bytes)), max_blocks)
            # Whole huge pages in each layer buffer; files are sparse, so unused bytes cost nothing.
            whole = max(
                (backend.huge_bytes // size for size in self.piece_bytes if backend.huge_bytes % size == 0),
                default=1,
            )
            blocks_per_heap = -(-blocks_per_heap // max(whole, 1)) * max(whole, 1)
        elif blocks_per_heap > max_blocks:
            blocks_per_heap = max_blocks
        if max_blocks < 1 or blocks_per_heap < 1:
            raise ArgumentError(
                f"expected at least 1 block and 1 block in a heap, got {max_blocks} and {blocks_per_heap}"
            )
        self.max_blocks = max_blocks
        self.blocks_per_heap = blocks_per_heap
        self._backend = backend
        self._budget = backend.budget
        self._files = HeapFiles(self.piece_bytes, max_blocks, self.blocks_per_heap, backend)
        self._references = References(max_blocks)
        self._ranges: list[AddressRange] = []
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._completed = 0

    @property
    def frame_blocks(self) -> int:
        """Number of blocks, from a multiple of it on at positions from a multiple of it on, that may be a huge page; 1:
        none."""
        return max(1, *self._files.frame_blocks)

    # Address ranges

    def reserve(
        self, num_positions: int, piece_bytes: Sequence[int] | None = None, *, margin_bytes: int = 0
    ) -> AddressRange:
        """Addresses for `num_positions` blocks in a row, nothing mapped; `margin_bytes` more before and behind all.

        piece_bytes: bytes of each layer buffer's piece to map, whole pages, 0 for an unused layer buffer; all of each
        piece if not given.

        *raises:* CapacityError: the address space cannot be reserved.
        """
        page = self._backend.page_bytes
        sizes = self.piece_bytes if piece_bytes is None else tuple(piece_bytes)
        if num_positions < 1 or len(sizes) != len(self.piece_bytes) or not any(sizes):
            raise ArgumentError(
                f"expected at least 1 position and sizes for {len(self.piece_bytes)} layer buffers, got "
                f"{num_positions} and {list(sizes)}"
            )
        for size, full in zip(sizes, self.piece_bytes, strict=True):
            if not 0 <= size <= full or size % page:
                raise ArgumentError(
                    f"expected whole pages of {page} bytes up to {full} for a layer buffer, got {size}"
                )
        self._budget.check(1)
        try:
            alignment = self._files.alignment_for(num_positions, sizes)
            made = AddressRange(self._backend, num_positions, sizes, alignment, margin_bytes)
        except (OSError, OverflowError) as error:
            raise CapacityError(
                f"cannot reserve {num_positions * sum(sizes)} bytes of address space: {error}; ask for fewer or "
                "shorter sequences, or raise the address-space limit (ulimit -v)"
            ) from error
        self._ranges.append(made)
        return made

    def release(self, address_range: AddressRange) -> None:
        """Unmap all of the range. Its addresses live until their last tensor is freed. Twice is harmless."""
        if address_range.open:
            self._require(address_range)
            mapped = np.flatnonzero(address_range.entries) - 1
            self._apply([(address_range, mapped, np.full(len(mapped), -1))])
            self._ranges.remove(address_range)
            address_range.open = False

    # Blocks

    def allocate(self, count: int, after: int = -1) -> np.ndarray:
        """`count` free blocks, held once each: int32, the lowest above `after` first, then the lowest there are.

        *raises:* CapacityError: fewer are free, or no memory for another heap; nothing has changed then.
        """
        found = self._free_blocks()
        made: list[int] = []
        try:
            while len(found) < count and (index := self._files.next_index()) is not None:
                self._files.make(index)
                made.append(index)
                found = self._free_blocks()
            if len(found) < count:
                raise CapacityError(
                    f"expected {count} free blocks of {self.block_bytes} bytes, got {len(found)} of {self.max_blocks}; "
                    "close sequences or raise the memory"
                )
        except CapacityError:
            self._files.drop(made)
            raise
        split = int(np.searchsorted(found, after + 1))
        block_ids = np.concatenate(
            [found[split : split + count], found[: max(0, count - (len(found) - split))]]
        )
        self._references.add_holds(block_ids, 1)
        return block_ids

    def claim(self, block_ids: Any) -> None:
        """Hold exactly these blocks, which must be free: for an owner that chooses block numbers itself.

        *raises:* CapacityError: no memory for another heap; nothing has changed then.
        """
        block_ids = self._references.block_ids(block_ids)
        if len(np.unique(block_ids)) != len(block_ids) or self._references.counts[block_ids].any():
            taken = block_ids[self._references.counts[block_ids] > 0]
            raise ArgumentError(
                f"expected distinct free blocks to claim, got {block_ids.tolist()}, {taken.tolist()} taken"
            )
        made: list[int] = []
        try:
            for index in np.unique(block_ids // self.blocks_per_heap).tolist():
                if index not in self._files.files:
                    self._files.make(index)
                    made.append(index)
        except CapacityError:
            self._files.drop(made)
            raise
        self._references.add_holds(block_ids, 1)

    def hold(self, block_ids: Any) -> None:
        """Add a reference to each of these blocks; none may be free."""
        block_ids = self._references.live(block_ids)
        self._references.add_holds(block_ids, 1)

    def free(self, block_ids: Any, *, step: int | None = None) -> None:
        """Release a hold of each block: at once, or when `step` is complete. Mapped positions keep a block."""
        block_ids = self._references.block_ids(block_ids)
        self._references.check_held(block_ids)
        if step is None or step <= self._completed:
            self._references.add_holds(block_ids, -1)
        else:
            self._defer(step, lambda: self._free_promised(block_ids))
            self._references.promise(block_ids, 1)

    def references(self, block_ids: Any) -> np.ndarray:
        """int32, holds and mapped positions of each block: 1 means that the caller's reference is the only one."""
        return self._references.counts[self._references.block_ids(block_ids)]

    # Mapping

    def map(self, changes: Iterable[Change], *, populate: bool = True) -> None:
        """Map blocks at positions of ranges, replacing their mappings; all or nothing.

        A block may be mapped at any number of positions; -1 unmaps. Positions that already lead to their block cost
        nothing. populate: enter the pages into the page table now; otherwise each at its first touch.

        *raises:* CapacityError: no memory, or more mappings than the budget; nothing has changed then.
        """
        checked: list[Change] = []
        for address_range, positions, block_ids in changes:
            positions, order = self._position_array(address_range, positions)
            block_ids = np.atleast_1d(np.asarray(block_ids, np.int64))
            self._references.live(block_ids[block_ids != -1])
            if len(block_ids) != len(positions):
                raise ArgumentError(
                    f"expected a block for each of {len(positions)} positions, got {len(block_ids)}"
                )
            if address_range.leaving[positions].any():
                raise ArgumentError(
                    "expected positions to map that do not wait to be unmapped; complete the step"
                )
            checked.append((address_range, positions, block_ids[order]))
        for address_range, _, block_ids in checked:
            self._files.commit(block_ids[block_ids >= 0], address_range.piece_bytes)
        self._apply(checked, populate)

    def unmap(self, address_range: AddressRange, positions: Any, *, step: int | None = None) -> None:
        """Unmap these positions: at once, or when `step` is complete. All or nothing."""
        positions, _ = self._position_array(address_range, positions)
        if step is None or step <= self._completed:
            self._apply([(address_range, positions, np.full(len(positions), -1))])
            address_range.leaving[positions] = False
        else:
            self._defer(step, lambda: self.unmap(address_range, positions) if address_range.open else None)
            address_range.leaving[positions] = True

    def complete(self, step: int) -> None:
        """Mark every step up to `step` as ended: frees and unmaps what waited for it."""
        self._completed = max(self._completed, step)
        while self._waiting and self._waiting[0][0] <= self._completed:
            self._waiting[0][1]()
            self._waiting.popleft()

    # Bytes

    def copy(self, source: int, target: int, num_bytes: Sequence[int]) -> None:
        """Copy the first `num_bytes[layer_buffer]` bytes of the pieces of one block to those of another, mapped or not.

        *raises:* CapacityError: no memory for the target.
        """
        block_ids = self._references.live([source, target])
        for size, full in zip(num_bytes, self.piece_bytes, strict=True):
            if not 0 <= size <= full:
                raise ArgumentError(f"expected to copy up to {full} bytes of a piece, got {size}")
        page = self._backend.page_bytes
        self._files.commit(block_ids[1:], [-(-size // page) * page for size in num_bytes])
        self._files.copy(source, target, num_bytes)

    def commit(self, block_ids: Any, piece_bytes: Sequence[int]) -> None:
        """Commit the first `piece_bytes[layer_buffer]` bytes of these blocks' pieces; no block may be free.

        *raises:* CapacityError: no memory.
        """
        self._files.commit(self._references.live(block_ids), piece_bytes)

    def addresses(self, block_ids: Any, layer_buffer: int) -> np.ndarray:
        """int64, addresses of these blocks' pieces of a layer buffer, mapped into ranges or not; no block may be
        free."""
        return self._files.addresses(self._references.live(block_ids), layer_buffer)

    def trim(self) -> None:
        """Give back the memory of every free block, and every heap without used blocks."""
        for index in list(self._files.files):
            start, stop = self._files.span(index)
            unused = self._references.free_in(start, stop)
            if len(unused) == stop - start:
                self._files.drop([index])
            else:
                self._files.give_back(unused)

    @property
    def committed_bytes(self) -> int:
        """Memory that the heaps take now, as the machine counts it."""
        return self._files.committed_bytes

    @property
    def num_heaps(self) -> int:
        return len(self._files.files)

    @property
    def num_mappings(self) -> int:
        """Upper bound of the mappings of the open ranges and the heaps."""
        return self.num_heaps + sum(address_range.num_mappings for address_range in self._ranges)

    @property
    def num_used(self) -> int:
        """Blocks that are not free."""
        return int(np.count_nonzero(self._references.counts))

    def check(self) -> None:
        """Check P1 and P3; *raises:* InvariantError with the numbers."""
        references = self._references.holds.copy()
        for address_range in self._ranges:
            entries = address_range.entries
            np.add.at(references, entries[entries > 0] - 1, 1)
            edges = num_edges(self._files, address_range, np.arange(address_range.num_positions + 1))
            if address_range.num_mappings != 1 + edges:
                raise InvariantError(
                    f"P3: a range counts {address_range.num_mappings} mappings, its entries make {1 + edges}"
                )
        wrong = np.flatnonzero(references != self._references.counts)
        if len(wrong):
            block_id = int(wrong[0])
            raise InvariantError(
                f"P1: block {block_id} counts {self._references.counts[block_id]} references, has "
                f"{references[block_id]}; {len(wrong)} blocks differ"
            )
        for block_id in np.flatnonzero(self._references.counts).tolist():
            if block_id // self.blocks_per_heap not in self._files.files:
                raise InvariantError(f"P1: block {block_id} is in use, but its heap does not exist")

    def close(self) -> None:
        """Unmap all ranges and give all memory back. Tensors over the ranges must not be touched any more."""
        for address_range in list(self._ranges):
            self.release(address_range)
        self._waiting.clear()
        self._references.clear()
        self._files.drop(list(self._files.files))

    # Internals

    def _apply(self, changes: list[Change], populate: bool = True) -> None:
        for (_, _, block_ids), before in zip(
            changes, change(self._files, changes, populate=populate), strict=True
        ):
            self._references.count_moves(before, block_ids)

    def _free_blocks(self) -> np.ndarray:
        parts = [np.zeros(0, np.int32)]
        for index in sorted(self._files.files):
            start, stop = self._files.span(index)
            parts.append(self._references.free_in(start, stop).astype(np.int32))
        return np.concatenate(parts)

    def _free_promised(self, block_ids: np.ndarray) -> None:
        self._references.promise(block_ids, -1)
        self._references.add_holds(block_ids, -1)

    def _defer(self, step: int, act: Callable[[], None]) -> None:
        if self._waiting and step < self._waiting[-1][0]:
            raise ArgumentError(f"expected steps in order, got {step} after {self._waiting[-1][0]}")
        self._waiting.append((step, act))

    def _require(self, address_range: AddressRange) -> None:
        if not any(address_range is open_range for open_range in self._ranges):
            raise ArgumentError("expected an open range of this heap, got a released range or another heap's")

    def _position_array(self, address_range: AddressRange, positions: Any) -> tuple[np.ndarray, np.ndarray]:
        """The positions in ascending order, and the permutation that sorts them."""
        self._require(address_range)
        positions = np.atleast_1d(np.asarray(positions, np.int64))
        order = np.argsort(positions, kind="stable")
        ascending = positions[order]
        if len(ascending) and (
            ascending[0] < 0
            or ascending[-1] >= address_range.num_positions
            or (np.diff(ascending) == 0).any()
        ):
            raise ArgumentError(
                f"expected distinct positions of 0 to {address_range.num_positions - 1}, got {positions.tolist()}"
            )
        return ascending, order


def check_piece_bytes(piece_bytes: Sequence[int], page_bytes: int) -> None:
    """*raises:* ArgumentError unless every size is whole pages and at most 2 MiB (or one page, if a page is larger)."""
    max_bytes = max(MAX_PIECE_BYTES, page_bytes)
    if not piece_bytes:
        raise ArgumentError("expected a piece size for at least one layer buffer, got none")
    for size in piece_bytes:
        if size < page_bytes or size % page_bytes or size > max_bytes:
            raise ArgumentError(
                f"expected pieces of {page_bytes} to {max_bytes} bytes, multiples of the page of {page_bytes}, "
                f"got {size}"
            )
