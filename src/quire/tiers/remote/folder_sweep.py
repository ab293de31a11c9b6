"""`FolderSweep`: the cap of a shared folder, kept by several writers without a lock.

A sweep lists all files: it removes expired ones and old half-written ones, and, above the cap, the least recently used
until 15/16 of the cap are left. All writers compute the same order from the same times, and removing a file twice does
no harm. So two sweeps at the same time evict the same files.

A writer counts its own bytes since its last sweep, and sweeps after 1/64 of the cap. So N writers that store at the
same time exceed 15/16 of the cap by N/64 at most: up to four keep to it. A writer that expects the cap to be reached
stores nothing until its sweep has ended.

Cost: a sweep one stat a file, in a thread of its own.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from quire.atomic_file import UNFINISHED
from quire.tiers.remote.folder_files import FolderFiles

__all__ = ["FolderSweep", "key_of", "subfolders"]

_UNFINISHED_S = 3600.0
_LOW, _SHARE = 15 / 16, 64
_RETRY_S = 10.0  # after a sweep that failed


class FolderSweep:
    """See the module's text. values: the folder of the subfolders. now: seconds since 1970, by the file system."""

    def __init__(
        self,
        values: Path,
        max_bytes: int,
        ttl_s: float | None,
        files: FolderFiles,
        now: Callable[[], float],
    ) -> None:
        self._values = values
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._files = files
        self._now = now
        self._lock = threading.Lock()
        self._num_bytes: int | None = (
            None  # found by the last sweep, with this writer's since then; None: unknown
        )
        self._num_written = 0  # bytes since the last sweep began
        self._failed_at: float | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def has_room(self, num_bytes: int) -> bool:
        """Whether the folder is expected to keep to its cap with so many bytes more; if not, a sweep has begun."""
        with self._lock:
            known = self._num_bytes
            has_room = self._failed_at is None and (known is None or known + num_bytes <= self._max_bytes)
            if known is None or not has_room:
                self._begin()
            return has_room

    def add(self, num_bytes: int) -> None:
        """Counts bytes that this writer has stored."""
        with self._lock:
            self._num_written += num_bytes
            if self._num_bytes is not None:
                self._num_bytes += num_bytes
            if self._num_written * _SHARE >= self._max_bytes:
                self._begin()

    def wait(self) -> None:
        """Waits for the sweep that runs, if one does."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def close(self) -> None:
        """Ends a sweep that runs, unless its file system hangs."""
        self._closed = True
        thread = self._thread
        if thread is not None:
            thread.join(1.0)

    def _begin(self) -> None:
        """With the lock held: begins a sweep, unless one runs."""
        recently = self._failed_at is not None and time.monotonic() < self._failed_at + _RETRY_S
        if self._closed or recently or (self._thread is not None and self._thread.is_alive()):
            return
        self._num_written = 0
        self._thread = threading.Thread(target=self._run, name="quire-tier-folder-sweep", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            left = self._sweep()
        except OSError:
            self._failed_at = time.monotonic()
            return
        self._failed_at = None
        with self._lock:
            self._num_bytes = left + self._num_written

    def _sweep(self) -> int:
        """Bytes left in the folder."""
        found: list[tuple[float, str, int, Path]] = []
        now = self._now()
        for folder in subfolders(self._values):
            for name, state in self._files.entries(folder):
                if self._closed:
                    return 0
                age_s = now - state.st_mtime
                if name.endswith(UNFINISHED):
                    if age_s > _UNFINISHED_S:
                        self._files.remove(folder / name)
                elif key_of(name) is not None:
                    if self._ttl_s is not None and age_s >= self._ttl_s:
                        self._files.remove(folder / name)
                    else:
                        found.append((state.st_atime, name, state.st_size, folder / name))
        left = sum(size for _, _, size, _ in found)
        if left > self._max_bytes * _LOW:
            for _, _, size, path in sorted(found):
                if left <= self._max_bytes * _LOW or self._closed:
                    break
                self._files.remove(path)
                left -= size
        return left


def subfolders(values: Path) -> Iterator[Path]:
    """The folder of the subfolders, which has no values, and those in which values can be."""
    yield values
    for number in range(256):
        yield values / f"{number:02x}"


def key_of(name: str) -> bytes | None:
    """The key of a value's file name; None: no such file."""
    stem = name.removesuffix(".kv")
    return bytes.fromhex(stem) if stem != name and re.fullmatch(r"([0-9a-f]{2})+", stem) else None
