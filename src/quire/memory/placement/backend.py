"""The calls that a placement heap needs of a machine: address ranges, memory, and mapping memory into ranges.

They are few, so that a device can offer them too. Aliasing means mapping the same bytes of a heap at two addresses.
Back ends: `memfd` (Linux), a card's (`quire.devices.cuda.driver_placement`), and for tests one without memory
(`tests/support/simulated_heap.py`).

Back ends count no users: `placement_heap.PlacementHeap` counts references and mappings and undoes a failed change.

Invariants
    B1  a call that fails raises OSError, CapacityError or BackendError, and has not released the mapping it was to
        replace: the caller maps the old state again.
    B2  all addresses, offsets and sizes are multiples of `page_bytes`.
    B3  a heap's huge page stays one until any of it is given back.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from quire.byte_counter import ByteCounter
from quire.errors import CapacityError

__all__ = ["MappingBudget", "PlacementBackend"]


class MappingBudget:
    """The limit of mappings and their present number. All heaps under one limit share it.

    Any thread may check and add. Threads that check at the same time may exceed the limit by one change each.

    limit: maximum of mappings; None for no limit. description: the limit's name and remedy, for error messages.
    """

    def __init__(self, limit: int | None, description: str = "mappings") -> None:
        self.limit = limit
        self.description = description
        self._used = ByteCounter()

    @property
    def used(self) -> int:
        return self._used.value

    def check(self, more: int) -> None:
        """*raises:* CapacityError if `more` mappings do not fit."""
        if self.limit is not None and more > 0 and (used := self.used) + more > self.limit:
            raise CapacityError(
                f"expected room for {more} more {self.description}: {used} of {self.limit} are in use"
            )

    def add(self, more: int) -> None:
        """Count `more` mappings. A finalizer may call it too."""
        self._used.add(more)


class PlacementBackend(Protocol):
    """See the module's text. `heap` is a result of `make_heap`."""

    page_bytes: int
    huge_bytes: int  # of a huge page, which is read faster when mapped as a whole; 0: none
    merges: bool  # one call maps neighbours in both spaces, as one mapping
    budget: MappingBudget

    def reserve(self, num_bytes: int, alignment: int) -> int:
        """The address, a multiple of `alignment`, of `num_bytes` of reserved, unmapped addresses."""
        ...

    def release(self, address: int, num_bytes: int) -> None:
        """Give a reservation back, mapped or not."""
        ...

    def make_heap(self, num_bytes: int) -> Any:
        """A heap of `num_bytes` that can be mapped, none of it committed yet."""
        ...

    def drop_heap(self, heap: Any) -> None:
        """Free a heap without mappings."""
        ...

    def commit(self, heap: Any, offset: int, num_bytes: int) -> None:
        """Commit memory for these bytes: afterwards mapping and touching them cannot fail for want of memory."""
        ...

    def commit_huge(self, heap: Any, offset: int) -> bool:
        """Commit a huge page for the `huge_bytes` from `offset` on, a multiple of them, none of them committed yet.

        Returns False if the machine has none; nothing has changed then."""
        ...

    def give_back(self, heap: Any, offset: int, num_bytes: int) -> None:
        """Return that memory to the machine; its content is lost."""
        ...

    def map(self, address: int, num_bytes: int, heap: Any, offset: int, *, populate: bool) -> None:
        """Map these bytes of the heap at that address, replacing its mapping.

        populate: enter the pages into the page table now; otherwise each at its first touch."""
        ...

    def unmap(self, address: int, num_bytes: int) -> None:
        """Leave these addresses reserved, without memory."""
        ...

    def copy(self, source: Any, source_offset: int, target: Any, target_offset: int, num_bytes: int) -> None:
        """Copy bytes between heaps without further mappings."""
        ...

    def heap_address(self, heap: Any) -> int:
        """An address at which all of a heap can be reached; only committed bytes may be touched."""
        ...

    def committed_bytes(self, heap: Any) -> int:
        """Memory the heap takes, as the machine counts it."""
        ...

    def tensor(self, address: int, num_bytes: int, dtype: torch.dtype, owner: Any) -> torch.Tensor:
        """A 1-D tensor over addresses of a reservation, which keeps `owner` alive; making it touches no address."""
        ...
