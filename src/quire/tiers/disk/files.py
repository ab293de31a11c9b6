"""The disk tier's calls to the operating system and SQLite, in one class, so that tests can make each call fail."""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import xxhash

from quire.atomic_file import MAX_BUFFERS, FileCalls
from quire.backends import extension

__all__ = ["Buffer", "Files"]

Buffer: TypeAlias = Any
"""A writable object with the buffer protocol, of single bytes, so that `len` is its size."""


class Files(FileCalls):
    """The real calls. *raises:* OSError and sqlite3.Error, as the called function does.

    backend: the back end whose code reads, see `quire.backends.extension`.
    """

    backend: str | None = None

    @classmethod
    def with_backend(cls, backend: str | None) -> Files:
        files = cls()
        files.backend = backend
        return files

    def connect(self, path: Path, *, timeout_s: float) -> sqlite3.Connection:
        """A connection in autocommit mode. Any thread may use it, one at a time."""
        return sqlite3.connect(path, timeout=timeout_s, isolation_level=None, check_same_thread=False)

    def make_folder(self, path: Path) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def open_lock(self, path: Path) -> int:
        """Opens a lock file, creating it with access for its owner only; keeps its content."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT, 0o600)

    def try_lock(self, descriptor: int, *, exclusive: bool) -> bool:
        """True if the lock was free; the system releases it with the process."""
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self, descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)

    def allocate(self, descriptor: int, num_bytes: int) -> None:
        """Allocates the file's blocks now, so that no later write finds the disk full."""
        os.posix_fallocate(descriptor, 0, num_bytes)

    def truncate(self, descriptor: int, num_bytes: int) -> None:
        os.ftruncate(descriptor, num_bytes)

    def read(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        return os.preadv(descriptor, [buffer], offset)

    def read_all(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        """Fills the buffer, with several calls if needed; returns the bytes read, fewer at the end of the file."""
        done = 0
        while done < len(buffer) and (count := self.read(descriptor, buffer[done:], offset + done)):
            done += count
        return done

    def read_now(self, reads: Sequence[tuple[int, int, Buffer, Sequence[Buffer]]]) -> list[int]:
        """Reads values (descriptor, offset, front, parts), each into its front and then its parts, from the system's
        page cache. Returns the XXH3-64 of the parts of the leading values; ends before the first that would have to
        wait for the medium, for which the system cannot tell, or that lies beyond the file's end.
        """
        native = extension(self.backend)
        if native is not None and all(sum(map(len, read[3])) >= native.SHORTEST_READ for read in reads):
            return native.read_now(reads)
        digests: list[int] = []
        for read in reads:
            digest = self._read_now(*read)
            if digest is None:
                break
            digests.append(digest)
        return digests

    def _read_now(self, descriptor: int, offset: int, front: Buffer, parts: Sequence[Buffer]) -> int | None:
        buffers = [front, *parts]
        for first in range(0, len(buffers), MAX_BUFFERS):
            some = buffers[first : first + MAX_BUFFERS]
            num_bytes = sum(map(len, some))
            try:
                done = os.preadv(descriptor, some, offset, os.RWF_NOWAIT)
            except BlockingIOError:
                return None
            except OSError as error:
                if error.errno == errno.EOPNOTSUPP:
                    return None
                raise
            # A partial read is of no use: the caller reads the value another way.
            if done != num_bytes:
                return None
            offset += num_bytes
        digest = xxhash.xxh3_64()
        for part in parts:
            digest.update(part)
        return digest.intdigest()

    def free_bytes(self, path: Path) -> int:
        """Bytes that the file system of `path` has left for this user."""
        system = os.statvfs(path)
        return system.f_bavail * system.f_frsize

    def names(self, path: Path) -> list[str]:
        return os.listdir(path)

    def size(self, path: Path) -> int:
        """Bytes of the file; 0 if there is none."""
        try:
            return os.stat(path).st_size
        except FileNotFoundError:
            return 0
