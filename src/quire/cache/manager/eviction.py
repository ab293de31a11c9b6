"""The eviction order of cached blocks: the lowest cache priority first, then the least recently used, or the order of
another policy.

    DISCARD  0   goes before all others
    NORMAL   1
    KEEP     2   goes after all others

Each owner and cache priority has a list, in the order in which its blocks were released. Each block has a rank (key,
time of its release), which merges the lists of all owners into one order. Until it is free, a block keeps the highest
cache priority of its users.

Every sequence that used a path releases its head after its tail, and with no lower a cache priority. So a head goes
last, unless its tail belongs to an owner that may not lose it now.

An `EvictionPolicy` gives the keys, one to a block each time it is released: the lowest goes first, among equals the one
released first. It orders only blocks that may go. Cache priorities, pins, floors and quotas come before it, and a head
has at least the highest key below it (`Blocks`), so a tail goes before its head whatever the keys. "lru" means equal
keys, the only policy of the native back end. Another policy is a class and one call of `register`.

Cost: O(1) to add and to remove, O(owners) to find the first; with a policy O(cached) to find it, and O(children) to
add, for the keys below.
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
    """Orders the cached blocks for eviction. Each cache has its own policy; a subclass overrides the methods it
    needs."""

    def stored(self, block_id: int) -> None:
        """The block is handed out to be written: its earlier content is gone. Should be O(1)."""

    def used(self, block_id: int) -> None:
        """One more sequence uses the content of the block. Should be O(1)."""

    def key(self, block_id: int) -> float:
        """The key of a block that no sequence holds any more; the lowest goes first. Called once at each release."""
        return 0


_POLICIES: Registry[Callable[[], EvictionPolicy | None]] = Registry(
    "an eviction policy", "eviction", {"lru": lambda: None}
)
unregister = _POLICIES.unregister


def register(name: str, make: Callable[[], EvictionPolicy]) -> None:
    """Registers `make` as the policy of `Cache(backend="python", eviction=name)`; each cache calls it once.

    *raises:* ArgumentError: another policy has the name.
    """
    _POLICIES.register(name, make)


def policy_of(name: str) -> EvictionPolicy | None:
    """A new policy of that name; None for "lru". ArgumentError for an unknown name."""
    return _POLICIES[name]()


class EvictionOrder:
    """The cached blocks; for every block its owner and cache priority, which change only while it is not cached."""

    def __init__(self, num_ids: int, policy: EvictionPolicy | None = None) -> None:
        self.policy = policy
        self.owner_id = [NOBODY] * num_ids
        self.cache_priority = [NORMAL] * num_ids
        # (owner, cache priority) -> block -> (key, time of its release).
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
        """In eviction order if every owner had to give up all its blocks."""
        for cache_priority in (DISCARD, NORMAL, KEEP):
            lists = [block_ids for (_, level), block_ids in self._lists.items() if level == cache_priority]
            together = {block_id: rank for block_ids in lists for block_id, rank in block_ids.items()}
            yield from sorted(together, key=together.__getitem__)

    def rank_of(self, block_id: int) -> tuple[float, int]:
        """(key, time of its release) of a cached block: lower ranks go first."""
        return self._lists[self.owner_id[block_id], self.cache_priority[block_id]][block_id]

    def num_cached(self, owner_id: int) -> int:
        return sum(len(self._lists.get((owner_id, level), ())) for level in (DISCARD, NORMAL, KEEP))

    def first(self, owner_ids: Iterable[int]) -> int | None:
        """The block of these owners that is evicted next."""
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
        """Adds the block as the most recently used one. least_key: lower bound of its key."""
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
