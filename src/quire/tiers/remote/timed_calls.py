"""Calls that may hang, made in threads of their own: the caller waits no longer than its exchange allows.

For a medium whose calls have no time-out (a file system of another machine), and for several calls at once. A thread
whose call hangs ends with the call; meanwhile the other threads go on, and with all of them hanging a call times out.

Invariants
    C1  `run` returns or raises within the exchange's time. A result that comes later is dropped.

Cost: two switches between threads for each call, some 50 us.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from quire.tiers.remote.limited_socket import Allowance

__all__ = ["TimedCalls"]

Result = TypeVar("Result")
_JOIN_S = 1.0


class _TimedCall:
    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.done = threading.Event()
        self.result: Any = None
        self.error: Exception | None = None


class TimedCalls:
    """See the module's text. num_threads: at most; they start as they are needed."""

    def __init__(self, name: str, num_threads: int, allowance: Allowance) -> None:
        self._name = name
        self._num_threads = num_threads
        self._allowance = allowance
        self._changed = threading.Condition()
        self._waiting: deque[_TimedCall] = deque()
        self._threads: list[threading.Thread] = []
        self._num_idle = 0
        self._closed = False

    def run(self, functions: Sequence[Callable[[], Result]]) -> list[Result]:
        """The result of each function, called at once as far as there are threads. *raises:* TimeoutError; the first
        error of a function."""
        seconds, num_bytes = self._allowance.seconds_left(), self._allowance.bytes_left()
        calls = [_TimedCall(self._within(function, seconds, num_bytes)) for function in functions]
        with self._changed:
            if self._closed:
                raise OSError("this store was closed")
            self._waiting.extend(calls)
            missing = min(len(self._waiting) - self._num_idle, self._num_threads - len(self._threads))
            for _ in range(missing):
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify_all()
        try:
            for call in calls:
                if not call.done.wait(self._allowance.seconds_left()):
                    raise TimeoutError("the time for this exchange is over")
                if call.error is not None:
                    raise call.error
        finally:
            with self._changed:
                for call in calls:
                    if not call.done.is_set() and call in self._waiting:
                        self._waiting.remove(call)
        return [call.result for call in calls]

    def _within(self, function: Callable[[], Result], seconds: float, num_bytes: int) -> Callable[[], Result]:
        """The function in an exchange of the thread that runs it."""

        def run() -> Result:
            with self._allowance.exchange(seconds, num_bytes):
                return function()

        return run

    def _work(self) -> None:
        while True:
            with self._changed:
                self._num_idle += 1
                self._changed.wait_for(lambda: self._waiting or self._closed)
                self._num_idle -= 1
                if not self._waiting:
                    return
                call = self._waiting.popleft()
            try:
                call.result = call.function()
            except Exception as error:
                call.error = error
            call.done.set()

    def close(self) -> None:
        """Ends the threads, but for those whose call hangs."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_JOIN_S)
