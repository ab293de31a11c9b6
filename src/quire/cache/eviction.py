"""Which cached unit is given up next: the lowest retention first, then the least recently used.

    DISCARD  0   goes before all others
    NORMAL   1
    KEEP     2   goes after all others

A list for each account and retention, least recently used first, and on each unit the time it was let go, which makes
one order of the lists of all accounts. A unit keeps the highest retention of those who used it until it is free.

The head of a path is let go after its tail by everybody who used both, and with no lower a retention; so a head
goes last, unless its tail belongs to an account that may not lose it now.

Cost: O(1) to add and to take out, O(accounts) to find the first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from quire.cache.accounts import NOBODY
from quire.cache.backend import DISCARD, KEEP, NORMAL

__all__ = ["EvictionOrder"]


class EvictionOrder:
    """The cached units; for every unit its account and retention, which change only while it is not cached."""

    def __init__(self, num_ids: int) -> None:
        self.account = [NOBODY] * num_ids
        self.retention = [NORMAL] * num_ids
        # (account, retention) -> unit -> when it was let go.
        self._lists: dict[tuple[int, int], OrderedDict[int, int]] = {}
        self._clock = 0
        self._count = 0

    def grow(self, num_new: int) -> None:
        self.account += [NOBODY] * num_new
        self.retention += [NORMAL] * num_new

    def __len__(self) -> int:
        return self._count

    def __contains__(self, unit: int) -> bool:
        return unit in self._lists.get((self.account[unit], self.retention[unit]), ())

    def __iter__(self) -> Iterator[int]:
        """In the order in which they would be given up if every account had to."""
        for retention in (DISCARD, NORMAL, KEEP):
            lists = [units for (_, level), units in self._lists.items() if level == retention]
            together = {unit: time for units in lists for unit, time in units.items()}
            yield from sorted(together, key=together.__getitem__)

    def time_of(self, unit: int) -> int:
        """When a cached unit was let go: later ones have higher numbers."""
        return self._lists[self.account[unit], self.retention[unit]][unit]

    def num_cached(self, account: int) -> int:
        return sum(len(self._lists.get((account, level), ())) for level in (DISCARD, NORMAL, KEEP))

    def first(self, accounts: Iterable[int]) -> int | None:
        """The unit of one of these accounts that is given up next."""
        accounts = list(accounts)
        for retention in (DISCARD, NORMAL, KEEP):
            heads = [
                next(iter(units.items()))
                for account in accounts
                if (units := self._lists.get((account, retention)))
            ]
            if heads:
                return min(heads, key=lambda head: head[1])[0]
        return None

    def append(self, unit: int) -> None:
        """It is cached from now on, and the most recently used."""
        units = self._lists.setdefault((self.account[unit], self.retention[unit]), OrderedDict())
        units[unit] = self._clock
        self._clock += 1
        self._count += 1

    def remove(self, unit: int) -> None:
        del self._lists[self.account[unit], self.retention[unit]][unit]
        self._count -= 1

    def clear(self) -> None:
        self._lists.clear()
        self._count = 0
