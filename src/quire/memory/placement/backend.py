"""What a placement heap needs of a machine: address ranges, memory, and mapping the one onto the other.

Few calls, such that a device can offer them too; aliasing is mapping the same bytes of a heap at two addresses.
Back ends: `memfd` (Linux), and in the tests one that only keeps books (`tests/support/simulated_heap.py`).

Not counted here: who uses what. `heap.PlacementHeap` counts references and mappings and undoes what fails half way.

Invariants
    B1  a call that fails raises, and has not given up what it was to replace: the caller maps the old state again.
    B2  all addresses, offsets and sizes are multiples of `page_bytes`.
    B3  a heap's huge page stays one until any of it is given back.
"""

from __future__ import annotations

from typing import Any, Protocol

from quire.byte_counter import ByteCounter
from quire.errors import CapacityError

__all__ = ["MappingBudget", "PlacementBackend"]


class MappingBudget:
    """How many mappings may be had, and how many there are. Shared by all heaps that draw on one limit.

    Any thread may ask and add. Threads that ask at once may together go beyond the limit by one change each.

    limit: mappings at most; None for as many as one likes. what: what is limited and what to do, for messages.
    """

    def __init__(self, limit: int | None, what: str = "mappings") -> None:
        self.limit = limit
        self.what = what
        self._used = ByteCounter()

    @property
    def used(self) -> int:
        return self._used.value

    def check(self, more: int) -> None:
        """*raises:* CapacityError if `more` mappings do not fit."""
        if self.limit is not None and more > 0 and (used := self.used) + more > self.limit:
            raise CapacityError(
                f"expected room for {more} more {self.what}: {used} of {self.limit} are in use"
            )

    def add(self, more: int) -> None:
        """From a finalizer too."""
        self._used.add(more)


class PlacementBackend(Protocol):
    """See the module's text. `heap` is whatever `make_heap` returned."""

    page_bytes: int
    huge_bytes: int  # of a huge page: what is mapped a whole one at a time is read faster; 0: there are none
    merges: bool  # one call maps neighbours in both spaces, and they count as one mapping
    budget: MappingBudget

    def reserve(self, num_bytes: int, alignment: int) -> int:
        """An address, a multiple of `alignment`, from which `num_bytes` are ours; nothing is behind them."""
        ...

    def release(self, address: int, num_bytes: int) -> None:
        """Give a reservation back, mapped or not."""
        ...

    def make_heap(self, num_bytes: int) -> Any:
        """Memory that can be mapped, none of it taken yet."""
        ...

    def drop_heap(self, heap: Any) -> None:
        """Give a heap of which nothing is mapped back."""
        ...

    def commit(self, heap: Any, offset: int, num_bytes: int) -> None:
        """Have memory behind these bytes: mapping and touching them fails no more."""
        ...

    def commit_huge(self, heap: Any, offset: int) -> bool:
        """Have a huge page behind the `huge_bytes` from `offset` on, a multiple of them, behind which nothing is yet.

        False: the machine gives none, and nothing has changed."""
        ...

    def give_back(self, heap: Any, offset: int, num_bytes: int) -> None:
        """The machine may use that memory for something else; what was in it is lost."""
        ...

    def map(self, address: int, num_bytes: int, heap: Any, offset: int, *, populate: bool) -> None:
        """These bytes of the heap at that address, in place of what was there.

        populate: enter the pages into the page table now; otherwise as they are touched."""
        ...

    def unmap(self, address: int, num_bytes: int) -> None:
        """Nothing behind these addresses."""
        ...

    def copy(self, source: Any, source_offset: int, target: Any, target_offset: int, num_bytes: int) -> None:
        """Copy bytes between heaps, without mapping them anywhere else."""
        ...

    def heap_address(self, heap: Any) -> int:
        """Where all of a heap can be reached, mapped elsewhere or not; to touch only what was committed."""
        ...

    def committed_bytes(self, heap: Any) -> int:
        """Memory the heap takes, as the machine tells it."""
        ...

    def buffer(self, address: int, num_bytes: int) -> Any:
        """An object with the buffer protocol over a reservation, touching nothing."""
        ...
