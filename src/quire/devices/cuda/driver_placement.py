"""`DriverPlacement`: a card's blocks mapped into rows of addresses, for `storage="virtual"`.

A `PlacementBackend` (`quire.memory.placement.backend`). A heap is a `DriverRange`: a committed page of it has one
handle, which is mapped there and at any number of places in rows. So a shared prefix is one memory at several
addresses, and `heap_address` reaches every block without a row. Access is open to all of them: blocks that are shared
stay unchanged because the cache copies before it writes.

The driver replaces no mapping: `map` unmaps the old one first, and maps it again if the new one is refused. Unmapping
waits for the steps that may read there: `unmap` is deferred behind their fence, a `map` over another block waits.

Invariants
    D1  `_mapped` has each page of rows that is mapped, with its handle; `_leaving` those of them that wait for a fence.
    D2  a `map` that fails leaves every page as before (B1 of the contract).

Cost: `map` a call of the driver for each page and one to open each run; a page that already leads there is free.
"""

from __future__ import annotations

from typing import Any

import torch

from quire.devices.cuda.driver_pages import DriverPages, page_runs
from quire.devices.cuda.driver_range import DriverRange
from quire.devices.cuda.driver_tensor import tensor_at
from quire.errors import BackendError, CapacityError
from quire.memory.placement import MappingBudget

__all__ = ["DriverPlacement"]


class DriverPlacement:
    """See the module's text, and `PlacementBackend` for the calls. page_bytes: the card's granularity."""

    huge_bytes = 0
    merges = True

    def __init__(self, memory: DriverPages) -> None:
        self.page_bytes = memory.page_bytes
        self.budget = MappingBudget(None)
        self._memory = memory
        self._mapped: dict[int, int] = {}  # handle by address of a page
        self._leaving: dict[int, int] = {}  # number of its unmapping by address of a page
        self._num_unmaps = 0

    # Addresses

    def reserve(self, num_bytes: int, alignment: int) -> int:
        with self._memory.lock:
            self._memory.collect()
            return self._memory.driver.reserve(num_bytes, alignment)

    def release(self, address: int, num_bytes: int) -> None:
        """Also a finalizer's call, in any thread: a later call of the memory does it."""
        self._memory.abandon(lambda: self._free(address, num_bytes))

    def _free(self, address: int, num_bytes: int) -> None:
        pages = sorted(page for page in self._mapped if address <= page < address + num_bytes)
        if pages:
            self._memory.record_fence().wait()
            self._unmap_now(pages)
        self._memory.driver.free_addresses(address, num_bytes)

    # Heaps

    def make_heap(self, num_bytes: int) -> DriverRange:
        return DriverRange(self._memory, num_bytes)

    def drop_heap(self, heap: DriverRange) -> None:
        heap.close()

    def commit(self, heap: DriverRange, offset: int, num_bytes: int) -> None:
        heap.commit(offset, offset + num_bytes)

    def commit_huge(self, heap: DriverRange, offset: int) -> bool:
        return False

    def give_back(self, heap: DriverRange, offset: int, num_bytes: int) -> None:
        heap.release(offset, offset + num_bytes)

    def heap_address(self, heap: DriverRange) -> int:
        return heap.address

    def committed_bytes(self, heap: DriverRange) -> int:
        return heap.committed_bytes()

    def copy(
        self,
        source: DriverRange,
        source_offset: int,
        target: DriverRange,
        target_offset: int,
        num_bytes: int,
    ) -> None:
        self._memory.copy(target.address + target_offset, source.address + source_offset, num_bytes)

    def tensor(self, address: int, num_bytes: int, dtype: torch.dtype, owner: Any) -> torch.Tensor:
        return tensor_at(address, num_bytes, self._memory.torch_device, owner).view(dtype)

    # Mapping

    def map(self, address: int, num_bytes: int, heap: DriverRange, offset: int, *, populate: bool) -> None:
        memory = self._memory
        with memory.lock:
            memory.collect()
            pages = range(address, address + num_bytes, self.page_bytes)
            handle_of = dict(zip(pages, heap.handles(offset, num_bytes), strict=True))
            if self._stale(handle_of):
                memory.record_fence().wait()
                memory.collect()
            before = {page: self._mapped[page] for page in self._stale(handle_of)}
            missing = [page for page in pages if page in before or page not in self._mapped]
            try:
                self._unmap_now(list(before))
                memory.map_pages([(page, handle_of[page]) for page in missing], clear=False)
            except (CapacityError, BackendError):
                gone = [(page, handle) for page, handle in before.items() if page not in self._mapped]
                memory.insist(lambda: memory.map_pages(gone, clear=False))
                self._mapped.update(gone)
                raise
            for page in pages:
                self._mapped[page] = handle_of[page]
                self._leaving.pop(page, None)

    def _stale(self, handle_of: dict[int, int]) -> list[int]:
        """The pages that lead to another handle."""
        return [page for page, handle in handle_of.items() if self._mapped.get(page, handle) != handle]

    def unmap(self, address: int, num_bytes: int) -> None:
        memory = self._memory
        with memory.lock:
            pages = range(address, address + num_bytes, self.page_bytes)
            staying = [page for page in pages if page in self._mapped and page not in self._leaving]
            if not staying:
                return
            fence = memory.record_fence()
            self._num_unmaps += 1
            number = self._num_unmaps
            self._leaving.update(dict.fromkeys(staying, number))
            memory.defer(fence, lambda: self._unmap_left(staying, number))

    def _unmap_left(self, pages: list[int], number: int) -> None:
        """Unmap the pages that still leave by unmapping `number`. May be called again after a failure."""
        self._unmap_now([page for page in pages if self._leaving.get(page) == number])

    def _unmap_now(self, pages: list[int]) -> None:
        """Unmap ascending pages, whose steps have ended."""
        for first, num_bytes in page_runs(pages, self.page_bytes):
            self._memory.driver.unmap(first, num_bytes)
            for page in range(first, first + num_bytes, self.page_bytes):
                del self._mapped[page]
                self._leaving.pop(page, None)
