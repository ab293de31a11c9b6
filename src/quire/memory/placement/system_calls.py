"""The system calls of a placement heap on Linux, one method each. A failure is an OSError, never a return value.

Not a policy: `memfd` and `placement_heap` decide the order of calls and undo them on failure. Tests pass a subclass
whose calls fail on demand.

Cost: about 1 us of ctypes in addition to the call itself.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

__all__ = ["HUGE_PAGE_BYTES", "SystemCalls"]

HUGE_PAGE_BYTES = 2 << 20

# Linux's values of constants that the standard library lacks in some supported version.
_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MADV_COLLAPSE = 25
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
_FAILED = ctypes.c_void_p(-1).value

if sys.platform == "linux":
    _libc = ctypes.CDLL(None, use_errno=True)
    _mmap = _libc.mmap64 if hasattr(_libc, "mmap64") else _libc.mmap
    _mmap.restype = ctypes.c_void_p
    _mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
    ]  # fmt: skip
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    _libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    _fallocate = _libc.fallocate64 if hasattr(_libc, "fallocate64") else _libc.fallocate
    _fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class SystemCalls:
    """The real calls. Addresses and sizes are in bytes, whole pages."""

    def memfd_create(self, name: str) -> int:
        return os.memfd_create(name, os.MFD_CLOEXEC)

    def ftruncate(self, fd: int, num_bytes: int) -> None:
        os.ftruncate(fd, num_bytes)

    def close(self, fd: int) -> None:
        os.close(fd)

    def reserve(self, num_bytes: int) -> int:
        """Reserve address space without memory; touching it ends the process."""
        return self._map(None, num_bytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)

    def map(self, address: int, num_bytes: int, fd: int, offset: int, *, populate: bool) -> None:
        """Map bytes of the file at a given address, replacing its mapping."""
        flags = mmap.MAP_SHARED | _MAP_FIXED | (mmap.MAP_POPULATE if populate else 0)
        self._map(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset)

    def unmap(self, address: int, num_bytes: int) -> None:
        """Make this address space reserved and without memory again."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        self._map(address, num_bytes, _PROT_NONE, flags)

    def munmap(self, address: int, num_bytes: int) -> None:
        """Release this address space."""
        _check(_libc.munmap(address, num_bytes), "munmap", num_bytes)

    def keep_from_children(self, address: int, num_bytes: int) -> None:
        """Keep the mapping out of child processes, so that they cannot write to it."""
        _check(_libc.madvise(address, num_bytes, mmap.MADV_DONTFORK), "madvise(MADV_DONTFORK)", num_bytes)

    def collapse(self, address: int, num_bytes: int) -> None:
        """Make huge pages of the whole aligned range, which has a page in memory (Linux 6.1)."""
        _check(_libc.madvise(address, num_bytes, _MADV_COLLAPSE), "madvise(MADV_COLLAPSE)", num_bytes)

    def forget(self, address: int, num_bytes: int) -> None:
        """Drop the page table entries of a file mapping; a later touch enters its memory again."""
        _check(_libc.madvise(address, num_bytes, mmap.MADV_DONTNEED), "madvise(MADV_DONTNEED)", num_bytes)

    def fallocate(self, fd: int, offset: int, num_bytes: int) -> None:
        """Commit memory for these bytes of the file."""
        _check(_fallocate(fd, _FALLOC_FL_KEEP_SIZE, offset, num_bytes), "fallocate", num_bytes)

    def punch_hole(self, fd: int, offset: int, num_bytes: int) -> None:
        """Give the memory of these bytes back; they read as zeros then."""
        mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
        _check(_fallocate(fd, mode, offset, num_bytes), "fallocate(PUNCH_HOLE)", num_bytes)

    def committed_bytes(self, fd: int) -> int:
        """Bytes of memory the file takes."""
        return os.fstat(fd).st_blocks * 512

    def _map(
        self, address: int | None, num_bytes: int, protection: int, flags: int, fd: int = -1, offset: int = 0
    ) -> int:
        found = _mmap(address, num_bytes, protection, flags, fd, offset)
        if found == _FAILED:
            _check(-1, "mmap", num_bytes)
        return found


def _check(result: int, name: str, num_bytes: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name} of {num_bytes} bytes failed: {os.strerror(number)}")
