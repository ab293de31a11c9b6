"""A file that appears under its name complete: written to a temporary file, synced, renamed, and the folder synced.

`FileCalls` has the system calls: one seam, so that tests can make each call fail.

Invariants
    F1  the name has the previous content or the whole new file, wherever a call fails or the process ends.
    F2  a call that fails leaves no temporary file; a process that is killed may leave the unfinished file.

Cost: two syncs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["MAX_BUFFERS", "UNFINISHED", "AtomicFile", "FileCalls"]

MAX_BUFFERS = 512  # of one read or write; the system takes 1024
UNFINISHED = ".partial"  # suffix of unfinished files


class FileCalls:
    """The real system calls. *raises:* OSError, as each callee does."""

    def open(self, path: Path, *, create: bool = False) -> int:
        """Open for reading and writing; with `create`, create it if needed, and truncate it."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_TRUNC if create else 0), 0o600)

    def write(self, descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(descriptor, parts, offset)

    def write_all(self, descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        """Writes the parts one after the other, in as many calls as it takes; returns the end offset."""
        rest = [part.cast("B") for part in parts if part.nbytes]
        while rest:
            count = self.write(descriptor, rest[:MAX_BUFFERS], offset)
            offset += count
            while rest and count >= len(rest[0]):
                count -= len(rest.pop(0))
            if count:
                rest[0] = rest[0][count:]
        return offset

    def sync(self, descriptor: int) -> None:
        """The file's bytes are on the medium when this returns."""
        os.fdatasync(descriptor)

    def sync_folder(self, path: Path) -> None:
        """The names in the folder are on the medium when this returns."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, path: Path, to: Path) -> None:
        os.replace(path, to)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)


class AtomicFile:
    """The next content of `path`. A context: it publishes the file at its end, or abandons it after an exception.

    temporary: the path to write to, used by no other writer; default: a unique name in the same folder. *raises:*
    OSError.
    """

    def __init__(self, path: Path, *, temporary: Path | None = None, calls: FileCalls | None = None) -> None:
        self._path, self._calls = path, calls or FileCalls()
        self._temporary = temporary or path.with_name(f".{path.name}.{os.urandom(8).hex()}{UNFINISHED}")
        self.descriptor = self._calls.open(self._temporary, create=True)
        self._end = 0

    def write(self, data: bytes | memoryview, offset: int | None = None) -> None:
        """Write at `offset`; default: after the previous write."""
        begin = self._end if offset is None else offset
        self._end = self._calls.write_all(self.descriptor, [memoryview(data)], begin)

    def publish(self) -> None:
        try:
            self._calls.sync(self.descriptor)
            self._calls.rename(self._temporary, self._path)
        except BaseException:
            self.abandon()
            raise
        os.close(self.descriptor)
        self._calls.sync_folder(self._path.parent)

    def abandon(self) -> None:
        with suppress(OSError):
            self._calls.remove(self._temporary)
        os.close(self.descriptor)

    def __enter__(self) -> AtomicFile:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.publish()
        else:
            self.abandon()
