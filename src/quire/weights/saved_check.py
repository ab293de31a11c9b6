"""Checks in a thread, while the model runs, that a mapped file of packed weights holds the bytes that were written to
it.

Reading the whole file before a start would cost as much as saving it gains. So the model starts at once, and a thread
reads its weights; if they are damaged, no further step is computed. Earlier steps were computed with the damaged
weights, so no tier gets their results before the check has ended (`is_right`).

Invariants
    P1  once `damage` is set it stays; the file is removed by then, as far as the folder allows.

Cost: one pass of XXH3 over the file in one thread: 5 to 10 GB/s from the page cache, else the speed of the disk.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Thread

import numpy as np
import xxhash

__all__ = ["SavedCheck", "SavedChecks", "file_digest"]

_log = logging.getLogger("quire")
_AT_ONCE = 16 << 20


def file_digest(header: bytes, digests: Mapping[int, bytes]) -> bytes:
    """16 bytes that identify a file: its header, and the XXH3-128 of the weight at each offset."""
    combined = xxhash.xxh3_128(header)
    for offset in sorted(digests):
        combined.update(offset.to_bytes(8, "little") + digests[offset])
    return combined.digest()


class SavedCheck:
    """See the module's text.

    pages: the mapped file, uint8. sizes: bytes of the weight at each offset. digest: the `file_digest` when it was
    written. damage: a description, None while no damage is known.
    """

    def __init__(
        self, path: Path, header: bytes, pages: np.ndarray, sizes: Mapping[int, int], digest: bytes
    ) -> None:
        self.damage: str | None = None
        self.on_damage: Callable[[str], None] = lambda damage: None  # called in the thread of the check
        self._thread = Thread(
            target=self._run,
            args=(path, header, pages, dict(sizes), digest),
            name="quire packed weights check",
            daemon=True,
        )
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether all bytes have been read."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def is_right(self, timeout_s: float) -> bool:
        """Whether all bytes were read within that time and are those that were written."""
        return self.wait(timeout_s) and self.damage is None

    def _run(
        self, path: Path, header: bytes, pages: np.ndarray, sizes: dict[int, int], digest: bytes
    ) -> None:
        digests = {offset: _digest(pages[offset : offset + size]) for offset, size in sizes.items()}
        if file_digest(header, digests) == digest:
            return
        with contextlib.suppress(OSError):
            path.unlink()
        damage = (
            f"expected the packed weights that were written to {path}, got others: the file is damaged, and was "
            "removed; close this engine and open it again, which packs the weights anew"
        )
        self.damage = damage
        self.on_damage(damage)
        _log.error("%s", damage)


class SavedChecks:
    """The checks of all the files that a model is read from, as one check.

    damage: the damage of the first file found damaged, None while no damage is known. Every step reads it.
    """

    def __init__(self, checks: Sequence[SavedCheck]) -> None:
        self._checks = tuple(checks)
        self.damage: str | None = None
        for check in self._checks:
            check.on_damage = self._found
            if check.damage is not None:  # before it knew whom to tell
                self._found(check.damage)

    def _found(self, damage: str) -> None:
        self.damage = self.damage or damage

    def wait(self, timeout: float | None = None) -> bool:
        """Whether all bytes have been read."""
        end = None if timeout is None else time.monotonic() + timeout
        return all(
            check.wait(None if end is None else max(0.0, end - time.monotonic())) for check in self._checks
        )

    def is_right(self, timeout_s: float) -> bool:
        """Whether all bytes were read within that time and are those that were written."""
        return self.wait(timeout_s) and self.damage is None


def _digest(part: np.ndarray) -> bytes:
    digest = xxhash.xxh3_128()
    for start in range(0, len(part), _AT_ONCE):
        digest.update(part[start : start + _AT_ONCE].data)
    return digest.digest()
