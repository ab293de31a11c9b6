"""Waits for a condition of another thread or process, however busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(reached: Callable[[], T], seconds: float = 120, pause_s: float = 0.01) -> T:
    """The first true value of `reached()`. Fails after so many seconds, which no machine of a test run needs."""
    end = time.monotonic() + seconds
    while not (value := reached()):
        assert time.monotonic() < end, f"not reached within {seconds} s"
        time.sleep(pause_s)
    return value
