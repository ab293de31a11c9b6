"""Commits memory of a new pool before a prefix is loaded into it.

The first write to a page commits it, by a page fault: 0.2 s for each GiB in huge pages, several seconds in a virtual
machine whose host has to find the memory first. Computing a prompt hides that time; loading a prefix from a tier is
faster and does not. So if a tier has values when an engine starts, a thread of the lowest priority commits the blocks
that will be used first: as many bytes as there are to load, `MAX_BYTES` at most, so that an unused engine still takes
little memory.

Not a reservation: it decides nothing, and stops for a call that gives memory back (`PagedStorage.commit_ahead`).

Cost: a thread for a moment; a call that gives memory back waits for at most `_CHUNK_BYTES`.
"""

from __future__ import annotations

import threading

from quire.memory.block_bytes import BlockStorage
from quire.tiers.thread_priority import give_way

__all__ = ["MAX_BYTES", "MemoryAhead"]

MAX_BYTES = 1 << 30
_CHUNK_BYTES = 8 << 20


class MemoryAhead:
    """Commits the first `num_bytes` of the storage's blocks, `MAX_BYTES` at most; begins at once.

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
        """True if it has ended within `timeout` seconds (None: no limit)."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Stops it at the current chunk. A second call does nothing."""
        self._stopping = True
        self._thread.join()
