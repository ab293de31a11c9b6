"""The checkpoints of a cache for layers with states: which states it keeps, for which content, and which it evicts
first.

A *state* summarises all tokens before a position for the recurrent layers; it says nothing of earlier positions. A
*checkpoint* is a state kept in a slot. It is found by exactly the tokens (and extra keys) that it was computed from,
within their namespace. This file knows neither the bytes nor the users of slots: `state_cache.StateCache` does.

The eviction order weighs bytes per token saved, and time (GreedyDual: Young 1994, "The k-server dual and loose
competitiveness for paging"). All states of a model have equal bytes, so a checkpoint's score is the clock plus the
tokens it saves beyond the next shorter one. The lowest score of the lowest cache priority goes first, and the clock
moves up to the lowest score of all.

Invariants
    K1  no two checkpoints have the same namespace and content, or the same slot.
    K2  a pinned checkpoint (a sequence is going to copy it) is never a victim.

Cost: `find` and `add` O(tokens x log checkpoints), as comparisons of bytes; `victim` O(checkpoints).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import inf

import numpy as np

from quire.cache.manager.elements import decode
from quire.cache.types import Int32Array

__all__ = ["Checkpoint", "Checkpoints"]


@dataclass(eq=False)
class Checkpoint:
    """content: its tokens, as `manager.elements.encode` writes them. cache_priority: the highest among the sequences
    that left it or began with it since `set_cache_priority`. stored_as: the priority with which the tiers store it; -1
    if they do not yet."""

    namespace: bytes
    content: bytes
    num_tokens: int
    slot: int
    num_saved: int  # tokens beyond the next shorter checkpoint, when it was made
    score: float = 0.0
    num_pins: int = 0
    cache_priority: int = 1
    stored_as: int = -1
    is_found: bool = True  # False once it was removed; a sequence that pinned it still copies it

    def decoded(self) -> tuple[Int32Array, tuple[tuple[int, bytes], ...]]:
        """Its tokens, and (position, key) of each extra key."""
        if len(self.content) == 4 * self.num_tokens:  # no keys
            return (np.frombuffer(self.content, ">u4") >> 1).astype(np.int32), ()
        tokens, keys = decode(self.content)
        return np.array(tokens, np.int32), tuple(keys)


class Checkpoints:
    """All checkpoints of one cache."""

    def __init__(self) -> None:
        self._contents: dict[bytes, list[bytes]] = {}  # sorted, by namespace
        self._found: dict[tuple[bytes, bytes], Checkpoint] = {}
        self._clock = 0.0

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[Checkpoint]:
        """The least recently used checkpoint first."""
        return iter(self._found.values())

    def get(self, namespace: bytes, content: bytes) -> Checkpoint | None:
        """The checkpoint of exactly this content."""
        return self._found.get((namespace, content))

    def find(self, namespace: bytes, content: bytes) -> Checkpoint | None:
        """The longest checkpoint whose content is a prefix of this content."""
        contents = self._contents.get(namespace, [])
        while contents:
            at = bisect_right(contents, content)
            if at == 0:
                return None
            left = contents[at - 1]
            if content.startswith(left):
                return self._found[namespace, left]
            # The checkpoint sought ends at the first difference of the two, or before.
            content = content[: _num_common(left, content)]
        return None

    def add(self, namespace: bytes, content: bytes, num_tokens: int, slot: int) -> Checkpoint:
        """Adds a checkpoint; the cache must not have the content yet."""
        shorter = self.find(namespace, content)
        num_saved = num_tokens - (0 if shorter is None else shorter.num_tokens)
        made = Checkpoint(namespace, content, num_tokens, slot, num_saved)
        self._found[namespace, content] = made
        insort(self._contents.setdefault(namespace, []), content)
        self.use(made)
        return made

    def use(self, checkpoint: Checkpoint) -> None:
        """Marks it as just used."""
        checkpoint.score = self._clock + checkpoint.num_saved
        place = checkpoint.namespace, checkpoint.content
        self._found[place] = self._found.pop(place)

    def victim(self, but: Collection[int] = ()) -> Checkpoint | None:
        """The checkpoint to evict first; None if all are pinned or lie in the slots `but`. Removes nothing."""
        return min(self._free_to_go(but), key=lambda one: (one.cache_priority, one.score), default=None)

    def _free_to_go(self, but: Collection[int] = ()) -> Iterator[Checkpoint]:
        return (checkpoint for checkpoint in self if not checkpoint.num_pins and checkpoint.slot not in but)

    def worth(self, checkpoint: Checkpoint) -> float:
        """Tokens that it saves, fewer the longer it was unused."""
        return checkpoint.score - self._clock

    @property
    def num_pinned(self) -> int:
        return len(self) - self.num_free_to_go

    @property
    def num_free_to_go(self) -> int:
        return sum(1 for _ in self._free_to_go())

    def evict(self, checkpoint: Checkpoint) -> None:
        """`remove`, to make room. The clock moves up to the lowest score, whichever checkpoint goes."""
        lowest = min((one.score for one in self._free_to_go()), default=checkpoint.score)
        self._clock = max(self._clock, lowest)
        self.remove(checkpoint)

    def set_cache_priority(self, namespace: bytes, content: bytes, level: int, start: int) -> float:
        """Sets the cache priority of the checkpoints of more than `start` tokens that the content begins with. None
        falls below that of a checkpoint that continues it. Returns the token before the end of the shortest one that
        changed; infinity without any."""
        first, at = inf, self.find(namespace, content)
        while at is not None and at.num_tokens > start:
            longer = (
                one.cache_priority for one in self.beginning_with(namespace, at.content) if one is not at
            )
            new = max(level, min(at.cache_priority, max(longer, default=level)))
            if new != at.cache_priority:
                at.cache_priority, first = new, at.num_tokens - 1
            at = self.find(namespace, at.content[:-1])
        return first

    def remove(self, checkpoint: Checkpoint) -> None:
        """It can no longer be found."""
        checkpoint.is_found = False
        namespace, content = checkpoint.namespace, checkpoint.content
        del self._found[namespace, content]
        contents = self._contents[namespace]
        del contents[bisect_left(contents, content)]
        if not contents:
            del self._contents[namespace]

    def beginning_with(self, namespace: bytes, content: bytes) -> list[Checkpoint]:
        """The checkpoints whose content begins with this content; all of the namespace if it is empty."""
        contents = self._contents.get(namespace, [])
        first = bisect_left(contents, content)
        last = first
        while last < len(contents) and contents[last].startswith(content):
            last += 1
        return [self._found[namespace, stored] for stored in contents[first:last]]


def _num_common(a: bytes, b: bytes) -> int:
    """Bytes of the common prefix of the two."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # a prefix is compared at the speed of memory: halving is faster than a loop over bytes
        middle = (low + high + 1) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
