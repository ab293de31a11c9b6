"""Whether this machine can map one piece of memory at several chosen addresses.

Cost: some twenty system calls, about 100 us. A success of the real calls is cached; a failure is not, as it may come
from a temporary lack of memory or descriptors.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys

from quire.memory.placement.system_calls import SystemCalls

__all__ = ["unsupported_reason"]

_works = False  # whether the real calls have worked


def unsupported_reason(calls: SystemCalls | None = None) -> str | None:
    """None if placement heaps work here, else the reason in one sentence for a user."""
    global _works
    if calls is not None:
        return _try(calls)
    reason = None if _works else _try(SystemCalls())
    _works = reason is None
    return reason


def _try(calls: SystemCalls) -> str | None:
    if sys.platform != "linux":
        return f"it needs Linux, this is {sys.platform}"
    if not hasattr(os, "memfd_create"):
        return "this Python was built without memfd_create"
    page = mmap.PAGESIZE
    action = "making an anonymous file (memfd_create)"
    try:
        with contextlib.ExitStack() as undo:
            fd = calls.memfd_create("quire-probe")
            undo.callback(calls.close, fd)
            action = "giving it memory (ftruncate, fallocate)"
            calls.ftruncate(fd, page)
            calls.fallocate(fd, 0, page)
            action = "reserving addresses (mmap)"
            address = calls.reserve(3 * page)
            undo.callback(calls.munmap, address, 3 * page)
            action = "mapping it at two addresses (mmap MAP_FIXED)"
            for place in (address, address + page):
                calls.map(place, page, fd, 0, populate=True)
                calls.keep_from_children(place, page)
            ctypes.c_uint8.from_address(address).value = 7
            if ctypes.c_uint8.from_address(address + page).value != 7:
                return "two mappings of one page do not show the same bytes here"
            action = "unmapping it and giving its memory back (mmap, fallocate PUNCH_HOLE)"
            calls.unmap(address, 2 * page)
            calls.punch_hole(fd, 0, page)
            if calls.committed_bytes(fd) != 0:
                return "memory given back by punching a hole stays taken here"
    except OSError as error:
        return f"{action} failed: {error}"
    return None
