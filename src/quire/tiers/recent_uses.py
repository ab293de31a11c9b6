"""When keys were used, until that is written: a use alone is not worth a transaction. May be used by many threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence

__all__ = ["RecentUses"]

_MANY = 256  # are worth one; more than a load of 2 048 tokens of Qwen3-0.6B is, which should not wait for it
_MOST = 16 * _MANY  # are kept where they cannot be written


class RecentUses:
    def __init__(self) -> None:
        self._uses: dict[bytes, float] = {}
        self._lock = threading.Lock()

    def note(self, keys: Sequence[bytes], at: float) -> bool:
        """Whether there are so many now that they should be written."""
        with self._lock:
            self._uses.update(dict.fromkeys(keys, at))
            return len(self._uses) >= _MANY

    def take(self) -> dict[bytes, float]:
        """All of them, the one used longest ago first, for whoever writes them."""
        with self._lock:
            uses, self._uses = self._uses, {}
        return uses

    def give_back(self, uses: dict[bytes, float]) -> None:
        """They could not be written."""
        with self._lock:
            if len(self._uses) < _MOST:
                self._uses = {**uses, **self._uses}
