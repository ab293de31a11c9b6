"""Memory of a fresh pool, taken from the system before a prefix is loaded into it.

Memory is committed where it is first written, at a page fault each: 0.2 s for each GiB in huge pages, several seconds
in a virtual machine whose host has to find the memory first. A prompt that is computed hides that; a prefix that comes
from a tier in less time does not. So where a tier has something already when an engine starts, a thread
of the lowest priority has memory put behind the blocks that will be handed out first: as many bytes as there are to
be loaded, `MAX_BYTES` at most, so that an engine still takes little before it is used.

Not a reservation: it decides nothing, and gives way to whoever gives memory back (`PagedStorage.commit_ahead`).

Cost: a thread for a moment; a call of it holds up giving memory back for as long as `_CHUNK_BYTES` take.
"""

from __future__ import annotations

import threading

from quire.memory.block_bytes import BlockStorage
from quire.tiers.niceness import give_way

__all__ = ["MAX_BYTES", "MemoryAhead"]

MAX_BYTES = 1 << 30
_CHUNK_BYTES = 8 << 20


class MemoryAhead:
    """Has memory behind the first `num_bytes` of the storage's blocks, `MAX_BYTES` at most; begins at once.

    block_bytes: of a block.
    """

    def __init__(self, storage: BlockStorage, block_bytes: int, num_bytes: int) -> None:
        self._storage = storage
        self._num_blocks = min(storage.num_blocks, -(-min(num_bytes, MAX_BYTES) // block_bytes))
        self._chunk = max(1, _CHUNK_BYTES // block_bytes)
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="quire-memory", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        give_way(19)
        for first in range(0, self._num_blocks, self._chunk):
            stop = min(first + self._chunk, self._num_blocks)
            if self._stopping or not self._storage.commit_ahead(first, stop):
                return

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it has ended within `timeout` seconds (None: however long it takes)."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Ends it, where it is. Twice is harmless."""
        self._stopping = True
        self._thread.join()
