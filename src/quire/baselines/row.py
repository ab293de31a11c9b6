"""A row, which is a sequence of a storage that has each in one piece, and its place: of its own, or shared with beams.

The first fork of a row makes its place a shared one. A *member* is a row with a table: for each position the number of
its token among all tokens of the shared place, its *offset*. A fork copies the table; a new token of a member takes an
offset that no other member names. So beams are continued without a copy of keys or values, and the prompt is stored
once. A step with members reads every row through entries of one token each (`quire.baselines.row_plan`).

Where all offsets have been used, those that only closed members named are used again, and then the place gets a
further range of the space, an *extent*. Its memory is freed with its last member.

Invariants
    P1  an offset that a member names is not free, and lies in one of the extents.
    P2  the offsets of a member are distinct, and each is written once between two times that it is free.

Cost: `take` O(tokens); `num_lacking` O(1), and O(tokens of all members) when it looks for unused offsets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.cache import arguments
from quire.cache.known_tokens import KnownTokens
from quire.cache.protocol import CacheSequence, Int32Array, Int64Array
from quire.errors import InvariantError

__all__ = ["Row", "RowRanges", "SharedPlace"]

_NO_OFFSETS = np.empty(0, np.int32)


@dataclass(frozen=True, eq=False)
class RowRanges:
    """The place of a sequence. int64 [num_tables] each: first token of its range, and capacity of the range."""

    starts: Int64Array
    capacities: Int64Array

    @property
    def num_tokens(self) -> int:
        """Tokens for which every table has room."""
        return int(self.capacities.min())


class Row(CacheSequence):
    """An open sequence: its tokens, the number computed, and its place (None until it first reserves, and for a member
    of a `SharedPlace`)."""

    __slots__ = (
        "_known",
        "id",
        "is_open",
        "most_tokens",
        "num_computed",
        "offsets",
        "owner_id",
        "place",
        "reserved",
        "room",
        "shared",
    )

    def __init__(self, row_id: int, tokens: Int32Array, most_tokens: int, owner_id: int = 0) -> None:
        self._known = KnownTokens(tokens)
        self.is_open = True
        self.id = row_id
        self.owner_id = owner_id
        self.most_tokens = most_tokens  # its limit
        self.num_computed = 0
        self.reserved = 0
        self.place: RowRanges | None = None
        self.room = 0  # tokens of its place
        self.shared: SharedPlace | None = None
        self.offsets: Int32Array = _NO_OFFSETS  # of a member: int32 [room]

    def __repr__(self) -> str:
        return f"Sequence(id={self.id})"

    def _require_open(self, where: str) -> None:
        if not self.is_open:
            raise arguments.closed(self.id, where)

    @property
    def tokens(self) -> Int32Array:
        self._require_open("tokens")
        return self._known.tokens.copy()

    @property
    def num_tokens(self) -> int:
        self._require_open("num_tokens")
        return self._known.num_tokens

    @property
    def num_cached_tokens(self) -> int:
        self._require_open("num_cached_tokens")
        return 0  # nothing is shared

    @property
    def num_computed_tokens(self) -> int:
        self._require_open("num_computed_tokens")
        return self.num_computed

    @property
    def is_findable(self) -> bool:
        self._require_open("is_findable")
        return False

    def append(self, token_ids: Any) -> None:
        self._require_open("append")
        self._known.append(arguments.token_array(token_ids))

    def block_table(self, group: int = 0) -> Int32Array:
        """One entry, the beginning of its range of table `group`; empty before it first reserves. Of a member of a
        `SharedPlace`, its offsets there."""
        self._require_open("block_table")
        if self.shared is not None:
            return self.offsets.copy()
        starts = () if self.place is None else self.place.starts[group : group + 1]
        return np.array(starts, np.int32)

    def truncate(self, num_tokens: int) -> None:
        """Forget the known tokens from `num_tokens` on."""
        self._known.num_tokens = num_tokens

    def settle_in(self, place: RowRanges) -> None:
        self.place = place
        self.room = place.num_tokens


class SharedPlace:
    """The place of `row`, which becomes its first member."""

    def __init__(self, row: Row) -> None:
        assert row.place is not None  # a row without a place has no token to share
        self.extents: list[RowRanges] = []
        self.bases: list[int] = []  # first offset of each extent
        self.capacity = 0
        self.owner_id = row.owner_id
        self.members: list[Row] = []
        self._num_used = row.reserved  # the offsets from here on have not been used
        self._free = np.empty(0, np.int32)
        self.add(row.place)
        self.join(row, np.arange(row.reserved, dtype=np.int32))

    def add(self, extent: RowRanges) -> None:
        """Appends a range of the space."""
        self.extents.append(extent)
        self.bases.append(self.capacity)
        self.capacity += extent.num_tokens

    def join(self, row: Row, offsets: Int32Array) -> None:
        """Makes a row a member. offsets: int32 [tokens], of its positions."""
        self.members.append(row)
        row.place, row.shared, row.offsets, row.room = None, self, offsets, len(offsets)

    def num_lacking(self, num_tokens: int) -> int:
        """Offsets that `num_tokens` new tokens lack."""
        unused = self.capacity - self._num_used
        if num_tokens > unused + len(self._free):
            is_free = np.ones(self._num_used, bool)
            for row in self.members:
                is_free[row.offsets] = False
            self._free = np.flatnonzero(is_free).astype(np.int32)
        return max(0, num_tokens - unused - len(self._free))

    def take(self, row: Row, end: int) -> None:
        """Gives a member offsets up to position `end`; none may lack."""
        count = end - row.room
        first = self._num_used
        self._num_used = min(self.capacity, first + count)
        new = np.arange(first, self._num_used, dtype=np.int32)
        if missing := count - len(new):
            new = np.concatenate((new, self._free[:missing]))
            self._free = self._free[missing:]
        row.offsets = np.concatenate((row.offsets, new))
        row.room = end

    @property
    def num_named(self) -> int:
        """Offsets of computed tokens, each counted once."""
        return len(np.unique(np.concatenate([row.offsets[: row.num_computed] for row in self.members])))

    def check(self) -> None:
        """Checks P1 and P2."""
        free = set(self._free.tolist())
        for row in self.members:
            offsets = row.offsets.tolist()
            named = set(offsets)
            if len(named) != len(offsets) or named & free or max(offsets, default=-1) >= self._num_used:
                raise InvariantError(f"P1, P2: row {row.id} has offsets {offsets}, free are {sorted(free)}")
        if self._num_used > self.capacity:
            raise InvariantError(f"P1: {self._num_used} offsets are used of {self.capacity}")
