"""Group commit: threads that store at the same time share one transaction, which one of them makes for all.

Invariants
    Q1  a call returns once its own value was stored, was refused or has failed.
    Q2  one batch is stored at a time; calls that arrive meanwhile form the next one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from quire.tiers.disk.disk_writer import StoreCall

__all__ = ["SharedStores"]

_MAX_BATCH, _MAX_BATCH_BYTES = 64, 64 << 20


@dataclass(eq=False)
class _WaitingStore:
    call: StoreCall
    done: bool = False


class SharedStores:
    """store_batch: stores a batch in one of the waiting threads, and sets the result of each call."""

    def __init__(self, store_batch: Callable[[list[StoreCall]], None]) -> None:
        self._store_batch = store_batch
        self._waiting: deque[_WaitingStore] = deque()
        self._storing = False
        self._stored = threading.Condition()  # guards the two above

    def store(self, call: StoreCall) -> None:
        """Waits until the call is done. *raises:* TierError: it failed."""
        waiting = _WaitingStore(call)
        with self._stored:
            self._waiting.append(waiting)
        while not waiting.done:  # batches before this call's may be full
            with self._stored:
                while self._storing and not waiting.done:
                    self._stored.wait()
                if waiting.done:
                    break
                self._storing = True
                batch = self._next_batch()
            try:
                self._store_batch([entry.call for entry in batch])
            finally:
                with self._stored:
                    for stored in batch:
                        stored.done = True
                    self._storing = False
                    self._stored.notify_all()
        if call.error is not None:
            raise call.error

    def _next_batch(self) -> list[_WaitingStore]:
        batch, num_bytes = [], 0
        while self._waiting and len(batch) < _MAX_BATCH and num_bytes < _MAX_BATCH_BYTES:
            batch.append(self._waiting.popleft())
            num_bytes += batch[-1].call.num_bytes
        return batch
