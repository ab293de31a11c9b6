"""Which cached block is given up next: the lowest cache priority first, then the least recently used, or what another
policy says.

    DISCARD  0   goes before all others
    NORMAL   1
    KEEP     2   goes after all others

A list for each owner and cache priority, in the order in which its blocks were let go, and on each block its rank
(key, time it was let go), which makes one order of the lists of all owners. A block keeps the highest cache priority of
those who used it until it is free.

The head of a path is let go after its tail by everybody who used both, and with no lower a cache priority; so a head
goes last, unless its tail belongs to an owner that may not lose it now.

An `EvictionPolicy` gives the keys, one to a block each time it is let go: the lowest goes first, of equal ones the one
let go first. It orders only what may go. Cache priorities, pins, floors and quotas come before it, and a head has at
least the highest key below it (`Blocks`), so a tail goes before its head whatever the keys. "lru" is all keys equal,
the only policy that the native back end has. Another is a class and one call of `register`.

Cost: O(1) to add and to take out, O(owners) to find the first; with a policy O(cached) to find it, and O(children) to
add, to see what is below.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter

from quire.cache.manager.owners import NOBODY
from quire.cache.types import DISCARD, KEEP, NORMAL
from quire.registry import Registry

__all__ = ["NO_KEY", "EvictionOrder", "EvictionPolicy", "policy_of", "register", "unregister"]

NO_KEY = float("-inf")  # lower than every key of a policy


class EvictionPolicy:
    """Says which of the cached blocks goes first. A cache has its own; a subclass overrides what it needs."""

    def stored(self, block_id: int) -> None:
        """The block is handed out to be written: what it held before is gone. O(1), please."""

    def used(self, block_id: int) -> None:
        """One more sequence takes over the content of the block. O(1), please."""

    def key(self, block_id: int) -> float:
        """Of a block that nobody holds any more; the lowest goes first. Asked once each time it is let go."""
        return 0


_POLICIES: Registry[Callable[[], EvictionPolicy | None]] = Registry(
    "an eviction policy", "eviction", {"lru": lambda: None}
)
unregister = _POLICIES.unregister


def register(name: str, make: Callable[[], EvictionPolicy]) -> None:
    """Have `Cache(backend="python", eviction=name)` evict as what `make` returns says, called once for each cache.

    *raises:* ArgumentError: the name is taken by another.
    """
    _POLICIES.register(name, make)


def policy_of(name: str) -> EvictionPolicy | None:
    """A new policy of that name; None for "lru". ArgumentError for a name that does not exist."""
    return _POLICIES[name]()


class EvictionOrder:
    """The cached blocks; for every block its owner and cache priority, which change only while it is not cached."""

    def __init__(self, num_ids: int, policy: EvictionPolicy | None = None) -> None:
        self.policy = policy
        self.owner_id = [NOBODY] * num_ids
        self.cache_priority = [NORMAL] * num_ids
        # (owner, cache priority) -> block -> (key, when it was let go).
        self._lists: dict[tuple[int, int], OrderedDict[int, tuple[float, int]]] = {}
        self._clock = 0
        self._count = 0

    def grow(self, num_new: int) -> None:
        self.owner_id += [NOBODY] * num_new
        self.cache_priority += [NORMAL] * num_new

    def __len__(self) -> int:
        return self._count

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._lists.get((self.owner_id[block_id], self.cache_priority[block_id]), ())

    def __iter__(self) -> Iterator[int]:
        """In the order in which they would be given up if every owner had to."""
        for cache_priority in (DISCARD, NORMAL, KEEP):
            lists = [block_ids for (_, level), block_ids in self._lists.items() if level == cache_priority]
            together = {block_id: rank for block_ids in lists for block_id, rank in block_ids.items()}
            yield from sorted(together, key=together.__getitem__)

    def rank_of(self, block_id: int) -> tuple[float, int]:
        """(key, when it was let go) of a cached block: the lower go first."""
        return self._lists[self.owner_id[block_id], self.cache_priority[block_id]][block_id]

    def num_cached(self, owner_id: int) -> int:
        return sum(len(self._lists.get((owner_id, level), ())) for level in (DISCARD, NORMAL, KEEP))

    def first(self, owner_ids: Iterable[int]) -> int | None:
        """The block of one of these owners that is given up next."""
        owner_ids = list(owner_ids)
        for cache_priority in (DISCARD, NORMAL, KEEP):
            heads = [
                next(iter(block_ids.items()))
                if self.policy is None
                else min(block_ids.items(), key=itemgetter(1))
                for owner_id in owner_ids
                if (block_ids := self._lists.get((owner_id, cache_priority)))
            ]
            if heads:
                return min(heads, key=itemgetter(1))[0]
        return None

    def append(self, block_id: int, least_key: float = NO_KEY) -> None:
        """It is cached from now on, and the most recently used. least_key: its key is no lower."""
        block_ids = self._lists.setdefault(
            (self.owner_id[block_id], self.cache_priority[block_id]), OrderedDict()
        )
        key = 0 if self.policy is None else max(least_key, self.policy.key(block_id))
        block_ids[block_id] = (key, self._clock)
        self._clock += 1
        self._count += 1

    def remove(self, block_id: int) -> None:
        del self._lists[self.owner_id[block_id], self.cache_priority[block_id]][block_id]
        self._count -= 1

    def clear(self) -> None:
        self._lists.clear()
        self._count = 0
