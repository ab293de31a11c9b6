"""Placement heaps on Linux: a heap is a memfd, mapped onto reserved address space page by page.

Not for Windows or macOS: `probe.unsupported_reason` tells whether this machine can do it.

A heap is also mapped once as a whole, for copies and for collapsing huge pages. fallocate commits memory and reports
when there is none (MAP_POPULATE stays silent, and the first touch would end the process). MAP_POPULATE then enters the
pages, so that no attention kernel takes the faults, unless the caller leaves that to the first touch. Huge pages come
by MADV_COLLAPSE of an aligned range with one page in memory: it needs neither root nor the shmem_enabled switch (which
is "never" by default, so that MADV_HUGEPAGE and MADV_POPULATE_WRITE give small pages). If free memory is fragmented,
the kernel first moves pages, which may take a hundred times as long as clearing one, and a virtual machine's host may
first have to find the memory (5 ms a huge page were measured). This time is limited to a twentieth of the total and a
tenth of a second at once; beyond that the heap gets small pages.

A child of `os.fork` gets none of the mappings (MADV_DONTFORK), closes the files, and unmaps no addresses: it may have
something of its own there by then.

Cost (64 KiB pieces, measured in docs/virtual-memory.md): map about 10 us, unmap about 8 us, commit about 1 us a page.
Entering pages is 25 us a MiB of small ones, nearly nothing of huge ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quire.memory.placement.backend import MappingBudget
from quire.memory.placement.system_calls import HUGE_PAGE_BYTES, SystemCalls

__all__ = ["MemfdBackend", "process_budget"]

_DEFAULT_MAX_MAP_COUNT = 65530
_BUDGET_SHARE = 0.75  # of the process's mappings: malloc, threads and libraries need the rest
_HUGE_S = 1e-3  # to make a huge page where one is free: 0.2 to 0.6 ms were measured
_MOVING_SHARE, _MOVING_S = 0.05, 0.1  # limits for slower huge pages: share of the total time, and at once
_process_budget: MappingBudget | None = None
_heaps: weakref.WeakSet[_Memfd] = weakref.WeakSet()  # of this process


def process_budget() -> MappingBudget:
    """The limit of mappings of all heaps of this process together: three quarters of vm.max_map_count.

    At the limit not even unmapping works, and malloc fails in the whole process.
    """
    global _process_budget
    if _process_budget is None:
        try:
            limit = int(Path("/proc/sys/vm/max_map_count").read_text())
        except (OSError, ValueError):
            limit = _DEFAULT_MAX_MAP_COUNT
        _process_budget = MappingBudget(
            int(limit * _BUDGET_SHARE),
            f"memory mappings (three quarters of vm.max_map_count={limit} are for KV caches; choose larger pieces, "
            "close sequences, or raise the limit with sysctl)",
        )
    return _process_budget


class _Memfd:
    """One heap: its file, and the mapping of all of it. The last reference or `drop` frees it."""

    def __init__(self, calls: SystemCalls, num_bytes: int) -> None:
        with contextlib.ExitStack() as undo:
            self.fd = calls.memfd_create("quire-kv")
            undo.callback(calls.close, self.fd)
            calls.ftruncate(self.fd, num_bytes)
            reserved = num_bytes + HUGE_PAGE_BYTES
            start = calls.reserve(reserved)
            undo.callback(calls.munmap, start, reserved)
            self.address = _round_up(start, HUGE_PAGE_BYTES)
            calls.map(self.address, num_bytes, self.fd, 0, populate=False)
            calls.keep_from_children(self.address, num_bytes)
            undo.pop_all()
        self.calls = calls
        self.drop = weakref.finalize(self, _drop, calls, self.fd, start, reserved, os.getpid())
        self.drop.atexit = False  # the end of the process frees all, and a tensor may still exist
        _heaps.add(self)


def _drop(calls: SystemCalls, fd: int, address: int, num_bytes: int, process_id: int) -> None:
    if os.getpid() == process_id:
        calls.munmap(address, num_bytes)
        calls.close(fd)


def _forget_parent() -> None:
    """In a child process: count its own mappings from 0, and close its copies of the parent's files."""
    global _process_budget
    _process_budget = None
    for heap in list(_heaps):
        if heap.drop.alive:
            heap.calls.close(heap.fd)
    _heaps.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parent)


class MemfdBackend:
    """See the module's text, and `PlacementBackend` for the calls."""

    merges = True
    huge_bytes = HUGE_PAGE_BYTES

    def __init__(
        self,
        calls: SystemCalls | None = None,
        budget: MappingBudget | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.page_bytes = mmap.PAGESIZE
        self.budget = budget or process_budget()
        self._calls = calls or SystemCalls()
        self._clock = clock
        self._may_take_s, self._counted_at = _MOVING_S, clock()

    def reserve(self, num_bytes: int, alignment: int) -> int:
        calls, slack = self._calls, alignment - self.page_bytes
        start = calls.reserve(num_bytes + slack)
        address = _round_up(start, alignment)
        # Release the excess of the alignment at both ends.
        if address > start:
            calls.munmap(start, address - start)
        if slack > address - start:
            calls.munmap(address + num_bytes, slack - (address - start))
        return address

    def release(self, address: int, num_bytes: int) -> None:
        self._calls.munmap(address, num_bytes)

    def make_heap(self, num_bytes: int) -> _Memfd:
        return _Memfd(self._calls, num_bytes)

    def drop_heap(self, heap: _Memfd) -> None:
        heap.drop()

    def commit(self, heap: _Memfd, offset: int, num_bytes: int) -> None:
        self._calls.fallocate(heap.fd, offset, num_bytes)

    def commit_huge(self, heap: _Memfd, offset: int) -> bool:
        began = self._clock()
        self._may_take_s = min(self._may_take_s + _MOVING_SHARE * (began - self._counted_at), _MOVING_S)
        self._counted_at = began
        if self._may_take_s <= 0:
            return False
        # MADV_COLLAPSE needs one page in memory.
        self._calls.fallocate(heap.fd, offset, self.page_bytes)
        try:
            self._calls.collapse(heap.address + offset, HUGE_PAGE_BYTES)
            # The mapping of the whole heap needs no entries: copies are rare, and RSS would count the page twice.
            self._calls.forget(heap.address + offset, HUGE_PAGE_BYTES)
        except OSError:
            self._calls.punch_hole(heap.fd, offset, HUGE_PAGE_BYTES)
            return False
        finally:
            self._may_take_s -= max(0.0, self._clock() - began - _HUGE_S)
        return True

    def give_back(self, heap: _Memfd, offset: int, num_bytes: int) -> None:
        self._calls.punch_hole(heap.fd, offset, num_bytes)

    def map(self, address: int, num_bytes: int, heap: _Memfd, offset: int, *, populate: bool) -> None:
        self._calls.map(address, num_bytes, heap.fd, offset, populate=populate)
        try:
            self._calls.keep_from_children(address, num_bytes)
        except OSError:  # EAGAIN is temporary
            self._calls.keep_from_children(address, num_bytes)

    def unmap(self, address: int, num_bytes: int) -> None:
        self._calls.unmap(address, num_bytes)

    def copy(
        self, source: _Memfd, source_offset: int, target: _Memfd, target_offset: int, num_bytes: int
    ) -> None:
        ctypes.memmove(target.address + target_offset, source.address + source_offset, num_bytes)

    def heap_address(self, heap: _Memfd) -> int:
        return heap.address

    def committed_bytes(self, heap: _Memfd) -> int:
        return self._calls.committed_bytes(heap.fd)

    def tensor(self, address: int, num_bytes: int, dtype: torch.dtype, owner: Any) -> torch.Tensor:
        buffer: Any = (ctypes.c_uint8 * num_bytes).from_address(address)
        buffer.owner = owner  # the tensor keeps the buffer alive
        return torch.frombuffer(buffer, dtype=dtype)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
