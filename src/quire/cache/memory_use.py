"""What a cache's memory is used for, in bytes, at one moment: the same figures for every storage.

reserved   distinct memory that open sequences hold, what a running step still needs included
used       distinct tokens in it whose K and V are computed
later      reserved for tokens that the sequences may still come to
internal   reserved and of no use to those who hold it: reserved - used - later
external   free, but cut off: outside of the longest free range, where a sequence has to lie in one
cached     findable content that nobody holds; may be given up at any time, so not reserved
peak       the most that was ever reserved at once, old and new copies of what moved together
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MemoryUse"]


@dataclass(frozen=True)
class MemoryUse:
    """See the module's text."""

    reserved: int
    used: int
    later: int
    external: int
    cached: int
    peak: int
    total: int

    @property
    def internal(self) -> int:
        return self.reserved - self.used - self.later

    @property
    def waste_share(self) -> float:
        """1 - used / reserved; 0 where nothing is reserved."""
        return 1.0 - self.used / self.reserved if self.reserved else 0.0
