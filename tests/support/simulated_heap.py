"""A simulated machine without memory: the contract of a placement back end with any page size, and a price for each
call.

For policies that are meant for devices whose pages are 2 MiB and whose calls are slow. It has no bytes: no tensors, and
copies are only counted. It refuses at once faults that a real machine would show later: unaligned addresses, mapping
beyond a heap or outside a reservation, giving back or dropping mapped or nonexistent memory.

Cost: O(pages) a call.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.errors import BackendError, InvariantError
from quire.memory.placement.backend import MappingBudget

__all__ = ["SimulatedBackend"]


@dataclass(eq=False)
class _Memory:
    """A heap: its size, and the pages of it that memory is behind."""

    num_bytes: int
    committed: set[int] = field(default_factory=set)
    huge: set[int] = field(default_factory=set)  # offsets of huge pages


class SimulatedBackend:
    """Pages of `page_bytes`, `max_bytes` of memory and `max_mappings` at most (None: no limit).

    huge_bytes: of a huge page, 0 for none; `gives_huge` says whether any is to be had.
    costs_us: the price of a call by its name (reserve, release, make_heap, drop_heap, commit, give_back, map, unmap,
        copy); of those not named 0. page_costs_us: the same for each page of a call.
    merges: whether neighbours are one call and one mapping, as on Linux; a CUDA device maps piece by piece.

    calls counts what was called, time_us what it cost.
    """

    def __init__(
        self,
        page_bytes: int = 2 << 20,
        *,
        max_bytes: int | None = None,
        max_mappings: int | None = None,
        merges: bool = False,
        huge_bytes: int = 0,
        costs_us: Mapping[str, float] | None = None,
        page_costs_us: Mapping[str, float] | None = None,
    ) -> None:
        self.page_bytes = page_bytes
        self.huge_bytes = huge_bytes
        self.gives_huge = True  # whether there is a huge page to be had
        self.merges = merges
        self.budget = MappingBudget(max_mappings, "simulated mappings")
        self.calls: Counter[str] = Counter()
        self.time_us = 0.0
        self._max_bytes = max_bytes
        self._costs_us = dict(costs_us or {})
        self._page_costs_us = dict(page_costs_us or {})
        self._next_address = page_bytes
        self._reserved: dict[int, int] = {}  # address -> bytes
        self._heaps: list[_Memory] = []
        self._mapped: dict[int, tuple[_Memory, int]] = {}  # page address -> heap and offset
        self._translated: set[int] = set()  # addresses at which a huge page is translated as one

    def mapped_at(self, address: int) -> tuple[Any, int] | None:
        """The heap and offset that the page at `address` leads to."""
        return self._mapped.get(address)

    @property
    def num_mapped_pages(self) -> int:
        return len(self._mapped)

    def is_huge(self, heap: Any, offset: int) -> bool:
        return offset in heap.huge

    def is_translated_as_one(self, address: int) -> bool:
        """Whether one call has mapped all of the huge page that lies at this address, and nothing of it anew since."""
        return address in self._translated

    def reserve(self, num_bytes: int, alignment: int) -> int:
        self._charge("reserve", num_bytes)
        address = -(-self._next_address // alignment) * alignment
        # A page between reservations that belongs to none, so that running over is found.
        self._next_address = address + num_bytes + self.page_bytes
        self._reserved[address] = num_bytes
        return address

    def release(self, address: int, num_bytes: int) -> None:
        self._charge("release", num_bytes)
        self._expect(
            self._reserved.pop(address, None) == num_bytes, f"no reservation of {num_bytes} at {address}"
        )
        for page in self._pages(address, num_bytes):
            self._mapped.pop(page, None)
        self._translate(address, num_bytes)

    def make_heap(self, num_bytes: int) -> _Memory:
        self._charge("make_heap", num_bytes)
        heap = _Memory(num_bytes)
        self._heaps.append(heap)
        return heap

    def drop_heap(self, heap: _Memory) -> None:
        self._charge("drop_heap", heap.num_bytes)
        self._expect(
            all(other is not heap for other, _ in self._mapped.values()), "a dropped heap is still mapped"
        )
        self._heaps.remove(heap)

    def commit(self, heap: _Memory, offset: int, num_bytes: int) -> None:
        pages = set(self._heap_pages("commit", heap, offset, num_bytes))
        taken = sum(len(other.committed) for other in self._heaps)
        more = len(pages - heap.committed)
        if self._max_bytes is not None and (taken + more) * self.page_bytes > self._max_bytes:
            raise OSError(
                errno.ENOMEM, f"{taken} pages of {self.page_bytes} bytes are taken, no room for {more} more"
            )
        heap.committed |= pages

    def commit_huge(self, heap: _Memory, offset: int) -> bool:
        pages = self._heap_pages("commit_huge", heap, offset, self.huge_bytes)
        self._expect(offset % self.huge_bytes == 0, f"no huge page begins at {offset}")
        self._expect(not heap.committed & set(pages), f"a huge page is to replace memory at {offset}")
        if not self.gives_huge:
            return False
        self.commit(heap, offset, self.huge_bytes)
        heap.huge.add(offset)
        return True

    def give_back(self, heap: _Memory, offset: int, num_bytes: int) -> None:
        pages = set(self._heap_pages("give_back", heap, offset, num_bytes))
        mapped = {at for other, at in self._mapped.values() if other is heap}
        self._expect(not pages & mapped, f"memory at {sorted(pages & mapped)} is given back while mapped")
        heap.committed -= pages
        if self.huge_bytes:
            heap.huge -= {page - page % self.huge_bytes for page in pages}

    def map(self, address: int, num_bytes: int, heap: _Memory, offset: int, *, populate: bool) -> None:
        heap_pages = self._heap_pages("map", heap, offset, num_bytes)
        self._expect(set(heap_pages) <= heap.committed, f"no memory behind bytes {offset} of a heap to map")
        self._expect_reserved(address, num_bytes)
        for page, at in zip(self._pages(address, num_bytes), heap_pages, strict=True):
            self._mapped[page] = (heap, at)
        self._translate(address, num_bytes)
        if self.huge_bytes and (offset - address) % self.huge_bytes == 0:
            first = -(-offset // self.huge_bytes) * self.huge_bytes
            whole = range(first, offset + num_bytes - self.huge_bytes + 1, self.huge_bytes)
            self._translated |= {address + at - offset for at in whole if at in heap.huge}

    def unmap(self, address: int, num_bytes: int) -> None:
        self._charge("unmap", num_bytes)
        self._expect_reserved(address, num_bytes)
        for page in self._pages(address, num_bytes):
            self._mapped.pop(page, None)
        self._translate(address, num_bytes)

    def copy(
        self, source: _Memory, source_offset: int, target: _Memory, target_offset: int, num_bytes: int
    ) -> None:
        self._charge("copy", num_bytes)
        for heap, offset in ((source, source_offset), (target, target_offset)):
            page = offset - offset % self.page_bytes
            self._expect(page in heap.committed, f"no memory behind bytes {offset} of a heap to copy")

    def heap_address(self, heap: _Memory) -> int:
        raise BackendError("expected memory with bytes in it, got a simulated one, which has none")

    def committed_bytes(self, heap: _Memory) -> int:
        return len(heap.committed) * self.page_bytes

    def tensor(self, address: int, num_bytes: int, dtype: Any, owner: Any) -> Any:
        raise BackendError("expected memory with bytes in it, got a simulated one, which has none")

    def _translate(self, address: int, num_bytes: int) -> None:
        """What is mapped anew is translated page by page, unless the caller says more."""
        if self.huge_bytes:
            first = address - address % self.huge_bytes
            self._translated -= set(range(first, address + num_bytes, self.huge_bytes))

    def _charge(self, name: str, num_bytes: int) -> None:
        self.calls[name] += 1
        pages = -(-num_bytes // self.page_bytes)
        self.time_us += self._costs_us.get(name, 0.0) + pages * self._page_costs_us.get(name, 0.0)

    def _pages(self, start: int, num_bytes: int) -> range:
        self._expect(
            start % self.page_bytes == 0 and num_bytes % self.page_bytes == 0,
            f"{num_bytes} bytes at {start} are not whole pages of {self.page_bytes}",
        )
        return range(start, start + num_bytes, self.page_bytes)

    def _heap_pages(self, name: str, heap: _Memory, offset: int, num_bytes: int) -> range:
        self._charge(name, num_bytes)
        self._expect(heap in self._heaps, f"{name} in a heap that was dropped")
        self._expect(
            offset >= 0 and offset + num_bytes <= heap.num_bytes, f"{name} beyond a heap, at {offset}"
        )
        return self._pages(offset, num_bytes)

    def _expect_reserved(self, address: int, num_bytes: int) -> None:
        inside = any(
            start <= address and address + num_bytes <= start + size for start, size in self._reserved.items()
        )
        self._expect(inside, f"{num_bytes} bytes at {address} lie in no reservation")

    def _expect(self, right: bool, what: str) -> None:
        if not right:
            raise InvariantError(f"simulated memory: {what}")
