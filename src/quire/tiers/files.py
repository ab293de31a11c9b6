"""What the disk tier asks of the operating system and of SQLite: one seam, so that tests can make each call fail."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path

__all__ = ["Files"]


class Files:
    """The calls as they are. *raises:* OSError and sqlite3.Error, each as its callee does."""

    def connect(self, path: Path, *, timeout_s: float) -> sqlite3.Connection:
        """A connection in autocommit, usable from any thread that takes turns with the others."""
        return sqlite3.connect(path, timeout=timeout_s, isolation_level=None, check_same_thread=False)

    def make_folder(self, path: Path) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def open(self, path: Path, *, create: bool = False) -> int:
        """For reading and writing; with `create`, made where it is not, and empty."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_TRUNC if create else 0), 0o600)

    def open_lock(self, path: Path) -> int:
        """Made where it is not, its owner's alone; its content stays."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT, 0o600)

    def try_lock(self, descriptor: int, *, exclusive: bool) -> bool:
        """Whether the lock was to be had; it goes with the process."""
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def allocate(self, descriptor: int, num_bytes: int) -> None:
        """Takes the blocks of the file from the disk now, so that no later write finds it full."""
        os.posix_fallocate(descriptor, 0, num_bytes)

    def truncate(self, descriptor: int, num_bytes: int) -> None:
        os.ftruncate(descriptor, num_bytes)

    def write(self, descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(descriptor, parts, offset)

    def read(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        return os.preadv(descriptor, [buffer], offset)

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

    def names(self, path: Path) -> list[str]:
        return os.listdir(path)

    def size(self, path: Path) -> int:
        """Bytes of the file, 0 where there is none."""
        try:
            return os.stat(path).st_size
        except FileNotFoundError:
            return 0

    def rename(self, path: Path, to: Path) -> None:
        os.replace(path, to)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)
