"""Work that the event loop does not wait for: in a thread, and where it is not ours, for so many seconds only.

Two kinds. `run_here`: our own work, of which much may come at once; few threads take it one after the other. `within`:
somebody else's program, a chat template, which may never end; each run has a thread of its own, so that it can be ended
without harm to what another one does.

Cost: some 0.1 ms a call.
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


class _Ended(BaseException):
    """Raised in the thread of a function that has had its time; no `except Exception` of its own holds it up."""


class Threads:
    """num_threads: of `run_here`; num_guests: functions that run `within` a time at once, others wait."""

    def __init__(self, num_threads: int = 2, num_guests: int = 4) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="quire-texts")
        self._guests = asyncio.Semaphore(num_guests)

    async def run_here(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """What it returns or raises."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    async def within(self, seconds: float, function: Callable[..., Result], *arguments: Any) -> Result:
        """What it returns or raises. *raises:* TimeoutError: it has not ended by then, and is made to."""
        async with self._guests:
            loop = asyncio.get_running_loop()
            done: asyncio.Future[Result] = loop.create_future()

            def tell(result: Any, error: BaseException | None) -> None:
                if done.done():
                    return
                if error is None:
                    done.set_result(result)
                else:
                    done.set_exception(error)

            def run() -> None:
                result: Any = None
                failure: BaseException | None = None
                with suppress(_Ended):
                    try:
                        result = function(*arguments)
                    except Exception as error:
                        failure = error
                    with suppress(RuntimeError):  # the loop is closed, nobody waits any more
                        loop.call_soon_threadsafe(tell, result, failure)

            thread = threading.Thread(target=run, name="quire-guest", daemon=True)
            thread.start()
            try:
                return await asyncio.wait_for(done, seconds)
            except (TimeoutError, asyncio.CancelledError):
                _end(thread)
                raise


def _end(thread: threading.Thread) -> None:
    """Has the interpreter raise in it at its next instruction; one that has ended already is left alone."""
    if thread.ident is not None and thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Ended))
