"""A sum that threads share, and that a finalizer may add to at any point.

The garbage collector may run a finalizer in any thread and at any point, even while that thread has the lock that the
finalizer would need. So `add` takes no lock: it appends, and `value` adds up.

Cost: about 1 us.
"""

from __future__ import annotations

from collections import deque

from quire.process import ForkSafeLock

__all__ = ["ByteCounter"]


class ByteCounter:
    """A sum that begins at 0."""

    def __init__(self) -> None:
        self._sum = 0
        self._changes: deque[int] = deque()
        self._lock = ForkSafeLock()

    def add(self, num_bytes: int) -> None:
        """Add to the sum, from any thread or a finalizer."""
        self._changes.append(num_bytes)

    @property
    def value(self) -> int:
        with self._lock:
            while self._changes:
                num_bytes = self._changes.popleft()
                self._sum += num_bytes
            return self._sum
