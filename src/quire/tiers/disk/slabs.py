"""The slab files, which hold a disk tier's values: few, large, allocated whole when they are made.

A value is one extent of pages within one slab. The index knows the free extents (`extents`); this file reads and
writes. Extents, not slots of one size: a folder holds segments of several models and their shorter tails. If all values
have one size an extent is a slot, because the best fit of a freed extent is itself.

Invariants
    L1  no two slabs ever have the same name: it has the index's identity and a number that only grows.
    L2  a slab stays open while it is read or written, even if it is removed meanwhile.

Cost: a load is one open file and one pread; a store one pwrite; `sync` the disk's time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from quire.tiers.disk.files import Buffer, Files
from quire.tiers.disk.read_buffers import ReadBuffers

__all__ = ["PAGE", "Slabs", "pages_of"]

PAGE = 4096


def pages_of(num_bytes: int) -> int:
    """Bytes of the pages of a value of `num_bytes`: at least one page."""
    return max(PAGE, -(-num_bytes // PAGE) * PAGE)


class _OpenSlab:
    """A descriptor that closes with the last reference (L2)."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


class Slabs:
    """The slab files of one folder. Several threads may use it. identity: of the index, in hexadecimal."""

    def __init__(self, folder: Path, identity: str, files: Files) -> None:
        self._folder = folder
        self._identity = identity
        self._files = files
        self._buffers = ReadBuffers()
        self._open: dict[int, _OpenSlab] = {}
        self._lock = threading.Lock()

    def path(self, slab: int) -> Path:
        return self._folder / f"slab-{self._identity}-{slab:06d}"

    def create(self, slab: int, num_bytes: int) -> None:
        """Makes the file with all its blocks. *raises:* OSError: no file is left."""
        self.forget([slab])
        descriptor = self._files.open(self.path(slab), create=True)
        opened = _OpenSlab(descriptor)
        try:
            self._files.allocate(descriptor, num_bytes)
            self._files.sync_folder(self._folder)
        except OSError:
            self._files.remove(self.path(slab))
            raise
        with self._lock:
            self._open[slab] = opened

    def read(self, slab: int, offset: int, num_bytes: int) -> memoryview | None:
        """The bytes, in memory that stays valid while referred to; None if the file ends before them."""
        opened = self._open_slab(slab)
        buffer = self._buffers.acquire(pages_of(num_bytes))[:num_bytes]
        return buffer if self._files.read_all(opened.descriptor, buffer, offset) == num_bytes else None

    def read_now(self, values: Sequence[tuple[int, int, Buffer, Sequence[Buffer]]]) -> list[int]:
        """`Files.read_now` with slabs instead of descriptors. Ends before the first value of a slab that is gone."""
        opened: list[_OpenSlab] = []
        with suppress(FileNotFoundError):
            for slab, *_ in values:
                opened.append(self._open_slab(slab))
        reads = zip(opened, values, strict=False)
        return self._files.read_now([(slab.descriptor, *value[1:]) for slab, value in reads])

    def write(self, slab: int, offset: int, parts: Sequence[memoryview]) -> None:
        """Writes the parts one after the other; they are durable after `sync`."""
        opened = self._open_slab(slab)
        self._files.write_all(opened.descriptor, parts, offset)

    def sync(self, slab: int) -> None:
        self._files.sync(self._open_slab(slab).descriptor)

    def truncate(self, slab: int, num_bytes: int) -> None:
        self._files.truncate(self._open_slab(slab).descriptor, num_bytes)

    def remove(self, slab: int) -> None:
        self.forget([slab])
        self._files.remove(self.path(slab))

    def size(self, slab: int) -> int:
        return self._files.size(self.path(slab))

    def remove_others(self, slabs: Iterable[int]) -> int:
        """Removes slab files that the index does not name (writer killed, or index set aside); returns their number."""
        known = {self.path(slab).name for slab in slabs}
        strays = [
            name for name in self._files.names(self._folder) if name.startswith("slab-") and name not in known
        ]
        for name in strays:
            self._files.remove(self._folder / name)
        return len(strays)

    def forget(self, slabs: Iterable[int]) -> None:
        """Closes these once no thread reads them, so that the system frees the space of a removed one."""
        with self._lock:
            for slab in slabs:
                self._open.pop(slab, None)

    def keep_only(self, slabs: Iterable[int]) -> None:
        """Closes all others: another process may have removed them."""
        known = set(slabs)
        self.forget([slab for slab in list(self._open) if slab not in known])

    def close(self) -> None:
        with self._lock:
            self._open.clear()

    def _open_slab(self, slab: int) -> _OpenSlab:
        with self._lock:
            opened = self._open.get(slab)
            if opened is None:
                opened = self._open[slab] = _OpenSlab(self._files.open(self.path(slab)))
            return opened
