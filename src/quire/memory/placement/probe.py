"""Whether this machine can map one piece of memory at several addresses of our choice.

Cost: some twenty system calls, about 100 us; that the real calls work is kept (that they do not may be for want of
memory or descriptors, and change).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys

from quire.memory.placement.system_calls import SystemCalls

__all__ = ["why_not"]

_works = False  # tried with the real calls


def why_not(calls: SystemCalls | None = None) -> str | None:
    """None if placement heaps work here, else the reason in one sentence for people."""
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
    what = "making an anonymous file (memfd_create)"
    try:
        with contextlib.ExitStack() as undo:
            fd = calls.memfd_create("quire-probe")
            undo.callback(calls.close, fd)
            what = "giving it memory (ftruncate, fallocate)"
            calls.ftruncate(fd, page)
            calls.fallocate(fd, 0, page)
            what = "reserving addresses (mmap)"
            address = calls.reserve(3 * page)
            undo.callback(calls.munmap, address, 3 * page)
            what = "mapping it at two addresses (mmap MAP_FIXED)"
            for place in (address, address + page):
                calls.map(place, page, fd, 0, populate=True)
                calls.keep_from_children(place, page)
            ctypes.c_uint8.from_address(address).value = 7
            if ctypes.c_uint8.from_address(address + page).value != 7:
                return "two mappings of one page do not show the same bytes here"
            what = "unmapping it and giving its memory back (mmap, fallocate PUNCH_HOLE)"
            calls.unmap(address, 2 * page)
            calls.punch_hole(fd, 0, page)
            if calls.committed_bytes(fd) != 0:
                return "memory given back by punching a hole stays taken here"
    except OSError as error:
        return f"{what} failed: {error}"
    return None
