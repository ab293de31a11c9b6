"""The disk tier's calls to the system and to SQLite, failing on demand: each n-th, in one of several ways."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.tiers.disk.files import Files

_CALLS = (
    "make_folder",
    "open",
    "open_lock",
    "allocate",
    "truncate",
    "sync",
    "sync_folder",
    "names",
    "rename",
    "remove",
)


class FaultyFiles(Files):
    """every: which call fails, and each that many after it; 0 for none. error: the errno of the system's.

    Writes and reads that do not fail do a part of what is asked, as the system may.
    """

    def __init__(self) -> None:
        self.every = 0
        self.count = 0
        self.num_failed = 0
        self.error = errno.EIO
        self.part = 1 << 30

    def arm(self, every: int, error: int = errno.EIO, *, part: int = 1 << 30) -> None:
        self.every, self.error, self.part = every, error, part

    def step(self) -> bool:
        """Counts one call; whether it is to fail."""
        if not self.every:
            return False
        self.count += 1
        fails = self.count % self.every == 0
        self.num_failed += fails
        return fails

    def connect(self, path: Path, *, timeout_s: float) -> sqlite3.Connection:
        files = self

        class Connection(sqlite3.Connection):
            def execute(self, *given: Any) -> sqlite3.Cursor:
                if files.step():
                    raise sqlite3.OperationalError("disk I/O error (made to fail)")
                return super().execute(*given)

        return sqlite3.connect(
            path, timeout=timeout_s, isolation_level=None, check_same_thread=False, factory=Connection
        )

    def write(self, descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        if self.step():
            # A part is on the disk already when it is full.
            super().write(descriptor, [parts[0][: len(parts[0]) // 2]], offset)
            raise OSError(self.error, "made to fail")
        return super().write(descriptor, [parts[0][: self.part]] if self.part < 1 << 30 else parts, offset)

    def read(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        if self.step():
            raise OSError(self.error, "made to fail")
        return super().read(descriptor, buffer[: self.part], offset)


def _failing(name: str) -> Any:
    def call(self: FaultyFiles, *args: Any, **kwargs: Any) -> Any:
        if self.step():
            raise OSError(self.error, "made to fail")
        return getattr(Files, name)(self, *args, **kwargs)

    return call


for _name in _CALLS:
    setattr(FaultyFiles, _name, _failing(_name))
