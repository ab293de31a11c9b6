"""An elastic heap: a range of address space that costs memory only where it was written.

Not an allocator: it hands out no pieces and knows no owners. `PagedStorage` decides what lies where.

The range is private anonymous memory mapped with MAP_NORESERVE, so reserving terabytes is free; the operating
system commits a page at its first write. `release` gives whole pages back at once (MADV_DONTNEED), and they read as
zeros afterwards. The kernel counts committed bytes page by page (mincore); the range's entry in /proc/self/smaps would
be wrong, as the kernel merges neighbouring mappings of one kind into one entry.

Invariants
    H1  the address of a byte never changes while the heap lives; tensors made of it keep it mapped.
    H2  `release` touches no page that holds a byte outside the range given.
    H3  a call that fails changes nothing.

Cost: reserving about 10 us; `commit` 0.2 s per GiB, several seconds in a virtual machine whose host has to find the
memory first; `release` one system call, about 0.1 us per page given back; `committed_bytes` about 1 ms per GiB
examined.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys

import torch

from quire.errors import ArgumentError, BackendError, CapacityError

__all__ = ["HUGE_PAGE_BYTES", "Heap", "give_back_freed"]

HUGE_PAGE_BYTES = 2 << 20

# The mmap module names the flag from Python 3.13 on; 0x4000 is Linux's value.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_MADV_POPULATE_WRITE = 23  # Linux 5.14 and later
_MINCORE_BYTES = 1 << 30  # per mincore call: a result vector of 256 KiB

if sys.platform == "linux":
    _libc = ctypes.CDLL(None, use_errno=True)
    _libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    _libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def give_back_freed() -> None:
    """Let the C library return freed memory to the system (malloc_trim); does nothing in a library without that call.

    Without it the library keeps tens of MiB after the proof of a model. Cost: some ms.
    """
    with contextlib.suppress(NameError, AttributeError):
        _libc.malloc_trim(0)


class Heap:
    """`max_bytes` of reserved address space, committed on first write.

    Args:
        max_bytes: bytes to reserve, rounded up to whole pages.

    Raises:
        ArgumentError: `max_bytes` is not positive.
        BackendError: not on Linux.
        CapacityError: the operating system refuses the reservation.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes <= 0:
            raise ArgumentError(f"expected a positive size for a heap, got {max_bytes} bytes")
        if sys.platform != "linux":
            raise BackendError(
                f"expected Linux for the paged storage, whose memory is committed on use, got {sys.platform}; "
                "quire.Cache and quire.KVSpec run everywhere"
            )
        self.max_bytes = _round_up(max_bytes, mmap.PAGESIZE)
        try:
            self._map = mmap.mmap(
                -1,
                self.max_bytes,
                flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )
        except (OSError, OverflowError, ValueError) as error:
            raise CapacityError(
                f"cannot reserve {self.max_bytes} bytes of address space for the KV cache: {error}; lower the KV "
                "memory, or raise the address-space limit (ulimit -v; vm.overcommit_memory=2 counts reservations)"
            ) from error
        self._bytes: torch.Tensor | None = torch.frombuffer(self._map, dtype=torch.uint8)

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """The whole heap as a 1-D tensor of `dtype`; making it commits no memory."""
        return self._require_open().view(dtype)

    def prefer_huge_pages(self, start: int, stop: int) -> None:
        """Advise the kernel to use the huge pages that lie wholly within bytes `[start, stop)`.

        The first write to any byte of such a page commits all of it. A kernel without huge pages ignores the advice.
        """
        base = self._require_open().data_ptr()
        first = _round_up(base + start, HUGE_PAGE_BYTES) - base
        last = base + stop - (base + stop) % HUGE_PAGE_BYTES - base
        if first < last and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_HUGEPAGE, first, last - first)

    def commit(self, start: int, stop: int) -> bool:
        """Commit every page of bytes `[start, stop)` now, as a write would; their contents stay.

        Other threads run meanwhile. Returns whether the kernel did it: one without MADV_POPULATE_WRITE does nothing.
        """
        base = self._require_open().data_ptr()
        first, last = start - start % mmap.PAGESIZE, min(_round_up(stop, mmap.PAGESIZE), self.max_bytes)
        # Not by the mmap module, which would keep the GIL.
        return _libc.madvise(base + first, last - first, _MADV_POPULATE_WRITE) == 0

    def release(self, start: int, stop: int) -> None:
        """Give the whole pages within bytes `[start, stop)` back to the operating system; they then read as zeros.

        Raises:
            ArgumentError: the range is not inside the heap.
        """
        self._require_open()
        if not 0 <= start <= stop <= self.max_bytes:
            raise ArgumentError(
                f"expected a byte range inside the heap of {self.max_bytes}, got [{start}, {stop})"
            )
        first = _round_up(start, mmap.PAGESIZE)
        last = stop - stop % mmap.PAGESIZE
        if first < last:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)

    def committed_bytes(self, start: int = 0, stop: int | None = None) -> int:
        """Bytes of the pages of `[start, stop)` that are in memory now, as the kernel counts them.

        Pages that were swapped out do not count; a page that was only read does.
        """
        base = self._require_open().data_ptr()
        stop = self.max_bytes if stop is None else min(stop, self.max_bytes)
        position = start - start % mmap.PAGESIZE
        resident = 0
        while position < stop:
            length = min(_MINCORE_BYTES, stop - position)
            pages = (ctypes.c_ubyte * (_round_up(length, mmap.PAGESIZE) // mmap.PAGESIZE))()
            if _libc.mincore(base + position, length, pages) != 0:
                raise OSError(ctypes.get_errno(), f"mincore of {length} bytes of the heap failed")
            resident += bytes(pages).count(1)
            position += length
        return resident * mmap.PAGESIZE

    def close(self) -> None:
        """Give all memory back. The address range lives until its last tensor is freed. Twice is harmless."""
        if self._bytes is not None:
            self.release(0, self.max_bytes)
            self._bytes = None

    def _require_open(self) -> torch.Tensor:
        if self._bytes is None:
            raise ArgumentError("expected an open heap, got one that was closed")
        return self._bytes


def physical_bytes() -> int:
    """Memory of this machine: no more than this can ever be committed."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
