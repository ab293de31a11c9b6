"""The eviction order of cached blocks: the lowest cache priority first, then the order of a policy.

    DISCARD  0   goes before all others
    NORMAL   1
    KEEP     2   goes after all others

The default policy is "frequency": the block with the highest age / (uses + 1) goes first. Its age is the number of
blocks released since its own release. Its uses are 1 for the sequence that computed it and 1 for each hit, up to 5; for
content that was evicted a short time ago they are counted on (`ghosts.py`). So content that is used once does not push
out content that is used again, and content without further uses stays at most three times as long. The policy has no
parameter. "lru", the least recently used block first, counts no uses.

Each owner, cache priority and number of uses has a list, in the order in which its blocks were released. Until it is
free, a block keeps the highest cache priority of its users, unless `Cache.set_cache_priority` sets another one.

Every sequence that used a path releases its head after its tail, and with no lower a cache priority. A head has at
least the uses of its tail. So a head goes last, unless its tail belongs to an owner that may not lose it now.

Another policy is a subclass of `EvictionPolicy` and one call of `register`. It gives the keys, one to a block each time
it is released: the lowest goes first, among equals the one released first. It orders only blocks that may go. Cache
priorities, pins, floors and quotas come before it, and a head has at least the highest key below it (`Blocks`), so a
tail goes before its head whatever the keys. The native back end has "frequency" and "lru" alone.

Cost: O(1) to add and to remove, O(owners) to find the first; with a registered policy O(cached) to find it, and
O(children) to add, for the keys below. O(cached) to change cache priorities.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping

from quire.cache.manager.owners import NOBODY
from quire.cache.types import DISCARD, KEEP, NORMAL
from quire.registry import Registry

__all__ = [
    "FREQUENCY",
    "MAX_USES",
    "NO_KEY",
    "EvictionOrder",
    "EvictionPolicy",
    "policy_of",
    "register",
    "unregister",
]

FREQUENCY = "frequency"
MAX_USES = 5
# By number of uses: 60 / (uses + 1), so that quotients of ages are compared in integers.
_SHARES = (0, 30, 20, 15, 12, 10)

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
    "an eviction policy", "eviction", {FREQUENCY: lambda: None, "lru": lambda: None}
)
unregister = _POLICIES.unregister


def register(name: str, make: Callable[[], EvictionPolicy]) -> None:
    """Registers `make` as the policy of `Cache(backend="python", eviction=name)`; each cache calls it once.

    *raises:* ArgumentError: another policy has the name.
    """
    _POLICIES.register(name, make)


def policy_of(name: str) -> EvictionPolicy | None:
    """A new policy of that name; None for "frequency" and "lru". ArgumentError for an unknown name."""
    return _POLICIES[name]()


class EvictionOrder:
    """The cached blocks; for every block its owner, cache priority and uses. While it is cached, only
    `change_cache_priorities` changes one of them.

    counts_uses: whether the policy is "frequency"; every block has 1 use otherwise."""

    def __init__(
        self, num_ids: int, policy: EvictionPolicy | None = None, *, counts_uses: bool = False
    ) -> None:
        self.policy = policy
        self.counts_uses = counts_uses
        self.owner_id = [NOBODY] * num_ids
        self.cache_priority = [NORMAL] * num_ids
        self.uses = [1] * num_ids
        # (owner, cache priority, uses) -> block -> (key, time of its release).
        self._lists: dict[tuple[int, int, int], OrderedDict[int, tuple[float, int]]] = {}
        self._clock = 0
        self._count = 0

    def grow(self, num_new: int) -> None:
        self.owner_id += [NOBODY] * num_new
        self.cache_priority += [NORMAL] * num_new
        self.uses += [1] * num_new

    def __len__(self) -> int:
        return self._count

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._lists.get(self._list_of(block_id), ())

    def __iter__(self) -> Iterator[int]:
        """In eviction order if every owner had to give up all its blocks."""
        for cache_priority in (DISCARD, NORMAL, KEEP):
            ranks = {
                block_id: self._rank(uses, *entry)
                for (_, level, uses), entries in self._lists.items()
                if level == cache_priority
                for block_id, entry in entries.items()
            }
            yield from sorted(ranks, key=ranks.__getitem__)

    def _list_of(self, block_id: int) -> tuple[int, int, int]:
        return self.owner_id[block_id], self.cache_priority[block_id], self.uses[block_id]

    def _rank(self, uses: int, key: float, time: int) -> tuple[float, int]:
        """Lower ranks go first. With "frequency" it is age / (uses + 1), as of now, the highest first."""
        return (-(self._clock - time) * _SHARES[uses] if self.counts_uses else key), time

    def rank_of(self, block_id: int) -> tuple[float, int]:
        """(key, time of its release) of a cached block."""
        return self._lists[self._list_of(block_id)][block_id]

    def num_cached(self, owner_id: int) -> int:
        return sum(len(entries) for (number, _, _), entries in self._lists.items() if number == owner_id)

    def first(self, owner_ids: Iterable[int]) -> int | None:
        """The block of these owners that is evicted next."""
        owner_ids = list(owner_ids)
        numbers = range(1, MAX_USES + 1 if self.counts_uses else 2)
        for cache_priority in (DISCARD, NORMAL, KEEP):
            heads: list[tuple[tuple[float, int], int]] = []
            for owner_id in owner_ids:
                for uses in numbers:
                    entries = self._lists.get((owner_id, cache_priority, uses))
                    if not entries:
                        continue
                    if self.policy is None:
                        block_id, entry = next(iter(entries.items()))
                    else:
                        block_id, entry = min(entries.items(), key=lambda item: item[1])
                    heads.append((self._rank(uses, *entry), block_id))
            if heads:
                return min(heads)[1]
        return None

    def count_use(self, block_id: int, most: int) -> int:
        """Counts one more use of a block that is not cached, up to `most`; the uses it has now."""
        if self.counts_uses:
            self.uses[block_id] = max(self.uses[block_id], min(self.uses[block_id] + 1, most, MAX_USES))
        return self.uses[block_id]

    def append(self, block_id: int, least_key: float = NO_KEY) -> None:
        """Adds the block as the most recently used one. least_key: lower bound of its key."""
        entries = self._lists.setdefault(self._list_of(block_id), OrderedDict())
        key = 0 if self.policy is None else max(least_key, self.policy.key(block_id))
        entries[block_id] = (key, self._clock)
        self._clock += 1
        self._count += 1

    def remove(self, block_id: int) -> None:
        del self._lists[self._list_of(block_id)][block_id]
        self._count -= 1

    def change_cache_priorities(self, levels: Mapping[int, int]) -> None:
        """Gives blocks other cache priorities. A cached block keeps its key and the time of its release."""
        moved: dict[tuple[int, int, int], list[tuple[int, tuple[float, int]]]] = {}
        for block_id, level in levels.items():
            entry = self._lists.get(self._list_of(block_id), {}).pop(block_id, None)
            self.cache_priority[block_id] = level
            if entry is not None:
                moved.setdefault(self._list_of(block_id), []).append((block_id, entry))
        for place, entries in moved.items():
            entries += self._lists.get(place, {}).items()
            self._lists[place] = OrderedDict(sorted(entries, key=lambda item: item[1][1]))

    def clear(self) -> None:
        self._lists.clear()
        self._count = 0
