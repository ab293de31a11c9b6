"""Threads outside the event loop: result, error, and time-out."""

from __future__ import annotations

import asyncio
import threading
from itertools import count
from typing import Any

import pytest

from quire.server.threads import Threads


def test_results_and_errors_come_back_from_other_threads() -> None:
    def where(text: str) -> tuple[str, str]:
        return text, threading.current_thread().name

    def fail() -> None:
        raise ValueError("no")

    async def main() -> None:
        off_loop = Threads()
        assert (await off_loop.run(where, "a"))[1].startswith("quire-texts")
        assert await off_loop.run_with_timeout(60, where, "b") == ("b", "quire-timed")
        for run in (off_loop.run(fail), off_loop.run_with_timeout(60, fail)):
            with pytest.raises(ValueError, match="no"):
                await run

    asyncio.run(main())


def test_what_never_ends_is_ended() -> None:
    """Also where it catches every Exception, as templates' callers do; the next one has its place."""
    ended, begun = threading.Event(), threading.Event()

    def forever() -> None:
        try:
            begun.set()
            for _ in count():
                try:
                    sum(range(10))
                except Exception:
                    pytest.fail("it is no Exception")
        finally:
            ended.set()

    async def main() -> Any:
        off_loop = Threads(num_timed=1)
        with pytest.raises(TimeoutError):
            await off_loop.run_with_timeout(0.001, forever)
        assert await asyncio.to_thread(ended.wait, 10)
        left = asyncio.create_task(off_loop.run_with_timeout(60, forever))
        begun.clear()
        ended.clear()
        await asyncio.to_thread(begun.wait, 10)
        left.cancel()
        assert await asyncio.to_thread(ended.wait, 10)
        return await off_loop.run_with_timeout(60, lambda: 5)

    assert asyncio.run(main()) == 5
