"""`MemoryShortage`: whether the system is short of memory, and of how much.

The system is the machine and every control group of this process. It is short from when less than `begin` of the memory
of one of them is available, until `end` is of all: what is given back below one and not up to the other would be asked
for again at once.

Cost: a reading, some 100 us.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.memory.free_memory import memory_rooms

__all__ = ["MemoryShortage"]


class MemoryShortage:
    """See the module's text. read: gives (all, available) bytes of each of them, none where nothing is known."""

    def __init__(
        self,
        read: Callable[[], Sequence[tuple[int, int]]] = memory_rooms,
        *,
        begin: float = 0.05,
        end: float = 0.10,
    ) -> None:
        self.read = read
        self.begin = begin
        self.end = end
        self.is_on = False
        """As of the last reading."""

    def missing_bytes(self) -> int:
        """Takes a reading: what has to be given back until the system is not short any more; 0 where it is not."""
        rooms = self.read()
        missing = max((int(total * self.end) - available for total, available in rooms), default=0)
        begins = any(available < total * self.begin for total, available in rooms)
        self.is_on = missing > 0 and (self.is_on or begins)
        return missing if self.is_on else 0
