"""Which states are kept, of which content, and which goes first: the checkpoints of a cache for layers with states.

A *state* is what recurrent layers have made of all tokens before a position; it says nothing of positions before that
one. A *checkpoint* is a state kept in a slot, found by the very tokens (and extra keys) it was made of, within their
namespace. Not the bytes, and not whose slot is whose: `state_cache.StateCache` knows that.

Which goes first is a question of bytes per token saved, and of time (GreedyDual: Young 1994, "The k-server dual and
loose competitiveness for paging"). All states of a model have equal bytes, so a checkpoint's score is the clock plus
the tokens it saves beyond the next shorter one; the lowest goes, and the clock moves up to it.

Invariants
    K1  no two checkpoints have the same namespace and content, or the same slot.
    K2  one that is pinned (somebody is going to copy it) is never a victim.

Cost: `find` and `add` O(tokens x log checkpoints), as comparisons of bytes; `victim` O(checkpoints).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from quire.cache.manager.elements import decode
from quire.cache.types import Int32Array

__all__ = ["Checkpoint", "Checkpoints"]


@dataclass(eq=False)
class Checkpoint:
    """content: of its tokens, as `manager.content.encode` writes them. cache_priority: the highest of those who have
    left it. stored_as: that with which it is stored in the tiers; -1 for not yet."""

    namespace: bytes
    content: bytes
    num_tokens: int
    slot: int
    num_saved: int  # tokens beyond the next shorter one, when it was made
    score: float = 0.0
    num_pins: int = 0
    cache_priority: int = 1
    stored_as: int = -1
    is_found: bool = True  # not once it was removed; whoever has pinned it copies it still

    def decoded(self) -> tuple[Int32Array, tuple[tuple[int, bytes], ...]]:
        """Its tokens, and (position, key) of those with an extra key."""
        if len(self.content) == 4 * self.num_tokens:  # no keys
            return (np.frombuffer(self.content, ">u4") >> 1).astype(np.int32), ()
        tokens, keys = decode(self.content)
        return np.array(tokens, np.int32), tuple(keys)


class Checkpoints:
    """All of one cache."""

    def __init__(self) -> None:
        self._contents: dict[bytes, list[bytes]] = {}  # sorted, by namespace
        self._found: dict[tuple[bytes, bytes], Checkpoint] = {}
        self._clock = 0.0

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[Checkpoint]:
        """The one that was of use least recently first."""
        return iter(self._found.values())

    def get(self, namespace: bytes, content: bytes) -> Checkpoint | None:
        """Of exactly this content."""
        return self._found.get((namespace, content))

    def find(self, namespace: bytes, content: bytes) -> Checkpoint | None:
        """The one of most tokens whose content this content begins with."""
        contents = self._contents.get(namespace, [])
        while contents:
            at = bisect_right(contents, content)
            if at == 0:
                return None
            left = contents[at - 1]
            if content.startswith(left):
                return self._found[namespace, left]
            # What is sought ends where the two differ, or before.
            content = content[: _num_common(left, content)]
        return None

    def add(self, namespace: bytes, content: bytes, num_tokens: int, slot: int) -> Checkpoint:
        """None of this content may be there."""
        shorter = self.find(namespace, content)
        num_saved = num_tokens - (0 if shorter is None else shorter.num_tokens)
        made = Checkpoint(namespace, content, num_tokens, slot, num_saved)
        self._found[namespace, content] = made
        insort(self._contents.setdefault(namespace, []), content)
        self.use(made)
        return made

    def use(self, checkpoint: Checkpoint) -> None:
        """It was of use just now."""
        checkpoint.score = self._clock + checkpoint.num_saved
        place = checkpoint.namespace, checkpoint.content
        self._found[place] = self._found.pop(place)

    def victim(self, but: Collection[int] = ()) -> Checkpoint | None:
        """The one to go first; None where all are pinned, or lie in the slots `but`. Removes nothing."""
        free_to_go = (one for one in self if not one.num_pins and one.slot not in but)
        return min(free_to_go, key=lambda one: one.score, default=None)

    def worth(self, checkpoint: Checkpoint) -> float:
        """Tokens that it saves, fewer the longer it was of no use."""
        return checkpoint.score - self._clock

    @property
    def num_pinned(self) -> int:
        return len(self) - self.num_free_to_go

    @property
    def num_free_to_go(self) -> int:
        return sum(not one.num_pins for one in self)

    def evict(self, checkpoint: Checkpoint) -> None:
        """`remove`, for want of room: time goes on, to where the victim is, whether it is that one or not."""
        self._clock = max(self._clock, (self.victim() or checkpoint).score)
        self.remove(checkpoint)

    def remove(self, checkpoint: Checkpoint) -> None:
        """It is found no more."""
        checkpoint.is_found = False
        namespace, content = checkpoint.namespace, checkpoint.content
        del self._found[namespace, content]
        contents = self._contents[namespace]
        del contents[bisect_left(contents, content)]
        if not contents:
            del self._contents[namespace]

    def beginning_with(self, namespace: bytes, content: bytes) -> list[Checkpoint]:
        """Those whose content begins with this content; all of the namespace where it is empty."""
        contents = self._contents.get(namespace, [])
        first = bisect_left(contents, content)
        last = first
        while last < len(contents) and contents[last].startswith(content):
            last += 1
        return [self._found[namespace, one] for one in contents[first:last]]


def _num_common(a: bytes, b: bytes) -> int:
    """Bytes that the two begin with."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # a prefix is compared at the speed of memory: halving is faster than a loop over bytes
        middle = (low + high + 1) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
