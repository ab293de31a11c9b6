"""`HandlePool`: handles of one page of a card's memory, created in batches and used again.

Not an owner: it knows handles without a place, and counts those in use.

    in use    taken; mapped somewhere, or about to be
    free      kept for the next `take`; at most `low_water` of them, the others go back to the card

Invariants
    L1  handles in use and free ones are all that were created and not destroyed: `num_created`.
    L2  `take` never takes `num_created` beyond `limit`; a limit that is lowered takes no handle in use away.
    L3  a call that fails changes nothing but the number of free handles.

Cost: `take` nothing for a free handle, tens of us for a new one. Callers hold the memory's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from quire.devices.cuda.driver_calls import CudaDriver
from quire.errors import ArgumentError, BackendError, CapacityError

__all__ = ["HandlePool"]

_BATCH = 8  # handles created at once, if the card has so many


class HandlePool:
    """Handles of `page_bytes` each.

    low_water: free handles that stay for the next growth. reclaim: called when there are too few; waits for handles
    that a running step still uses, and returns whether it got any.
    """

    def __init__(
        self, driver: CudaDriver, page_bytes: int, reclaim: Callable[[], bool], *, low_water: int = 16
    ) -> None:
        self.page_bytes = page_bytes
        self.low_water = low_water
        self.limit: int | None = None
        self.num_created = 0
        self._driver = driver
        self._reclaim = reclaim
        self._free: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_in_use(self) -> int:
        return self.num_created - len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` handles, whose bytes are undefined.

        *raises:* CapacityError: the card or the limit has not so many; `count` handles of none are taken then.
        """
        while len(self._free) < count:
            try:
                self._create(count - len(self._free))
            except CapacityError:
                if not self._reclaim():
                    self.shed()
                    raise
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken

    def put(self, handles: Iterable[int]) -> None:
        """Take handles back that are mapped nowhere."""
        self._free.extend(handles)
        self.shed()

    def refill(self) -> None:
        """Create handles up to the low-water mark, ahead of a growth; fewer if the card or the limit has not so
        many."""
        try:
            if len(self._free) < self.low_water:
                self._create(self.low_water - len(self._free))
        except CapacityError:
            pass

    def set_limit(self, num_pages: int | None) -> None:
        """The most handles that may exist; None: as many as the card has. Free ones beyond it go at once, used ones as
        they are put back.

        *raises:* ArgumentError: a negative number.
        """
        if num_pages is not None and num_pages < 0:
            raise ArgumentError(f"expected a limit of at least 0 pages, got {num_pages}")
        self.limit = num_pages
        self.shed()

    def trim(self, num_free: int = 0) -> None:
        """Give free handles back to the card, but for `num_free`."""
        self.shed(num_free)

    def shed(self, num_free: int | None = None) -> None:
        """Give free handles back to the card that are beyond `num_free` (the low-water mark) or beyond the limit. A
        handle that the driver does not take back stays free."""
        num_kept = self.low_water if num_free is None else num_free
        if self.limit is not None:
            num_kept = min(num_kept, max(0, self.limit - self.num_in_use))
        while len(self._free) > num_kept:
            try:
                self._driver.destroy(self._free[-1])
            except (CapacityError, BackendError):
                return
            self._free.pop()
            self.num_created -= 1

    def _create(self, missing: int) -> None:
        """Create at least `missing` handles, a batch if possible. *raises:* CapacityError: fewer were created."""
        wanted = max(missing, _BATCH)
        if self.limit is not None:
            wanted = min(wanted, self.limit - self.num_created)
            if wanted < missing:
                raise CapacityError(
                    f"expected room for {missing} more pages of {self.page_bytes} bytes on the card, got "
                    f"{self.num_created} of {self.limit}; close sequences or raise kv_memory"
                )
        for number in range(wanted):
            try:
                self._free.append(self._driver.create(self.page_bytes))
            except CapacityError:
                if number < missing:
                    raise
                return
            self.num_created += 1
