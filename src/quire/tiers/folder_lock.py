"""Who uses a folder: a lock held while it is opened, one shared by all who have it open; both go with the process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quire.tiers.files import Files
from quire.tiers.tier import TierError

__all__ = ["FolderLock"]


class FolderLock:
    """*raises:* TierError: somebody has been opening or replacing the folder for longer than `timeout_s`."""

    def __init__(self, folder: Path, files: Files, timeout_s: float) -> None:
        self._files = files
        self._folder = folder
        self._timeout_s = timeout_s
        self._opening = files.open_lock(folder / "quire-cache.opening")
        try:
            self._open = files.open_lock(folder / "quire-cache.lock")
        except OSError:
            os.close(self._opening)
            raise
        self._closed = False

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Nobody else opens the folder meanwhile; it counts as in use from then on."""
        self._wait_for(self._opening, exclusive=True)
        try:
            self._wait_for(self._open, exclusive=False)
            yield
        finally:
            os.close(self._opening)
            self._opening = -1

    def is_alone(self) -> bool:
        """Whether nobody else has the folder open; to be asked while opening it."""
        alone = self._files.try_lock(self._open, exclusive=True)
        self._wait_for(self._open, exclusive=False)  # a change of a lock, granted or refused, may lose it
        return alone

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            os.close(self._open)
            if self._opening >= 0:
                os.close(self._opening)

    def _wait_for(self, descriptor: int, *, exclusive: bool) -> None:
        until = time.monotonic() + self._timeout_s
        while not self._files.try_lock(descriptor, exclusive=exclusive):
            if time.monotonic() > until:
                raise TierError(
                    f"expected the disk cache in {self._folder} within {self._timeout_s} s, got no lock"
                )
            time.sleep(0.005)
