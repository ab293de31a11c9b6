"""`RowCache`: the cache of storages in which every sequence lies in one piece (`contiguous`, `growing`).

It has the calls of `protocol.KVCache`, so that the same scheduler drives it, with these differences:

    open      finds no prefix; remembers how long the sequence may become
    reserve   gives a sequence a place at its first call, and a larger place when it outgrows that; computed tokens move
              with it (the plan's copies), and the old place is free once the step has ended
    commit    counts; no token becomes findable, so no content is kept once a sequence ends, and a cache priority has no
              effect
    fork      for beams: parent and fork become members of one `SharedPlace`, and name tokens there
    owners    are counted and have no limits: every sequence has a place of its own, so an idle owner has no cached
              blocks to take for a running one. An engine that wants to limit an owner admits fewer of its requests

`row_space.RowSpace` (`Arena` or `Buffers`) decides where places are and how large. The cache counts blocks of that
space (tokens of an arena, pages of buffers) and reports how many are wasted. Not thread-safe: one thread at a time.

Invariants
    W1  no two places overlap, and free + held + in flight = num_blocks; a place in flight was released, but a running
        step may still read it.
    W2  a row has a place, its own or a shared one, exactly if it has reserved; the place has room for its `reserved`
        tokens.
    W3  reserve is all or nothing: if it returns None, nothing has changed.

Cost: open and append O(tokens), reserve O(sequences + tables + new tokens), the rest O(1) a sequence. With members of a
`SharedPlace`, reserve is O(tokens of its sequences), fork O(tokens).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.baselines.row import Row, RowRanges, SharedPlace
from quire.baselines.row_plan import RowLayout, RowPlan, token_entries
from quire.baselines.row_space import RowSpace
from quire.cache import arguments
from quire.cache.block_map import FREE, HELD, IN_FLIGHT, BlockMap
from quire.cache.memory_use import MemoryUse
from quire.cache.pins import Pins
from quire.cache.protocol import NORMAL, CacheSequence, Int32Array, Int64Array, KVCache
from quire.cache.results import Dropped, Match, OwnerCounts, PriorityChange
from quire.cache.states.memory_split import MemorySplit
from quire.errors import ArgumentError, InvariantError
from quire.spec import KVSpec

__all__ = ["RowCache"]

_Sequences = SequenceOf[CacheSequence] | Int64Array
_Counts = SequenceOf[int] | NDArray[np.integer]
_EXTENT_TOKENS = 64  # of a shared place's further extents, if memory has room for so many


class RowCache(KVCache):
    """See the module's text.

    space: `Arena` or `Buffers`. row_tokens: tokens of a table entry in the storage's views and maximum of a sequence; a
    slot is `entry * row_tokens + position`. block_bytes: of one block of the space.
    """

    can_fork = False
    exchange: MemorySplit | None = None
    prefix_caching = False
    backend = "python"

    def __init__(
        self,
        spec: KVSpec,
        space: RowSpace,
        *,
        row_tokens: int,
        block_bytes: int,
        overlapped_steps: bool = False,
    ) -> None:
        self.spec = spec
        self.space = space
        self.block_name = space.block_name
        self.block_bytes = block_bytes
        self.block_size = self.row_tokens = arguments.count(row_tokens, "row_tokens", 1)
        self.node_tokens = self.block_size
        self.num_blocks = space.num_blocks
        self.num_groups = space.num_tables
        self.overlapped_steps = overlapped_steps
        self.pins = Pins(self)
        self.rows: dict[int, Row] = {}
        self.num_opened = 0
        self.newest_step = 0
        self.completed_step = 0
        self.num_query_tokens = 0
        self.num_moved_tokens = 0  # tokens copied to a larger place, counted in every table
        self.num_held = self.num_in_flight = self.most_blocks = 0
        # Released places (or their ranges that the row no longer has), the step that may still read them, and the owner
        # they count in.
        self._flights: list[tuple[int, RowRanges, RowRanges | None, int]] = []
        self._released: list[tuple[int, int, int]] = []  # not yet in a plan

    def __repr__(self) -> str:
        return f"RowCache({type(self.space).__name__}, {self.num_blocks} {self.block_name}s)"

    # Prefixes: a row cache finds none

    def match(
        self, token_ids: Any, *, namespace: bytes = b"", extra_keys: Mapping[int, bytes] | None = None
    ) -> Match:
        arguments.prompt(token_ids, namespace, extra_keys)
        return Match(0)

    def drop(
        self, token_ids: Any, *, namespace: bytes = b"", extra_keys: Mapping[int, bytes] | None = None
    ) -> Dropped:
        arguments.prompt(token_ids, namespace, extra_keys)
        return Dropped(0, 0)

    def set_cache_priority(
        self,
        token_ids: Any,
        cache_priority: int,
        *,
        start: int = 0,
        namespace: bytes = b"",
        extra_keys: Mapping[int, bytes] | None = None,
    ) -> PriorityChange:
        tokens, *_ = arguments.prompt(token_ids, namespace, extra_keys)
        arguments.priority_change(cache_priority, start, len(tokens))
        return PriorityChange(0, len(tokens))

    def evict_path(
        self, token_ids: Any, *, namespace: bytes = b"", extra_keys: Mapping[int, bytes] | None = None
    ) -> int:
        arguments.prompt(token_ids, namespace, extra_keys)
        return 0

    def namespaces(self) -> list[bytes]:
        return []

    def withdraw(self, sequence: CacheSequence | int) -> None:
        self._row(sequence, "withdraw")  # no token of it is findable anyway

    # Sequences

    def open(
        self,
        token_ids: Any,
        *,
        namespace: bytes = b"",
        extra_keys: Mapping[int, bytes] | None = None,
        max_num_tokens: int | None = None,
        owner_id: int = 0,
        cache_priority: int = NORMAL,
        max_cached_tokens: int | None = None,
    ) -> Row:
        """Open a sequence of these tokens, with no token computed.

        Namespace, keys, cache priority and a limit of the hit have no effect without sharing.

        `max_num_tokens`: the limit of its length; by default the longest that the space allows.
        """
        tokens, *_ = arguments.prompt(token_ids, namespace, extra_keys)
        owner_id, _ = arguments.owner_and_cache_priority(owner_id, cache_priority)
        arguments.most_cached(max_cached_tokens)
        if max_num_tokens is not None:
            arguments.count(max_num_tokens, "max_num_tokens", 1)
        row = Row(self.num_opened, tokens, max(len(tokens), max_num_tokens or self.space.longest), owner_id)
        self.num_opened += 1
        self.rows[row.id] = row
        return row

    def fork(self, sequence: CacheSequence | int) -> Row:
        row = self._row(sequence, "fork")
        fork = Row(self.num_opened, row.tokens, row.most_tokens, row.owner_id)
        if row.place is not None or row.shared is not None:
            shared = row.shared or SharedPlace(row)
            shared.join(fork, row.offsets[: row.num_computed].copy())
            fork.num_computed = fork.reserved = row.num_computed
        self.num_opened += 1
        self.rows[fork.id] = fork
        return fork

    def has_room_to_fork(self, sequence: CacheSequence | int) -> bool:
        self._row(sequence, "has_room_to_fork")
        return True

    def rewind(self, sequence: CacheSequence | int, position: int) -> int:
        position = arguments.count(position, "position", 0)
        row = self._row(sequence, "rewind")
        if position > row.num_tokens:
            raise ArgumentError(
                f"expected a position of 0 .. {row.num_tokens} for sequence {row.id}, got {position} in rewind"
            )
        self._settle()
        row.truncate(position)
        row.num_computed = row.reserved = min(position, row.num_computed)
        if row.shared is not None:
            row.offsets, row.room = row.offsets[: row.reserved], row.reserved
        return row.num_computed

    def close(self, sequence: CacheSequence | int) -> None:
        row = self._row(sequence, "close")
        del self.rows[row.id]
        row.is_open = False
        self._settle()
        places = [] if row.place is None else [row.place]
        if row.shared is not None:
            row.shared.members.remove(row)
            places = [] if row.shared.members else row.shared.extents
        for place in places:
            self._flight(row, place, None)
        self._settle()

    def _row(self, sequence: CacheSequence | int, where: str) -> Row:
        if isinstance(sequence, Row):
            row_id = sequence.id
            if self.rows.get(row_id, sequence) is not sequence:
                raise ArgumentError(f"expected a sequence of this cache, got {sequence} of another one")
        else:
            row_id = arguments.count(sequence, "a sequence id", 0)
        row = self.rows.get(row_id)
        if row is None:
            raise arguments.closed(row_id, where)
        return row

    def _id(self, sequence: CacheSequence | int) -> int:
        return self._row(sequence, "reserve").id

    # Reserving

    def num_blocks_needed(
        self, sequences: _Sequences, num_new_tokens: _Counts, *, num_lookahead_tokens: int = 0
    ) -> int:
        step = arguments.step(sequences, self._id, num_new_tokens, num_lookahead_tokens)
        wanted = self._wanted(*step)
        own = sum(
            self.space.blocks_needed(row, end) for row, end in wanted if end > row.room and row.shared is None
        )
        return own + sum(self.space.blocks_of_extent(count) for _, count in _lacking(wanted))

    def reserve(
        self, sequences: _Sequences, num_new_tokens: _Counts, *, num_lookahead_tokens: int = 0
    ) -> RowPlan | None:
        step = arguments.step(sequences, self._id, num_new_tokens, num_lookahead_tokens)
        return self.reserve_unchecked(*step)

    def reserve_unchecked(
        self, sequence_ids: Int64Array, num_new_tokens: Int64Array, num_lookahead_tokens: int = 0
    ) -> RowPlan | None:
        wanted = self._wanted(sequence_ids, num_new_tokens, num_lookahead_tokens)
        self._settle()
        places: list[tuple[Row, RowRanges]] = []
        extents: list[tuple[SharedPlace, RowRanges]] = []
        for row, end in wanted:
            if end <= row.room or row.shared is not None:
                continue
            place = self.space.find(row, end)
            if place is None:
                self._give_back(places, extents)
                return None
            places.append((row, place))
        for shared, count in _lacking(wanted):
            extent = self.space.find_extent(max(count, _EXTENT_TOKENS)) or self.space.find_extent(count)
            if extent is None:
                self._give_back(places, extents)
                return None
            extents.append((shared, extent))

        self.newest_step += 1
        for shared, extent in extents:
            self.num_held += self.space.blocks_of(extent, None)
            shared.add(extent)
        copies: list[tuple[int, int, int, int]] = []
        for row, place in places:
            self.num_held += self.space.blocks_of(place, row.place)
            if row.place is None:
                self.num_query_tokens += row.num_tokens
            else:
                copies += _moves(row, row.place, place)
                self._flight(row, row.place, place)
            row.settle_in(place)
        for row, end in wanted:
            if row.shared is not None and end > row.room:
                row.shared.take(row, end)
            row.reserved = end
        self.num_moved_tokens += sum(copy[3] for copy in copies)
        self.most_blocks = max(self.most_blocks, self.num_held + self.num_in_flight)
        return self._plan([row for row, _ in wanted], num_new_tokens, num_lookahead_tokens, copies)

    def _give_back(
        self, places: list[tuple[Row, RowRanges]], extents: list[tuple[SharedPlace, RowRanges]]
    ) -> None:
        """Gives the places and extents back that a refused call took."""
        for _, extent in reversed(extents):
            self.space.give(extent, None)
        for row, taken in reversed(places):
            self.space.give(taken, row.place)

    def _wanted(
        self, sequences: Int64Array, num_new_tokens: Int64Array, num_lookahead: int
    ) -> list[tuple[Row, int]]:
        """Each row and the end of the positions that get slots. Changes nothing."""
        wanted: list[tuple[Row, int]] = []
        ids = sequences.tolist()
        if len(set(ids)) < len(ids):
            twice = next(i for i in ids if ids.count(i) > 1)
            raise ArgumentError(f"expected each sequence once in reserve, got sequence {twice} twice")
        for sequence, num_new in zip(ids, num_new_tokens.tolist(), strict=True):
            row = self._row(sequence, "reserve")
            num_known = row.num_tokens - row.num_computed
            if not 1 <= num_new <= num_known:
                raise ArgumentError(
                    f"expected 1 .. {num_known} new tokens for sequence {sequence} ({row.num_tokens} known, "
                    f"{row.num_computed} computed), got {num_new} in reserve; append them first"
                )
            end = row.num_computed + num_new + num_lookahead
            if end > row.room and end > (limit := min(self.space.limit(row), self.row_tokens)):
                raise ArgumentError(
                    f"expected at most {limit} tokens in sequence {sequence}, for which it was opened, got {end} in "
                    "reserve; open it with a larger max_num_tokens"
                )
            wanted.append((row, end))
        return wanted

    def _plan(
        self,
        rows: list[Row],
        num_new_tokens: Int64Array,
        num_lookahead: int,
        copies: list[tuple[int, int, int, int]],
    ) -> RowPlan:
        n = len(rows)
        computed = np.fromiter((row.num_computed for row in rows), np.int64, n)
        counts = num_new_tokens.astype(np.int64)
        query_start = np.zeros(n + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        row_of_token = np.repeat(np.arange(n), counts)
        positions = np.arange(int(query_start[-1])) + (computed - query_start[:-1])[row_of_token]
        starts = np.empty((self.space.num_tables, n), np.int64)
        for index, row in enumerate(rows):
            starts[:, index] = 0 if row.place is None else row.place.starts
        has_members = any(row.shared is not None for row in rows)
        released, self._released = self._released, []
        made = RowLayout(
            step=self.newest_step,
            query_start=query_start,
            context_lengths=(computed + counts).astype(np.int32),
            row_of_token=row_of_token,
            positions=positions,
            starts=starts,
            row_tokens=self.row_tokens,
            num_lookahead=num_lookahead,
            all_copies=np.array(copies, np.int64).reshape(-1, 4),
            released=np.array(released, np.int64).reshape(-1, 3),
            tops=np.array(self.space.tops, np.int64),
            tokens=token_entries(rows, computed + counts + num_lookahead) if has_members else None,
        )
        return RowPlan.of_rows(made)

    # Committing

    def num_blocks_to_restore(self, sequence: CacheSequence | int, num_computed_tokens: int) -> int:
        row = self._row(sequence, "num_blocks_to_restore")
        return self.num_blocks_needed([row], [num_computed_tokens - row.num_computed])

    def restore(self, sequence: CacheSequence | int, num_computed_tokens: int) -> RowPlan | None:
        """Like `reserve`: a row keeps all tokens, also behind a window."""
        row = self._row(sequence, "restore")
        return self.reserve([row], [num_computed_tokens - row.num_computed])

    def commit(self, sequence: CacheSequence | int, num_computed_tokens: int) -> None:
        num_computed = arguments.count(num_computed_tokens, "num_computed_tokens", 0)
        row = self._row(sequence, "commit")
        limit = min(row.reserved, row.num_tokens)
        if not row.num_computed <= num_computed <= limit:
            raise ArgumentError(
                f"expected {row.num_computed} .. {limit} computed tokens for sequence {row.id} "
                f"({row.reserved} reserved, {row.num_tokens} known), got {num_computed} in commit"
            )
        self._settle()
        row.num_computed = num_computed

    def advance(self, sequences: _Sequences, num_computed_tokens: _Counts, token_ids: Any) -> None:
        ids, counts, _ = arguments.step(sequences, self._id, num_computed_tokens, 0)
        self.advance_unchecked(ids, counts, arguments.one_token_each(token_ids, len(ids)))

    def advance_unchecked(
        self, sequence_ids: Int64Array, num_computed_tokens: Int64Array, token_ids: Int32Array
    ) -> None:
        pairs = zip(sequence_ids.tolist(), num_computed_tokens.tolist(), strict=True)
        for index, (sequence, count) in enumerate(pairs):
            self.commit(sequence, count)
            self.rows[sequence].append(token_ids[index : index + 1])

    def complete(self, step: int) -> None:
        step = arguments.count(step, "step", 1)
        if step > self.newest_step:
            raise ArgumentError(f"expected a step of 1 .. {self.newest_step}, got {step} in complete")
        self.completed_step = max(self.completed_step, step)
        if self.overlapped_steps:
            self._settle()

    def _flight(self, row: Row, place: RowRanges, kept: RowRanges | None) -> None:
        """Release the place except `kept`; it is free once the newest step has ended."""
        num_blocks = self.space.blocks_of(place, kept)
        self.num_held -= num_blocks
        self.num_in_flight += num_blocks
        # No step reads a sequence closed between two steps; a copy's source is read until its step has ended.
        last = self.newest_step if self.overlapped_steps or kept is not None else 0
        self._flights.append((last, place, kept, row.owner_id))

    def _settle(self) -> None:
        """Free the places whose step has ended: without overlapped steps all of them, at the next call that changes
        something."""
        if not self._flights:
            return
        done = self.completed_step if self.overlapped_steps else self.newest_step
        waiting: list[tuple[int, RowRanges, RowRanges | None, int]] = []
        for last, place, kept, owner_id in self._flights:
            if last > done:
                waiting.append((last, place, kept, owner_id))
                continue
            self.num_in_flight -= self.space.blocks_of(place, kept)
            for table in range(self.space.num_tables):
                start = int(place.starts[table])
                if kept is None or start != int(kept.starts[table]):
                    self._released.append((table, start, start + int(place.capacities[table])))
            self.space.give(place, kept)
        self._flights = waiting

    def _shared_places(self) -> list[SharedPlace]:
        return list(dict.fromkeys(row.shared for row in self.rows.values() if row.shared is not None))

    def _places(self) -> list[tuple[Row, RowRanges]]:
        """Every place and extent, once, with its row; of a shared place with its first member."""
        own = [(row, row.place) for row in self.rows.values() if row.place is not None]
        return own + [
            (shared.members[0], part) for shared in self._shared_places() for part in shared.extents
        ]

    # Owners

    def set_limits(self, owner_id: int, floor_blocks: int = 0, quota_blocks: int = -1) -> None:
        owner_id, floor, quota = arguments.owner_limits(owner_id, floor_blocks, quota_blocks)
        if not floor and quota < 0:
            return  # owners have no limits
        raise ArgumentError(
            f"expected a storage whose sequences share memory, got limits for owner {owner_id} in one where each lies "
            "in one piece of its own; use storage paged or virtual"
        )

    def owner_counts(self, owner_id: int) -> OwnerCounts:
        owner_id = arguments.owner_number(owner_id)
        held = sum(
            self.space.blocks_of(place, None) for row, place in self._places() if row.owner_id == owner_id
        )
        flights = [(place, kept) for _, place, kept, number in self._flights if number == owner_id]
        return OwnerCounts(held, 0, sum(self.space.blocks_of(place, kept) for place, kept in flights))

    def num_available_blocks(self, owner_id: int = 0) -> int:
        return self.space.num_free

    def max_owner_blocks(self, owner_id: int = 0) -> int:
        return self.num_blocks

    # Capacity

    def num_blocks_for(self, num_tokens: int) -> int:
        return self.space.num_blocks_for(num_tokens)

    def max_sequence_tokens(self) -> int:
        low, high = 0, self.space.longest
        while low < high:
            middle = (low + high + 1) // 2
            if self.space.num_blocks_for(middle) <= self.num_blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def blocks_later(self, num_tokens: int, num_reserved: int) -> int:
        return 0  # the first reserve takes the place of all known tokens

    def margin(self, share: float) -> int:
        return math.ceil(share * self.num_blocks) if self.space.grows else 0

    @property
    def num_free_blocks(self) -> int:
        return self.space.num_free

    @property
    def largest_free_blocks(self) -> int:
        return self.space.largest_free

    # Reports

    def stats(self) -> dict[str, int]:
        """As in the contract; moved_tokens: tokens copied to a larger place, counted in every table."""
        none = (
            "cached",
            "pinned",
            "num_nodes",
            "hit_tokens",
            "evicted_blocks",
            "copied_blocks",
            "deduplicated_blocks",
        )
        return dict.fromkeys(none, 0) | {
            "num_blocks": self.num_blocks,
            "free": self.space.num_free,
            "held": self.num_held,
            "in_flight": self.num_in_flight,
            "num_sequences": len(self.rows),
            "query_tokens": self.num_query_tokens,
            "moved_tokens": self.num_moved_tokens,
        }

    def memory_use(self) -> MemoryUse:
        """The present use of memory. Cost: O(open sequences)."""
        block_bytes, token_bytes = self.block_bytes, self.spec.bytes_per_token
        used = later = 0
        for row in self.rows.values():
            if row.place is not None:
                used += row.num_computed
                later += max(0, self.space.useful(row) - row.num_computed)
        for shared in self._shared_places():
            num_named = shared.num_named
            used += num_named
            later += shared.capacity - num_named
        return MemoryUse(
            reserved=(self.num_held + self.num_in_flight) * block_bytes,
            used=used * token_bytes,
            later=later * token_bytes,
            external=(self.space.num_free - self.space.largest_free) * block_bytes,
            cached=0,
            peak=self.most_blocks * block_bytes,
            total=self.num_blocks * block_bytes,
        )

    def spans(self) -> list[tuple[int, int, int]]:
        """(sequence id, first block, blocks) of all taken blocks; id -1: in flight. Buffers, which lie in many layer
        buffers, are listed one after another."""
        out: list[tuple[int, RowRanges, RowRanges | None]] = [
            (row.id, place, None) for row, place in self._places()
        ]
        out += [(-1, place, kept) for _, place, kept, _ in self._flights]
        spans: list[tuple[int, int, int]] = []
        end = 0
        for owner, place, kept in out:
            num_blocks = self.space.blocks_of(place, kept)
            spans.append((owner, end if self.space.grows else int(place.starts[0]), num_blocks))
            end += num_blocks
        return spans

    def computed_share(self, sequence_id: int) -> float:
        """The share of the sequence's place whose K and V are computed."""
        row = self.rows[sequence_id]
        if row.shared is not None:
            return row.shared.num_named / row.shared.capacity
        return row.num_computed / row.room if row.room else 0.0

    def block_map(self) -> BlockMap:
        states = np.full(self.num_blocks, FREE, np.uint8)
        for owner, start, num_blocks in self.spans():
            states[start : start + num_blocks] = HELD if owner >= 0 else IN_FLIGHT
        return BlockMap(states, np.full(len(states), -1, np.int32), [])

    def content_of(self, block_id: int) -> None:
        arguments.count(block_id, "a block", 0)  # no content is findable again

    def check(self) -> None:
        places = [place for _, place in self._places()]
        held = sum(self.space.blocks_of(place, None) for place in places)
        in_flight = sum(self.space.blocks_of(place, kept) for _, place, kept, _ in self._flights)
        counted = (self.num_held, self.num_in_flight, self.space.num_free + held + in_flight)
        if counted != (held, in_flight, self.space.num_blocks):
            raise InvariantError(
                f"W1: {self.space.num_free} free + {held} held ({self.num_held} counted) + {in_flight} in flight "
                f"({self.num_in_flight} counted) are not {self.space.num_blocks} blocks"
            )
        self.space.check(places + [place for _, place, _, _ in self._flights])
        for shared in self._shared_places():
            shared.check()
        for row in self.rows.values():
            if row.room < row.reserved or row.num_computed > min(row.reserved, row.num_tokens):
                raise InvariantError(
                    f"W2: row {row.id} has room for {row.room}, {row.reserved} reserved, {row.num_tokens} known, "
                    f"{row.num_computed} computed"
                )


def _moves(row: Row, old: RowRanges, new: RowRanges) -> list[tuple[int, int, int, int]]:
    """(table, from, to, tokens) of each range of the row that moves."""
    moved = np.flatnonzero(old.starts != new.starts)
    return [(t, int(old.starts[t]), int(new.starts[t]), row.num_computed) for t in moved.tolist()]


def _lacking(wanted: list[tuple[Row, int]]) -> list[tuple[SharedPlace, int]]:
    """Each shared place whose members lack offsets for these ends, and how many."""
    counts: dict[SharedPlace, int] = {}
    for row, end in wanted:
        if row.shared is not None and end > row.room:
            counts[row.shared] = counts.get(row.shared, 0) + end - row.room
    lacking = [(shared, shared.num_lacking(count)) for shared, count in counts.items()]
    return [(shared, count) for shared, count in lacking if count]
