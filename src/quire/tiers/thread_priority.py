"""Raises the niceness of a thread, so that other threads go first; never lowers it."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

__all__ = ["give_way"]


def give_way(nice: int) -> None:
    """Raises this thread's niceness to at least `nice`; does nothing if the system refuses.

    A process started under `nice` may have a higher value already, which stays: lowering it is a privilege.
    """
    thread = threading.get_native_id()
    with suppress(OSError):
        if os.getpriority(os.PRIO_PROCESS, thread) < nice:
            os.setpriority(os.PRIO_PROCESS, thread, nice)
