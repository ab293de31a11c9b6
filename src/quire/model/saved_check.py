"""Whether a mapped file of packed weights holds what was written into it: asked in a thread, while the model runs.

To read all of a file before a start would cost what keeping it saves. So the model starts at once, and its weights are
read through behind it; where they are not those that were written, no step is computed any more. What was computed
until then was computed with them, so no tier is given it before the check has ended (`is_right`).

Invariants
    P1  once `damage` is set it stays; the file is removed by then, as far as the folder allows.

Cost: one pass of XXH3 over the file in one thread: 5 to 10 GB/s from the page cache, else what the disk gives.
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

__all__ = ["SavedCheck", "SavedChecks", "digest_of"]

_log = logging.getLogger("quire")
_AT_ONCE = 16 << 20


def digest_of(header: bytes, digests: Mapping[int, bytes]) -> bytes:
    """16 bytes that stand for a file: its header, and the XXH3-128 of the weight at each offset."""
    together = xxhash.xxh3_128(header)
    for offset in sorted(digests):
        together.update(offset.to_bytes(8, "little") + digests[offset])
    return together.digest()


class SavedCheck:
    """See the module's text.

    pages: the mapped file, uint8. sizes: bytes of the weight at each offset. digest: what `digest_of` gave when it was
    written. damage: what is wrong, None while nothing is known to be.
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
        """Whether all has been read."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def is_right(self, timeout_s: float) -> bool:
        """Whether all has been read, within that time, and is what was written."""
        return self.wait(timeout_s) and self.damage is None

    def _run(
        self, path: Path, header: bytes, pages: np.ndarray, sizes: dict[int, int], digest: bytes
    ) -> None:
        found = {offset: _digest(pages[offset : offset + size]) for offset, size in sizes.items()}
        if digest_of(header, found) == digest:
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
    """The checks of all the files that a model is read from, asked as one.

    damage: what is wrong with one of them, None while nothing is known to be. Every step looks at it.
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
        """Whether all has been read."""
        end = None if timeout is None else time.monotonic() + timeout
        return all(
            check.wait(None if end is None else max(0.0, end - time.monotonic())) for check in self._checks
        )

    def is_right(self, timeout_s: float) -> bool:
        """Whether all has been read, within that time, and is what was written."""
        return self.wait(timeout_s) and self.damage is None


def _digest(part: np.ndarray) -> bytes:
    own = xxhash.xxh3_128()
    for start in range(0, len(part), _AT_ONCE):
        own.update(part[start : start + _AT_ONCE].data)
    return own.digest()
