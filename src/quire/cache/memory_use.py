"""The use of a cache's memory, in bytes, at one moment: the same figures for every storage.

reserved   distinct memory that open sequences hold, including memory that a running step still needs
used       distinct tokens in it whose K and V are computed
later      reserved for tokens that the sequences may still reach
internal   reserved and useless to its holders: reserved - used - later
external   free, but outside of the longest free range, where a sequence has to lie in one range
cached     findable content that no sequence holds; may be given up at any time, so not reserved
peak       the most ever reserved at once, counting old and new copies of moved memory together
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
        """1 - used / reserved; 0 if no memory is reserved."""
        return 1.0 - self.used / self.reserved if self.reserved else 0.0
