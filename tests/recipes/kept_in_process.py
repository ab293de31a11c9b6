"""The recipe's smallest tier: what a URL names, kept in this process for whoever opens that URL again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.tiers.by_url import register
from quire.tiers.tier import Reason, SegmentInfo, TierStats

SCHEME = "kept"
KEPT: dict[str, dict[bytes, bytes]] = {}


class KeptTier:
    name = "remote"

    def __init__(self, url: str) -> None:
        self.values = KEPT.setdefault(url, {})
        self.on_removed: Callable[[Sequence[bytes], Reason], None] = lambda keys, reason: None

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.values for key in keys]

    def load(self, key: bytes) -> memoryview | None:
        value = self.values.get(key)
        return None if value is None else memoryview(value)

    def store(self, key: bytes, value: Sequence[memoryview], info: SegmentInfo) -> bool:
        self.values[key] = b"".join(value)
        return True

    def evict(self, key: bytes) -> bool:
        return self.values.pop(key, None) is not None

    def contents(self, roots: Sequence[bytes]) -> list[tuple[bytes, SegmentInfo]]:
        return []

    def stats(self) -> TierStats:
        return TierStats(len(self.values), sum(map(len, self.values.values())))

    def close(self) -> None: ...


register(SCHEME, KeptTier)
