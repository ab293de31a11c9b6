"""Memory for values that are read, reused once the last reference to it is gone.

Fresh memory for each value would cost a page fault for each 4 KiB, and two system calls that stop the page faults of
the process's other threads: as much time as the reading.

Invariants
    M1  memory is handed out again only after the last view of it is gone.
    M2  at most `MAX_WAITING_BYTES` wait to be reused.

Cost: a few us; fresh memory if no buffer of that size waits.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque

import numpy as np

__all__ = ["MAX_WAITING_BYTES", "ReadBuffers"]

MAX_WAITING_BYTES = 16 << 20


class ReadBuffers:
    """Buffers by size. Several threads may use it."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[np.ndarray]] = {}
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._back: deque[np.ndarray] = deque()  # a finalizer may run anywhere, also within the lock

    def acquire(self, num_bytes: int) -> memoryview:
        """Memory of exactly `num_bytes`, with any content; it returns here when its last view is gone."""
        with self._lock:
            self._collect_returned()
            same = self._waiting.get(num_bytes)
            memory = same.pop() if same else None
            if memory is not None:
                self._num_bytes -= num_bytes
        if memory is None:
            memory = np.empty(num_bytes, np.uint8)
        handed_out = memory.view()
        weakref.finalize(handed_out, self._back.append, memory).atexit = False
        return handed_out.data

    def _collect_returned(self) -> None:
        """Keeps returned memory, up to the limit."""
        while self._back:
            memory = self._back.popleft()
            if self._num_bytes + memory.nbytes <= MAX_WAITING_BYTES:
                self._waiting.setdefault(memory.nbytes, []).append(memory)
                self._num_bytes += memory.nbytes
