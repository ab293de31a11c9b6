"""`HugePageMove`: moves bytes mapped from a file into huge pages of the process's own, at the same addresses.

Why: a file's pages in the page cache are 4 KiB wherever memory has been in use for a while, and every step reads all
weights from beginning to end: single-token decoding of a 0.6B model runs at 17.5 to 20 tokens/s from such pages and at
26 from huge ones (a Xeon with AMX; docs/benchmarks.md). Not for memory that is written, nor a way to get huge pages for
new memory: that is `Heap.prefer_huge_pages`.

A piece at a time is copied into new memory, which then replaces the file's pages (mremap): readers in other threads see
the same bytes before, during and after it, and all pointers stay valid. The partial pieces at either end stay where
they are, as does everything from the first call on that the system refuses. (Linux checks all limits before mremap
takes the old pages away; only a kernel without memory for its own records could fail after that, and leave nothing at
those addresses.)

Cost: memory for the bytes, which other processes that map the file no longer share, and that of one piece more; a copy
of all bytes by a thread of low priority (0.3 s a GiB; several seconds in a virtual machine whose host has to find the
memory first). Other threads wait for a page fault at most as long as one mremap takes, some microseconds.
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

__all__ = ["HugePageMove", "has_huge_pages"]

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
    """Begins to move `files`, each uint8 over the whole of a read-only mapping of its own; skips arrays that are gone.

    If the system has no huge pages, it moves nothing.
    """

    def __init__(self, *files: np.ndarray) -> None:
        self._files = [weakref.ref(pages) for pages in files]
        self.num_moved_bytes = 0
        self._thread: threading.Thread | None = None
        if has_huge_pages():
            self._thread = threading.Thread(target=self._run, name="quire huge pages", daemon=True)
            self._thread.start()

    def join(self) -> None:
        """Waits for the end of the move."""
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


def _move_next(reference: weakref.ref[np.ndarray], moved: int) -> int:
    """Moves the next piece, after `moved` bytes; returns its size, 0 if it was not moved. It references the mapping
    during the move only, so that the mapping may go between two pieces."""
    pages = reference()
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
    """Copies whole aligned huge pages into new memory at the same address; returns whether it succeeded."""
    num_reserved = num_bytes + HUGE_PAGE_BYTES  # contains an aligned range of num_bytes
    writable = mmap.PROT_READ | mmap.PROT_WRITE
    reserved = _libc.mmap(None, num_reserved, writable, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if reserved == _FAILED:
        return False
    new = _round_up(reserved)
    moved = False
    if _libc.madvise(new, num_bytes, mmap.MADV_HUGEPAGE) == 0:
        ctypes.memmove(new, address, num_bytes)
        moved = (
            _libc.mprotect(new, num_bytes, mmap.PROT_READ) == 0
            and _libc.mremap(new, num_bytes, num_bytes, _MREMAP_MAYMOVE | _MREMAP_FIXED, address) == address
        )
    if moved:  # the two ends remain; mappings made since then by other threads do not overlap them
        _unmap(reserved, new)
        _unmap(new + num_bytes, reserved + num_reserved)
    else:
        _unmap(reserved, reserved + num_reserved)
    return moved


def _unmap(start: int, stop: int) -> None:
    if start < stop:
        _libc.munmap(start, stop - start)


def _round_up(address: int) -> int:
    return -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


def has_huge_pages() -> bool:
    """Whether the system gives huge pages on request."""
    try:
        return "[never]" not in _ENABLED.read_text()
    except OSError:  # not Linux, or a kernel without them
        return False
