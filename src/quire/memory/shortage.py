"""`MemoryShortage`: whether the system is short of memory, and by how many bytes.

The system is the machine and every control group of this process. A shortage begins when less than the share `begin` of
one of their memories is available, and ends when the share `end` is available in all: the gap keeps memory that was
just given back from being requested again at once.

Cost: a reading, some 100 us.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.memory.free_memory import memory_rooms

__all__ = ["MemoryShortage"]


class MemoryShortage:
    """See the module's text. read: returns (total, available) bytes of the machine and each group; empty if unknown."""

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
        """Result of the last reading."""

    def missing_bytes(self) -> int:
        """Read memory and return the bytes to give back to end the shortage; 0 without one."""
        rooms = self.read()
        missing = max((int(total * self.end) - available for total, available in rooms), default=0)
        begins = any(available < total * self.begin for total, available in rooms)
        self.is_on = missing > 0 and (self.is_on or begins)
        return missing if self.is_on else 0
