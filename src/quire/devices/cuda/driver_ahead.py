"""`MapAhead`: a thread that gives ranges their memory one step ahead, so that no step waits for the driver's calls.

A hint, not a promise: the step commits its memory itself and finds it there if the thread was in time. A card without
memory ends no thread; the step gets the error.

Cost: a thread from the first `want` on.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

from quire.errors import QuireError

__all__ = ["MapAhead"]


class MapAhead:
    """A queue of work that commits memory. Any thread may call it."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def want(self, commit: Callable[[], object]) -> None:
        """Have the thread call `commit`, after everything that was wanted before."""
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="quire-map-ahead", daemon=True)
                self._thread.start()
            self._queue.put(commit)

    def join(self) -> None:
        """Wait until everything wanted so far was called."""
        done = threading.Event()
        with self._starting:
            if self._thread is None:
                return
            self._queue.put(done.set)
        done.wait()

    def close(self) -> None:
        """End the thread behind everything wanted so far. A later `want` starts another."""
        with self._starting:
            thread, self._thread = self._thread, None
            if thread is None:
                return
            self._queue.put(None)
        thread.join()

    def _work(self) -> None:
        while (commit := self._queue.get()) is not None:
            with contextlib.suppress(QuireError):  # the step's own commit meets it again, and raises
                commit()
