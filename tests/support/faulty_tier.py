"""A tier whose every n-th call fails, or returns other bytes than were stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.tiers.tier import SegmentInfo, Tier, TierError, TierStats


class FaultyTier:
    """every: of the calls of each kind, one in so many goes wrong; 0: none does."""

    def __init__(self, tier: Tier, every: int) -> None:
        self.name = tier.name
        self._tier = tier
        self._every = every
        self._num_calls: dict[str, int] = {}

    def _fails(self, kind: str) -> bool:
        self._num_calls[kind] = self._num_calls.get(kind, 0) + 1
        return bool(self._every) and self._num_calls[kind] % self._every == 0

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        if self._fails("contains"):
            raise TierError("expected an answer, got none")
        return self._tier.contains(keys)

    def load(self, key: bytes) -> memoryview | None:
        value = self._tier.load(key)
        if value is None or not self._fails("load"):
            return value
        if self._num_calls["load"] // self._every % 2:
            raise TierError("expected a value, got none")
        garbage = bytearray(value)
        garbage[-1] ^= 1
        return memoryview(garbage)

    def store(self, key: bytes, value: Sequence[memoryview], info: SegmentInfo) -> bool:
        if self._fails("store"):
            raise TierError("expected room, got none")
        return self._tier.store(key, value, info)

    def evict(self, key: bytes) -> bool:
        return self._tier.evict(key)

    def stats(self) -> TierStats:
        return self._tier.stats()

    def close(self) -> None:
        self._tier.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)
