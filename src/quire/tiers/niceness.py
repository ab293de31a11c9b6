"""A thread that gives way to others: its niceness, raised and never lowered."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

__all__ = ["give_way"]


def give_way(nice: int) -> None:
    """Has this thread's niceness be `nice` at least; nothing happens where the system does not let it.

    A process that runs under `nice` has more already: less again is a privilege, which nothing here needs.
    """
    thread = threading.get_native_id()
    with suppress(OSError):
        if os.getpriority(os.PRIO_PROCESS, thread) < nice:
            os.setpriority(os.PRIO_PROCESS, thread, nice)
