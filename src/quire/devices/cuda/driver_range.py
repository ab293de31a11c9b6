"""`DriverRange`: reserved addresses of a card that get memory where it is committed.

An `Allocation` (`quire.memory.device_memory`). Unlike a heap of this machine a write commits nothing: a kernel that
writes an address without memory is a fault of the card. So a storage commits before a step writes
(`commits_on_write`).

A page is one handle. `release` gives a page up behind a fence: until it has passed, the page is *leaving*, keeps its
memory, and `commit` takes it back without a call.

Invariants
    R1  a page has a handle if and only if it is mapped and open for access.
    R2  an address never changes; tensors keep the reservation, also after `close`.
    R3  `release` gives up no page that holds a byte outside the range given.
    R4  a call that fails changes no page.

Cost: `commit` a call to map each missing page and one to open each run of them; numpy over the pages given.
"""

from __future__ import annotations

import contextlib

import numpy as np
import torch

from quire.devices.cuda.driver_pages import DriverPages, DriverReservation, page_runs
from quire.devices.cuda.driver_tensor import tensor_at
from quire.errors import ArgumentError, DeviceLostError

__all__ = ["DriverRange"]


class DriverRange:
    """Made by `DriverMemory.reserve`. max_bytes: rounded up to whole pages.

    *raises:* ArgumentError: no bytes. CapacityError: the card has not so many addresses.
    """

    commits_on_write = False

    def __init__(self, memory: DriverPages, num_bytes: int) -> None:
        if num_bytes <= 0:
            raise ArgumentError(f"expected a positive size for a range of a card, got {num_bytes} bytes")
        self._memory = memory
        self.page_bytes = self._page = page = memory.page_bytes
        self.max_bytes = -(-num_bytes // page) * page
        with memory.lock:
            memory.collect()
            self._reservation = DriverReservation(memory, self.max_bytes)
        self.address = self._reservation.address
        self._handles = np.zeros(self.max_bytes // page, np.uint64)
        self._has_handle = np.zeros(len(self._handles), bool)
        self._release_of = np.zeros(len(self._handles), np.int64)  # the number of its release, 0: not leaving
        self._num_releases = 0
        self._bytes: torch.Tensor | None = tensor_at(
            self.address, self.max_bytes, memory.torch_device, self._reservation
        )

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """All addresses as a 1-D tensor of `dtype`; only committed ones may be touched."""
        return self._require_open().view(dtype)

    def prefer_huge_pages(self, start: int, stop: int) -> None:
        """Does nothing: a card's pages are large."""

    def commit(self, start: int, stop: int) -> bool:
        """Give every page of bytes `[start, stop)` memory; new pages are zeros, the others keep their bytes.

        *raises:* CapacityError: the card has no memory; no page has changed then.
        """
        self._require_open()
        first, last = start // self._page, min(-(-stop // self._page), len(self._handles))
        memory = self._memory
        with memory.lock:
            memory.collect()
            handles: list[int] = []
            # `take` may wait for leaving pages, also for pages of this range, which then lack memory too.
            while (missing := first + np.flatnonzero(~self._has_handle[first:last])).size > len(handles):
                try:
                    handles += memory.pool.take(missing.size - len(handles))
                except BaseException:
                    memory.pool.put(handles)
                    raise
            if handles:
                addresses = (self.address + missing * self._page).tolist()
                try:
                    memory.map_pages(list(zip(addresses, handles, strict=True)), clear=True)
                except BaseException:
                    memory.pool.put(handles)
                    raise
                self._handles[missing] = handles
                self._has_handle[missing] = True
            self._release_of[first:last] = 0
        return True

    def commit_ahead(self, start: int, stop: int) -> None:
        """As `commit`, soon and by a thread of its own; a range that cannot have the memory then gets none."""
        self._memory.ahead.want(lambda: self.commit(start, stop) if self._bytes is not None else None)

    def release(self, start: int, stop: int) -> None:
        """Give the memory of the whole pages within bytes `[start, stop)` up, when the running steps have ended.

        *raises:* ArgumentError: the range is not inside. CapacityError: the card has no event; nothing has changed.
        """
        self._require_open()
        if not 0 <= start <= stop <= self.max_bytes:
            raise ArgumentError(
                f"expected a byte range inside the {self.max_bytes} bytes of a range, got [{start}, {stop})"
            )
        self._memory.ahead.join()
        first, last = -(-start // self._page), stop // self._page
        with self._memory.lock:
            pages = slice(first, max(first, last))
            staying = self._has_handle[pages] & (self._release_of[pages] == 0)
            if not staying.any():
                return
            fence = self._memory.record_fence()
            self._num_releases += 1
            number = self._num_releases
            self._release_of[first + np.flatnonzero(staying)] = number
            self._memory.defer(fence, lambda: self._unmap_released(first, last, number))

    def _unmap_released(self, first: int, last: int, number: int) -> None:
        """Unmap the pages that still leave by release `number`. May be called again after a failure."""
        memory = self._memory
        leaving = first + np.flatnonzero(self._release_of[first:last] == number)
        for address, num_bytes in page_runs((self.address + leaving * self._page).tolist(), self._page):
            memory.driver.unmap(address, num_bytes)
            at = (address - self.address) // self._page
            pages = slice(at, at + num_bytes // self._page)
            handles = self._handles[pages].tolist()
            self._has_handle[pages] = False
            self._release_of[pages] = 0
            memory.pool.put(handles)

    def handles(self, start: int, num_bytes: int) -> list[int]:
        """The handles of whole, committed pages."""
        pages = slice(start // self._page, (start + num_bytes) // self._page)
        assert self._has_handle[pages].all()
        return self._handles[pages].tolist()

    def committed_bytes(self, start: int = 0, stop: int | None = None) -> int:
        """Bytes of the pages of `[start, stop)` that have memory now, leaving ones included."""
        stop = self.max_bytes if stop is None else min(stop, self.max_bytes)
        with self._memory.lock:
            self._memory.collect()
            return int(self._has_handle[start // self._page : -(-stop // self._page)].sum()) * self._page

    def close(self) -> None:
        """Give all memory back; waits for the running steps. Addresses live until their last tensor is freed. Twice is
        harmless."""
        if self._bytes is None:
            return
        memory = self._memory
        memory.ahead.join()
        with memory.lock, contextlib.suppress(DeviceLostError):  # a lost card has no memory to give back
            memory.insist(lambda: memory.driver.synchronize(memory.stream()))
            memory.collect()
            self._num_releases += 1
            self._release_of[self._has_handle] = self._num_releases
            memory.insist(lambda: self._unmap_released(0, len(self._handles), self._num_releases))
        self._bytes = None
        del self._reservation

    def _require_open(self) -> torch.Tensor:
        if self._bytes is None:
            raise ArgumentError("expected an open range of a card, got one that was closed")
        return self._bytes
