"""`MapAhead`: a thread that makes the driver's calls while steps run, so that no step waits for them.

One thread gives ranges their memory a step ahead, another unmaps behind fences. A hint, not a promise: a step commits
its memory itself and finds it there if the thread was in time. A card without memory ends no thread; the step gets the
error.

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
    """A queue of work. Any thread may call it. name: of the thread."""

    def __init__(self, name: str = "quire-map-ahead") -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def want(self, work: Callable[[], object]) -> None:
        """Have the thread call `work`, after everything that was wanted before."""
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._queue.put(work)

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
        while (work := self._queue.get()) is not None:
            with contextlib.suppress(QuireError):  # the step's own call meets it again, and raises
                work()
