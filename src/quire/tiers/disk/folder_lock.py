"""Locks on files of a folder: for its users, and for changes of its index. The system releases them with the process.

FileLock     a lock on one file
WriteLock    a lock that tells its next holder how the last one ended
FolderLock   two locks: one held while the folder is opened, one shared by all processes that have it open
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from quire.tiers.disk.files import Files
from quire.tiers.tier import TierError

__all__ = ["FileLock", "FolderLock", "WriteLock"]


class FileLock:
    """A lock between all `FileLock`s on the same file, in any process. Not between threads that share one.

    *raises:* OSError: the file cannot be made. TierError, on `acquire`: it was not free within `timeout_s`.
    """

    def __init__(self, path: Path, files: Files, timeout_s: float) -> None:
        self._files = files
        self._path = path
        self._timeout_s = timeout_s
        self._descriptor = files.open_lock(path)

    def try_acquire(self, *, exclusive: bool) -> bool:
        return self._files.try_lock(self._descriptor, exclusive=exclusive)

    def acquire(self, *, exclusive: bool, wait: bool = True) -> None:
        until = time.monotonic() + (self._timeout_s if wait else 0)
        while not self.try_acquire(exclusive=exclusive):
            if time.monotonic() >= until:
                waited = f"within {self._timeout_s} s" if wait else "at once"
                raise TierError(f"expected the lock {self._path} {waited}, got no lock: others hold it")
            time.sleep(0.002)

    def release(self) -> None:
        self._files.unlock(self._descriptor)

    def close(self) -> None:
        """Releases the lock and closes the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class WriteLock(FileLock):
    """unsettled: a holder was killed or has failed, and no later holder has repaired the state that it left.

    The file then has one byte, otherwise none: a length needs no space on a full disk.
    """

    unsettled = False

    def acquire(self, *, exclusive: bool = True, wait: bool = True) -> None:
        super().acquire(exclusive=exclusive, wait=wait)
        try:
            self.unsettled = os.fstat(self._descriptor).st_size > 0
            if not self.unsettled:
                self._files.truncate(self._descriptor, 1)
        except BaseException:
            super().release()
            raise

    def release(self) -> None:
        with suppress(OSError):  # then the next holder repairs a state that was in order
            if not self.unsettled:
                self._files.truncate(self._descriptor, 0)
        super().release()


class FolderLock:
    """*raises:* TierError: another process is opening or replacing the folder for longer than `timeout_s`."""

    def __init__(self, folder: Path, files: Files, timeout_s: float) -> None:
        self._opening = FileLock(folder / "quire-cache.opening", files, timeout_s)
        try:
            self._open = FileLock(folder / "quire-cache.lock", files, timeout_s)
        except OSError:
            self._opening.close()
            raise

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Keeps other processes from opening the folder within; from then on it counts as in use."""
        self._opening.acquire(exclusive=True)
        try:
            self._open.acquire(exclusive=False)
            yield
        finally:
            self._opening.close()

    def is_alone(self) -> bool:
        """True if no other process has the folder open; call it within `opening`."""
        is_alone = self._open.try_acquire(exclusive=True)
        self._open.acquire(exclusive=False)  # a change of a lock, granted or refused, may lose it
        return is_alone

    def close(self) -> None:
        self._open.close()
        self._opening.close()
