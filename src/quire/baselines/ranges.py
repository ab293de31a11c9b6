"""A first-fit allocator of ranges of a line of places, for storages with contiguous sequences.

Not a pool: a range is taken and given back whole, and has no known content. Places are integers 0 .. size - 1; the
caller defines their meaning (a token of an arena, a granule of a layer buffer).

Invariants
    A1  free ranges are sorted and not empty; no two overlap or touch (neighbours are merged at once).
    A2  free and taken places add up to `size`; so the state depends only on the taken ranges, not on their history.
    A3  a call that fails changes nothing.

Cost: `take` O(free ranges), `give` O(log free ranges) and the shifting of a list.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

from quire.errors import InvariantError

__all__ = ["Ranges"]


class Ranges:
    """A line of `size` places, all free at first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_free = size
        self.highest_taken = 0  # end of the highest range ever handed out
        self._starts = [0] if size else []
        self._stops = [size] if size else []

    @property
    def largest_free(self) -> int:
        """Places of the longest free range, the maximum for `take`."""
        return max((stop - start for start, stop in self.free()), default=0)

    def free(self) -> list[tuple[int, int]]:
        """(start, stop) of each free range, in order."""
        return list(zip(self._starts, self._stops, strict=True))

    def take(self, size: int) -> int | None:
        """Take the first `size` places of the first free range that has them. Returns its start, or None."""
        for index, start in enumerate(self._starts):
            stop = start + size
            if stop > self._stops[index]:
                continue
            if stop == self._stops[index]:
                del self._starts[index], self._stops[index]
            else:
                self._starts[index] = stop
            self.num_free -= size
            self.highest_taken = max(self.highest_taken, stop)
            return start
        return None

    def give(self, start: int, size: int) -> None:
        """Free a taken range. *raises:* InvariantError: a part of it is free already."""
        stop = start + size
        index = bisect_left(self._starts, start)
        joins_left = index > 0 and self._stops[index - 1] >= start
        joins_right = index < len(self._starts) and self._starts[index] <= stop
        if (joins_left and self._stops[index - 1] > start) or (joins_right and self._starts[index] < stop):
            raise InvariantError(f"expected [{start}, {stop}) to be taken, part of it is free: A2 of ranges")
        if start < 0 or stop > self.size or size < 1:
            raise InvariantError(
                f"expected a range within 0 .. {self.size}, got [{start}, {stop}): A2 of ranges"
            )
        if joins_left and joins_right:
            self._stops[index - 1] = self._stops[index]
            del self._starts[index], self._stops[index]
        elif joins_left:
            self._stops[index - 1] = stop
        elif joins_right:
            self._starts[index] = start
        else:
            self._starts.insert(index, start)
            self._stops.insert(index, stop)
        self.num_free += size

    def check(self, taken: list[tuple[int, int]]) -> None:
        """Check A1 and A2. taken: (start, size) of every taken range."""
        free = self.free()
        pieces = sorted([(start, stop - start) for start, stop in free] + taken)
        at = 0
        for start, size in pieces:
            if start != at or size < 1:
                raise InvariantError(
                    f"A2: expected a range that begins at {at}, got [{start}, {start + size})"
                )
            at = start + size
        if at != self.size:
            raise InvariantError(f"A2: {at} of {self.size} places are accounted for")
        for (_, stop), (start, _) in pairwise(free):
            if stop >= start:
                raise InvariantError(f"A1: free ranges meet at {start}, end {stop}")
        if self.num_free != sum(stop - start for start, stop in free):
            raise InvariantError(f"A2: {self.num_free} counted as free, {free} are")
