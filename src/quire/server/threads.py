"""Work outside the event loop, in threads.

`run` is for our own work, which may come in large numbers: few threads run it one after the other. `run_with_timeout`
is for foreign code, a chat template, which may never end: each call has a thread of its own, so that it can be ended
without harm to another call.

Cost: about 0.1 ms a call.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

__all__ = ["Threads"]

Result = TypeVar("Result")


class _TimeIsUpError(BaseException):
    """Raised in the thread of a function whose time is up; an `except Exception` in it does not catch this."""


class Threads:
    """num_threads: of `run`; num_timed: calls of `run_with_timeout` at once, further ones wait."""

    def __init__(self, num_threads: int = 2, num_timed: int = 4) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="quire-texts")
        self._timed = asyncio.Semaphore(num_timed)

    async def run(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """The function's result or error."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    async def run_with_timeout(
        self, seconds: float, function: Callable[..., Result], *arguments: Any
    ) -> Result:
        """The function's result or error. *raises:* TimeoutError: the time was up, and the function was ended."""
        async with self._timed:
            loop = asyncio.get_running_loop()
            done: asyncio.Future[Result] = loop.create_future()

            def set_outcome(result: Any, error: BaseException | None) -> None:
                if done.done():
                    return
                if error is None:
                    done.set_result(result)
                else:
                    done.set_exception(error)

            def call() -> None:
                result: Any = None
                failure: BaseException | None = None
                with suppress(_TimeIsUpError):
                    try:
                        result = function(*arguments)
                    except Exception as error:
                        failure = error
                    with suppress(RuntimeError):  # the loop is closed: there is no waiter
                        loop.call_soon_threadsafe(set_outcome, result, failure)

            thread = threading.Thread(target=call, name="quire-timed", daemon=True)
            thread.start()
            try:
                return await asyncio.wait_for(done, seconds)
            except (TimeoutError, asyncio.CancelledError):
                _end(thread)
                raise


def _end(thread: threading.Thread) -> None:
    """Raises an error in the thread at its next instruction; does nothing to a thread that has ended."""
    if thread.ident is not None and thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(_TimeIsUpError)
        )
