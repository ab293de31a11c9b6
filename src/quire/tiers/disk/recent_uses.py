"""Uses of keys that are not written yet: one use alone is not worth a transaction. Several threads may use it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

__all__ = ["RecentUses"]

_MANY = (
    256  # uses are worth a transaction; more than a load of 2 048 tokens of Qwen3-0.6B, which should not wait
)
_MOST = 16 * _MANY  # uses are kept if they cannot be written


class RecentUses:
    """The time of the latest use of each key."""

    def __init__(self) -> None:
        self._uses: dict[bytes, float] = {}
        self._lock = threading.Lock()

    def add(self, keys: Sequence[bytes], at: float) -> bool:
        """Adds uses; True if there are enough to write them."""
        with self._lock:
            self._uses.update(dict.fromkeys(keys, at))
            return len(self._uses) >= _MANY

    def pop_all(self) -> dict[bytes, float]:
        """All uses, the oldest first, to be written."""
        with self._lock:
            uses, self._uses = self._uses, {}
        return uses

    def restore(self, uses: dict[bytes, float]) -> None:
        """Takes uses back that could not be written; newer ones win."""
        with self._lock:
            if len(self._uses) < _MOST:
                self._uses = {**uses, **self._uses}
