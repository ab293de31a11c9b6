"""`HugePageMove`: bytes mapped from a file come to lie in huge pages of the process's own, at the same addresses.

Why: a file's pages in the system's cache are 4 KiB wherever memory has been in use for a while, and weights are read
from beginning to end in every step: one token after another of a 0.6B model at 17.5 to 20 tokens/s from such pages and
at 26 from huge ones (a Xeon with AMX; docs/benchmarks.md).
Not for memory that anybody writes, nor a way to get huge pages for new memory: that is `Heap.prefer_huge_pages`.

A piece at a time is copied into new memory, which then takes the place of the file's pages (mremap): readers in other
threads see the same bytes before, during and after it, and nobody's pointer changes. What is not a whole piece of
aligned huge pages at either end stays where it is, as does everything from the first call on that the system refuses.
(Linux looks at all limits before mremap takes the old pages away; only a kernel without memory for its own records
could fail after that, and leave nothing at those addresses.)

Cost: memory for the bytes, which other processes that map the file no longer share, and beside them that of one piece;
a copy of all bytes by a thread of low priority (0.3 s a GiB; several seconds in a virtual machine whose host has to
find the memory first). Other threads wait for a page fault at most as long as one mremap takes, some microseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import threading
import weakref
from pathlib import Path

import numpy as np

from quire.memory.free_memory import count_moved
from quire.memory.heap import HUGE_PAGE_BYTES

__all__ = ["HugePageMove", "huge_pages_are_given"]

_PIECE_BYTES = 16 * HUGE_PAGE_BYTES
_NICENESS = 10  # of the thread that copies
_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_FAILED = ctypes.c_void_p(-1).value

if sys.platform == "linux":
    _libc = ctypes.CDLL(None, use_errno=True)
    _libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    ]  # fmt: skip
    _libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    _libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    _libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class HugePageMove:
    """Begins to move `files`, each uint8 over the whole of a read-only mapping of its own; one that is gone is left.

    Nothing is begun where the system has no huge pages to give.
    """

    def __init__(self, *files: np.ndarray) -> None:
        self._files = [weakref.ref(pages) for pages in files]
        self.num_moved_bytes = 0
        self._thread: threading.Thread | None = None
        if huge_pages_are_given():
            self._thread = threading.Thread(target=self._run, name="quire huge pages", daemon=True)
            self._thread.start()

    def join(self) -> None:
        """Waits for its end."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        for pages in self._files:
            moved = 0
            while num_bytes := _move_next(pages, moved):
                moved += num_bytes
                self.num_moved_bytes += num_bytes


def _move_next(of: weakref.ref[np.ndarray], moved: int) -> int:
    """Bytes of the next piece, behind those that were moved; 0: none was. The mapping is held meanwhile, and let go
    between two pieces."""
    pages = of()
    if pages is None:
        return 0
    start, stop = pages.ctypes.data, pages.ctypes.data + pages.size
    address = _round_up(start) + moved
    num_bytes = min(_PIECE_BYTES, (stop - address) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
    if num_bytes <= 0 or not _move(address, num_bytes):
        return 0
    count_moved(pages, num_bytes)
    return num_bytes


def _move(address: int, num_bytes: int) -> bool:
    """Whether the bytes now lie in new memory; whole aligned huge pages."""
    around = num_bytes + HUGE_PAGE_BYTES  # so that an aligned range lies within
    writable = mmap.PROT_READ | mmap.PROT_WRITE
    found = _libc.mmap(None, around, writable, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if found == _FAILED:
        return False
    new = _round_up(found)
    moved = False
    if _libc.madvise(new, num_bytes, mmap.MADV_HUGEPAGE) == 0:
        ctypes.memmove(new, address, num_bytes)
        moved = (
            _libc.mprotect(new, num_bytes, mmap.PROT_READ) == 0
            and _libc.mremap(new, num_bytes, num_bytes, _MREMAP_MAYMOVE | _MREMAP_FIXED, address) == address
        )
    if moved:  # and the two ends are left; whoever maps memory between the calls is not in them
        _unmap(found, new)
        _unmap(new + num_bytes, found + around)
    else:
        _unmap(found, found + around)
    return moved


def _unmap(start: int, stop: int) -> None:
    if start < stop:
        _libc.munmap(start, stop - start)


def _round_up(address: int) -> int:
    return -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


def huge_pages_are_given() -> bool:
    """Whether the system gives huge pages where they are asked for."""
    try:
        return "[never]" not in _ENABLED.read_text()
    except OSError:  # not Linux, or a kernel without them
        return False
