"""Memory that values are read into, used again when nobody refers to it any more.

Fresh memory for each value would be a page fault for each 4 KiB of it, and two calls to the system that stop the
process's other threads at theirs: as much time as the reading.

Invariants
    M1  memory is handed out again only after the last view of it is gone.
    M2  what waits to be used again is at most `MAX_WAITING_BYTES`.

Cost: a few us; a size that nothing waits for is taken fresh.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque

import numpy as np

__all__ = ["MAX_WAITING_BYTES", "ReadBuffers"]

MAX_WAITING_BYTES = 16 << 20


class ReadBuffers:
    """May be used by several threads."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[np.ndarray]] = {}
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._back: deque[np.ndarray] = deque()  # finalizers may run anywhere, within the lock too

    def take(self, num_bytes: int) -> memoryview:
        """Memory of just so many bytes, whatever they are; it comes back when no view of it is left."""
        with self._lock:
            self._sort_in()
            same = self._waiting.get(num_bytes)
            memory = same.pop() if same else None
            if memory is not None:
                self._num_bytes -= num_bytes
        if memory is None:
            memory = np.empty(num_bytes, np.uint8)
        handed_out = memory.view()
        weakref.finalize(handed_out, self._back.append, memory).atexit = False
        return handed_out.data

    def _sort_in(self) -> None:
        """Of what has come back, as much as may wait."""
        while self._back:
            memory = self._back.popleft()
            if self._num_bytes + memory.nbytes <= MAX_WAITING_BYTES:
                self._waiting.setdefault(memory.nbytes, []).append(memory)
                self._num_bytes += memory.nbytes
