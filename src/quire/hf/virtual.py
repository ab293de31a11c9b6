"""`virtual`: rows in reserved addresses, into which memory is mapped piece by piece.

Layers that keep the same positions and have equally large tokens form a group: the rows of their keys and values are
the layer buffers of one address range, and a block of the group's placement heap is a piece of every layer buffer, for
the same tokens. Keys and values of a layer always belong to one group, whatever their widths: their rows are equally
long. So one call takes a step's memory for all layers. Row r of the batch has the positions from `r * row_positions`
on, so that each layer buffer is one tensor. A fork maps the same blocks into another range; the first write to a shared
block copies it (W2 of `layer_rows`).

Threads: a range and a group's state (`low`, `high`, `private_from`) belong to one cache and change only in its calls.
Heaps and their references belong to all forks and change under the memory's lock. A group checks whether a block is
shared and copies it under one hold of the lock: of two groups that share a block the first to write copies it and the
second then owns it, so no group writes where another's kernels may be reading.

Memory is taken ahead, a sixteenth of a row's length: blocks taken together are adjacent, and neighbours in heap and
range count as one mapping, of which a process has 65 530.

Cost: `prepare` about 1 us if all is mapped; else about 0.1 ms and 10 us a layer buffer (64 KiB pieces) for mapping, and
the copy of a shared piece. `select` and `reorder` about 0.1 ms and the mapping.
"""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from quire.byte_counter import ByteCounter
from quire.errors import ArgumentError, BackendError, CapacityError
from quire.hf.layer_rows import LayerRows, Need, RowBuffer, check_length, check_room
from quire.memory.device_memory import DeviceMemory
from quire.memory.placement import AddressRange, PlacementBackend, PlacementHeap, unsupported_reason
from quire.process import ProcessGuard
from quire.sizes import format_size

__all__ = ["VirtualMemory", "VirtualRows"]

_MAX_PIECE = 2 << 20
_AHEAD = 16  # a row takes one block more for every 16 that it needs


class VirtualMemory:
    """Memory of `limit_bytes` for rows of up to `max_length` tokens, mapped in pieces of about `piece_bytes`.

    device: of the rows, and of the model that reads them. A piece has at least a page of its memory. It works only in
    this process: a child of `os.fork` does not get the mappings.

    Raises:
        ArgumentError: a piece size out of range.
        BackendError: the device cannot map memory at chosen addresses.
    """

    def __init__(self, device: DeviceMemory, limit_bytes: int, max_length: int, piece_bytes: int) -> None:
        self._placement: PlacementBackend | None = None  # None: this machine's
        self.page_bytes = mmap.PAGESIZE
        if not mmap.PAGESIZE <= piece_bytes <= _MAX_PIECE or piece_bytes & (piece_bytes - 1):
            raise ArgumentError(
                f"expected a piece size that is a power of two from {format_size(mmap.PAGESIZE)} to "
                f"{format_size(_MAX_PIECE)}, got {format_size(piece_bytes)}"
            )
        self.device = device.mapped_memory()
        if not device.is_host:
            self._placement = self.device.open_placement()
            self.page_bytes = self._placement.page_bytes
        elif (reason := unsupported_reason()) is not None:
            raise BackendError(
                f'expected a machine that maps memory for storage="virtual": {reason}; use storage="growing"'
            )
        self.limit_bytes = limit_bytes
        self.max_length = max_length
        self.piece_bytes = max(piece_bytes, self.page_bytes)
        self._heaps: dict[tuple[int, ...], PlacementHeap] = {}  # by bytes of a token in each layer buffer
        self._states = ByteCounter()  # bytes
        self._to_release: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self.process = ProcessGuard(
            'a QuireCache with storage="virtual", whose memory is mapped',
            'make a new cache in the child, use storage="growing", or start children with "spawn"',
        )

    @property
    def used_bytes(self) -> int:
        rows = sum(heap.num_used * heap.block_bytes for heap in list(self._heaps.values()))
        return rows + self._states.value

    def open(self, num_rows: int, layer_buffers: Sequence[RowBuffer]) -> list[LayerRows]:
        of_layer: dict[int, list[int]] = {}
        for number, layer_buffer in enumerate(layer_buffers):
            of_layer.setdefault(layer_buffer.layer, []).append(number)
        members: dict[tuple[Any, ...], list[int]] = {}
        for numbers in of_layer.values():
            kind = (
                layer_buffers[numbers[0]].window,
                *(layer_buffers[number].token_bytes for number in numbers),
            )
            members.setdefault(kind, []).extend(numbers)
        opened: list[Any] = [None] * len(layer_buffers)
        with self._changing():
            for numbers in members.values():
                token_bytes = tuple(layer_buffers[number].token_bytes for number in numbers)
                group = _Group(self, self._heap(token_bytes), num_rows, token_bytes)
                for place, number in enumerate(numbers):
                    opened[number] = VirtualRows(group, place)
        return opened

    def prepare(self, needs: Sequence[Need]) -> None:
        self.process.check()
        groups = _grouped(needs)
        if all(group.is_ready(start, stop) for group, _, start, stop in groups):
            return
        done: list[Callable[[], None]] = []
        with self._changing():
            try:
                for group, first, start, stop in groups:
                    done.append(group.prepare(first, start, stop))
            except BaseException:
                for undo in reversed(done):
                    undo()
                raise
            for group, first, _, _ in groups:
                group.forget(first)

    def reorder(self, needs: Sequence[Need], order: Sequence[int], equal_until: Sequence[int]) -> None:
        with self._changing():
            for group, _, _, stop in _grouped(needs):
                group.reorder(order, stop, equal_until)

    def select(self, needs: Sequence[Need], order: Sequence[int]) -> list[LayerRows]:
        with self._changing():
            new = {id(group): group.select(order, stop) for group, _, _, stop in _grouped(needs)}
        return [VirtualRows(new[id(_rows(need).group)], _rows(need).place) for need in needs]

    def take_state(self, num_bytes: int, purpose: str) -> None:
        with self._changing():
            check_room(purpose, num_bytes, self.used_bytes, self.limit_bytes)
            self._states.add(num_bytes)

    def give_state(self, num_bytes: int) -> None:
        self._states.add(-num_bytes)

    def take(self, heap: PlacementHeap, count: int, after: int, purpose: str) -> np.ndarray:
        """Take `count` blocks of `heap`, held once, the nearest behind block `after`."""
        check_room(purpose, count * heap.block_bytes, self.used_bytes, self.limit_bytes)
        return heap.allocate(count, after)

    def release_range(self, release: Callable[[], None]) -> None:
        """Release a range whose last tensor was freed, in any thread: now, or after a change that is under way.

        Does nothing in another process, whose memory at these addresses is not the cache's.
        """
        if self.process.is_here:
            self._to_release.append(release)
            self._release_pending()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Context of a change of the heaps, one at a time; ranges that were freed meanwhile are released at its end."""
        self.process.check()
        try:
            with self._lock:
                yield
        finally:
            self._release_pending()

    def _release_pending(self) -> None:
        """Release the freed ranges, unless a change is under way, which releases them at its end."""
        while self._to_release and self._lock.acquire(blocking=False):
            try:
                while self._to_release:
                    self._to_release[0]()
                    self._to_release.popleft()
            except CapacityError:
                return  # unmapping may split a mapping and exceed the budget: wait for the next change
            finally:
                self._lock.release()

    def _heap(self, token_bytes: tuple[int, ...]) -> PlacementHeap:
        heap = self._heaps.get(token_bytes)
        if heap is None:
            largest = max(token_bytes)
            # Tokens of a block: it ends on a token and a page in every layer buffer.
            page = self.page_bytes
            whole = math.lcm(*(page // math.gcd(size, page) for size in token_bytes))
            tokens = whole * max(1, self.piece_bytes // (whole * largest))
            pieces = [tokens * size for size in token_bytes]
            if max(pieces) > _MAX_PIECE:
                raise ArgumentError(
                    f"expected tokens that fill whole pages within {format_size(_MAX_PIECE)}, got tokens of "
                    f'{largest} bytes; use storage="growing" for this model'
                )
            if sum(pieces) > self.limit_bytes:
                raise CapacityError(
                    f"expected kv_memory of at least one piece of {format_size(max(pieces))} for each of {len(pieces)} "
                    f"key and value tensors, {format_size(sum(pieces))}, got {format_size(self.limit_bytes)}; raise "
                    "kv_memory or lower piece_size"
                )
            max_blocks = self.limit_bytes // sum(pieces)
            if self._placement is None:
                heap = PlacementHeap(pieces, max_blocks=max_blocks)
            else:
                heap = PlacementHeap(pieces, max_blocks=max_blocks, backend=self._placement)
            self._heaps[token_bytes] = heap
        return heap


class _RangeReference:
    """Referenced by every tensor over a range; its finalizer releases the range (W4)."""


class _Group:
    """Layer buffers of one range. Every row has blocks mapped at positions [low, high)."""

    def __init__(
        self, memory: VirtualMemory, heap: PlacementHeap, num_rows: int, token_bytes: tuple[int, ...]
    ) -> None:
        self.memory, self.heap, self.num_rows, self.token_bytes = memory, heap, num_rows, token_bytes
        self.block_tokens = heap.piece_bytes[0] // token_bytes[0]
        self.row_positions = -(-memory.max_length // self.block_tokens)
        self.range = heap.reserve((num_rows + 1) * self.row_positions)
        self.low = self.high = 0
        self.private_from = 0  # blocks from this position on are mapped nowhere else
        self._reference = _RangeReference()
        finalizer = weakref.finalize(self._reference, memory.release_range, _release_of(heap, self.range))
        finalizer.atexit = False

    def tensor(self, place: int) -> torch.Tensor:
        """The addresses of a layer buffer, uint8 [all positions x bytes of a piece]."""
        with torch.inference_mode(False):
            return self.range.tensor(place, torch.uint8, owner=self._reference)

    def is_ready(self, start: int, stop: int) -> bool:
        """Whether [start, stop) of all rows can be written without mapping or copying."""
        return start >= self.private_from * self.block_tokens and stop <= self.high * self.block_tokens

    def prepare(self, first: int, start: int, stop: int) -> Callable[[], None]:
        """Map unshared memory for [start, stop) of all rows. Returns a call that unmaps the new positions.

        A group without mappings begins at `first`.
        """
        tokens = self.block_tokens
        begin, end = start // tokens, -(-stop // tokens)
        check_length(stop, self.memory.max_length)
        if self.high == self.low:
            self.low = self.high = first // tokens
        if begin < self.private_from:
            self._copy_shared(begin, min(end, self.high), start)
        high = self.high
        if end > high:
            self._extend(end, stop)

        def undo() -> None:
            # Copies of shared blocks stay; only new positions are unmapped.
            if self.high > high:
                self.heap.unmap(self.range, self._positions(high, self.high))
                self.high = high

        return undo

    def reorder(self, order: Sequence[int], stop: int, equal_until: Sequence[int]) -> None:
        end = -(-stop // self.block_tokens)
        # Rows that move, and the first of their blocks that differs.
        firsts = {
            row: max(self.low, equal_until[row] // self.block_tokens)
            for row, source in enumerate(order)
            if row != source
        }
        firsts = {row: first for row, first in firsts.items() if first < end}
        if not firsts:
            return
        entries = self._block_ids(self.low, end)
        positions = np.concatenate([self._row(row, first, end) for row, first in firsts.items()])
        block_ids = np.concatenate([entries[order[row], first - self.low :] for row, first in firsts.items()])
        self.heap.map([(self.range, positions, block_ids)], populate=False)
        self.private_from = max(self.private_from, end)

    def select(self, order: Sequence[int], stop: int) -> _Group:
        new = _Group(self.memory, self.heap, len(order), self.token_bytes)
        end = -(-stop // self.block_tokens)
        if end > self.low:
            block_ids = self._block_ids(self.low, end)[list(order)].ravel()
            # Not populated: so a fork is fast, and all threads of its first step enter the pages that it reads.
            self.heap.map([(new.range, new._positions(self.low, end), block_ids)], populate=False)
            new.low, new.high, new.private_from = self.low, end, end
            self.private_from = max(self.private_from, end)
        return new

    def _copy_shared(self, begin: int, end: int, start: int) -> None:
        """Copy the shared blocks at [begin, end); only tokens before `start` have content."""
        positions = self._positions(begin, end)
        block_ids = self._block_ids(begin, end).ravel()
        references = dict(zip(block_ids.tolist(), self.heap.references(block_ids).tolist(), strict=True))
        shared: list[int] = []
        for number, block_id in enumerate(block_ids.tolist()):
            if references[block_id] > 1:
                references[block_id] -= 1
                shared.append(number)
        if shared:
            new = self.memory.take(
                self.heap, len(shared), int(block_ids.max()), f"{len(shared)} copies of shared pieces"
            )
            try:
                used = max(0, min(self.block_tokens, start - begin * self.block_tokens))
                for number, block_id in zip(shared, new.tolist(), strict=True):
                    if used and positions[number] % self.row_positions == begin:
                        self.heap.copy(
                            int(block_ids[number]), block_id, [used * size for size in self.token_bytes]
                        )
                self.heap.map([(self.range, positions[shared], new)])
            finally:
                self.heap.free(new)
        if begin < self.private_from and end >= self.private_from:
            self.private_from = begin

    def _extend(self, end: int, stop: int) -> None:
        """Map blocks at [high, end) of every row, and some ahead."""
        row_bytes = self.num_rows * self.heap.block_bytes
        room = (self.memory.limit_bytes - self.memory.used_bytes) // row_bytes - (end - self.high)
        ahead = max(0, min((end - self.low) // _AHEAD, room, self.row_positions - end))
        for target in dict.fromkeys((end + ahead, end)):
            positions = self._positions(self.high, target)
            last = self._block_ids(self.high - 1, self.high).max() if self.high > self.low else -1
            new = self.memory.take(
                self.heap, len(positions), int(last), f"{stop} tokens in {self.num_rows} rows"
            )
            try:
                self.heap.map([(self.range, positions, new)])
                self.high = target
                return
            except CapacityError:
                if target == end:
                    raise
            finally:
                self.heap.free(new)

    def forget(self, first: int) -> None:
        """Unmap blocks wholly before token `first`."""
        low = min(first // self.block_tokens, self.high)
        if low > self.low:
            self.heap.unmap(self.range, self._positions(self.low, low))
            self.low = low

    def _row(self, row: int, begin: int, end: int) -> np.ndarray:
        return row * self.row_positions + np.arange(begin, end)

    def _positions(self, begin: int, end: int) -> np.ndarray:
        """Positions [begin, end) of all rows, row after row."""
        rows = np.arange(self.num_rows)[:, None] * self.row_positions
        return (rows + np.arange(begin, end)).ravel()

    def _block_ids(self, begin: int, end: int) -> np.ndarray:
        """[num_rows, end - begin]."""
        entries = self.range.entries[1 : 1 + self.num_rows * self.row_positions]
        return entries.reshape(self.num_rows, self.row_positions)[:, begin:end] - 1


class VirtualRows:
    """One layer buffer of a group."""

    origin = 0

    def __init__(self, group: _Group, place: int) -> None:
        self.group: _Group = group
        self.device: DeviceMemory = group.memory.device
        self.place = place
        self.num_rows, self.token_bytes = group.num_rows, group.token_bytes[place]
        self.row_tokens = group.row_positions * group.block_tokens
        self._process = group.memory.process
        self._buffer = group.tensor(place)

    @property
    def buffer(self) -> torch.Tensor:
        """*raises:* OtherProcessError: a child process does not have the mappings."""
        self._process.check()
        return self._buffer

    def close(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self.__dict__.pop("group", None)


def _rows(need: Need) -> VirtualRows:
    assert isinstance(need.rows, VirtualRows)
    return need.rows


def _grouped(needs: Sequence[Need]) -> list[tuple[_Group, int, int, int]]:
    """(group, first, start, stop) of the needs of each group, whose layer buffers need the same."""
    found: dict[int, tuple[_Group, int, int, int]] = {}
    for need in needs:
        group = _rows(need).group
        _, first, start, stop = found.get(id(group), (group, need.first, need.start, need.stop))
        found[id(group)] = (group, min(first, need.first), min(start, need.start), max(stop, need.stop))
    return list(found.values())


def _release_of(heap: PlacementHeap, address_range: AddressRange) -> Callable[[], None]:
    def release() -> None:
        heap.release(address_range)
        heap.trim()

    return release
