"""Who uses a folder, and who changes its index: locks on files in it, which go with the process that has them.

FileLock     one of them
WriteLock    one that tells its next holder how the last one ended
FolderLock   one held while the folder is opened, one shared by all who have it open
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from quire.tiers.files import Files
from quire.tiers.tier import TierError

__all__ = ["FileLock", "FolderLock", "WriteLock"]


class FileLock:
    """A lock between all who make one on the same file, in this process or another. Not between threads that share it.

    *raises:* OSError: the file cannot be made. TierError, on `acquire`: others had it for longer than `timeout_s`.
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
        """Gives it back for good."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class WriteLock(FileLock):
    """unsettled: somebody was killed while they had the lock, or failed, and nobody has settled since what that left.

    The file has one byte meanwhile and none otherwise: a length needs no space on a full disk.
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
        with suppress(OSError):  # then the next holder settles what was in order
            if not self.unsettled:
                self._files.truncate(self._descriptor, 0)
        super().release()


class FolderLock:
    """*raises:* TierError: somebody has been opening or replacing the folder for longer than `timeout_s`."""

    def __init__(self, folder: Path, files: Files, timeout_s: float) -> None:
        self._opening = FileLock(folder / "quire-cache.opening", files, timeout_s)
        try:
            self._open = FileLock(folder / "quire-cache.lock", files, timeout_s)
        except OSError:
            self._opening.close()
            raise

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Nobody else opens the folder meanwhile; it counts as in use from then on."""
        self._opening.acquire(exclusive=True)
        try:
            self._open.acquire(exclusive=False)
            yield
        finally:
            self._opening.close()

    def is_alone(self) -> bool:
        """Whether nobody else has the folder open; to be asked while opening it."""
        alone = self._open.try_acquire(exclusive=True)
        self._open.acquire(exclusive=False)  # a change of a lock, granted or refused, may lose it
        return alone

    def close(self) -> None:
        self._open.close()
        self._opening.close()
