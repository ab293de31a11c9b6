"""The block manager of storages in which a sequence lies in one piece, and nothing is shared or found again.

The same calls as `block_manager.PythonBlockManager` with the same meaning, so that one scheduler drives both; what
differs is what such a storage cannot do:

    open      finds nothing; remembers how long the sequence may become
    reserve   gives a sequence its place when it first reserves, and a larger one when it has outgrown it; what is
              computed moves with it (the plan's copies), the old place is free once the step has ended
    commit    counts; nothing becomes findable
    fork      refused: two sequences would need one past. Open the tokens anew

Where places are and how large is `row_space.RowSpace`'s: `Arena` or `Buffers`. Not thread-safe.

Invariants
    W1  no two places overlap, and free + held + leased = num_units: leased are places given up that a step under way
        may still read.
    W2  a row has a place exactly if it has reserved; there is room in it for its `reserved` tokens.
    W3  reserve is all or nothing: None and nothing has changed.

Cost: open and append O(tokens), reserve O(sequences + tables + new tokens), the rest O(1) a sequence.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.cache.backend import EventArrays, Int32Array, Int64Array, TreeArrays
from quire.cache.event_log import EventLog
from quire.cache.row_plan import RowPlan
from quire.cache.row_space import Place, Row, RowSpace
from quire.cache.tree_view import empty_tree
from quire.cache.unit_map import FREE, HELD, LEASED
from quire.errors import InvariantError

__all__ = ["RowManager"]


class RowManager:
    """See the module docstring, and `backend.BlockManager` for each call.

    row_tokens: of a slot, `entry * row_tokens + position`; no sequence may be longer.
    """

    def __init__(self, space: RowSpace, row_tokens: int, overlapped_steps: bool) -> None:
        self.space = space
        self.row_tokens = row_tokens
        self.overlapped_steps = overlapped_steps
        self.rows: dict[int, Row] = {}
        self.num_opened = 0
        self.newest_step = 0
        self.completed_step = 0
        self.num_query_tokens = 0
        self.num_moved_tokens = 0  # copied to a larger place, counted in every table
        self.num_held = self.num_leased = self.most_units = 0
        # Places (or those of their ranges that are not the row's any more) and the step that may still read them.
        # The last number is the account they count in.
        self._leases: list[tuple[int, Place, Place | None, int]] = []
        self._released: list[tuple[int, int, int]] = []  # not yet in a plan

    # What is known of a sequence

    def match(
        self, tokens: Int32Array, namespace: bytes, key_positions: Int64Array, keys: list[bytes]
    ) -> int:
        return 0

    def explain(
        self, tokens: Int32Array, namespace: bytes, key_positions: Int64Array, keys: list[bytes]
    ) -> tuple[int, int, Int32Array]:
        return 0, 0, np.empty(0, np.int32)

    def drop(self, tokens: Int32Array, namespace: bytes, key_positions: Int64Array, keys: list[bytes]) -> int:
        return 0

    def open(self, tokens: Int32Array, most_tokens: int | None, account: int = 0) -> int:
        row = Row(self.num_opened, tokens, max(len(tokens), most_tokens or self.space.longest), account)
        self.num_opened += 1
        self.rows[row.id] = row
        return row.id

    def append(self, sequence: int, tokens: Int32Array) -> None:
        self.rows[sequence].append(tokens)

    def tokens(self, sequence: int) -> Int32Array:
        return self.rows[sequence].tokens.copy()

    def num_tokens(self, sequence: int) -> int:
        return self.rows[sequence].num_tokens

    def num_cached_tokens(self, sequence: int) -> int:
        self.rows[sequence]
        return 0

    def num_computed_tokens(self, sequence: int) -> int:
        return self.rows[sequence].num_computed

    def block_table(self, sequence: int, table: int) -> Int32Array:
        place = self.rows[sequence].place
        starts = np.empty(0, np.int32) if place is None else place.starts[table : table + 1].astype(np.int32)
        return starts

    # Reserving

    def num_blocks_needed(self, sequences: Int64Array, num_new_tokens: Int64Array, num_lookahead: int) -> int:
        wanted = self._wanted(sequences, num_new_tokens, num_lookahead)
        return sum(self.space.units_needed(row, end) for row, end in wanted if end > row.room)

    def reserve(
        self, sequences: Int64Array, num_new_tokens: Int64Array, num_lookahead: int
    ) -> RowPlan | None:
        wanted = self._wanted(sequences, num_new_tokens, num_lookahead)
        self._settle()
        found: list[tuple[Row, Place]] = []
        for row, end in wanted:
            if end <= row.room:
                continue
            place = self.space.find(row, end)
            if place is None:
                for other, taken in reversed(found):
                    self.space.give(taken, other.place)
                return None
            found.append((row, place))

        self.newest_step += 1
        copies: list[tuple[int, int, int, int]] = []
        for row, place in found:
            self.num_held += self.space.units_of(place, row.place)
            if row.place is None:
                self.num_query_tokens += row.num_tokens
            else:
                copies += _moves(row, row.place, place)
                self._lease(row, row.place, place)
            row.settle_in(place)
        for row, end in wanted:
            row.reserved = end
        self.num_moved_tokens += sum(copy[3] for copy in copies)
        self.most_units = max(self.most_units, self.num_held + self.num_leased)
        return self._plan([row for row, _ in wanted], num_new_tokens, num_lookahead, copies)

    def _wanted(
        self, sequences: Int64Array, num_new_tokens: Int64Array, num_lookahead: int
    ) -> list[tuple[Row, int]]:
        """Each row and the end of the positions that get slots. Changes nothing."""
        wanted: list[tuple[Row, int]] = []
        ids = sequences.tolist()
        if len(set(ids)) < len(ids):
            twice = next(i for i in ids if ids.count(i) > 1)
            raise ValueError(f"expected each sequence once in reserve, got sequence {twice} twice")
        for sequence, num_new in zip(ids, num_new_tokens.tolist(), strict=True):
            row = self.rows[sequence]
            num_known = row.num_tokens - row.num_computed
            if not 1 <= num_new <= num_known:
                raise ValueError(
                    f"expected 1 .. {num_known} new tokens for sequence {sequence} ({row.num_tokens} known, "
                    f"{row.num_computed} computed), got {num_new} in reserve; append them first"
                )
            end = row.num_computed + num_new + num_lookahead
            if end > row.room and end > (limit := min(self.space.limit(row), self.row_tokens)):
                raise ValueError(
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
            assert row.place is not None
            starts[:, index] = row.place.starts
        released, self._released = self._released, []
        return RowPlan(
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
        )

    # Committing

    def num_blocks_to_readmit(self, sequence: int, num_computed_tokens: int) -> int:
        num_new = num_computed_tokens - self.rows[sequence].num_computed
        return self.num_blocks_needed(np.array([sequence]), np.array([num_new]), 0)

    def readmit(self, sequence: int, num_computed_tokens: int) -> RowPlan | None:
        """Nothing lies behind a window here: a row keeps all."""
        num_new = num_computed_tokens - self.rows[sequence].num_computed
        return self.reserve(np.array([sequence]), np.array([num_new]), 0)

    def commit(self, sequence: int, num_computed_tokens: int) -> None:
        row = self.rows[sequence]
        most = min(row.reserved, row.num_tokens)
        if not row.num_computed <= num_computed_tokens <= most:
            raise ValueError(
                f"expected {row.num_computed} .. {most} computed tokens for sequence {sequence} "
                f"({row.reserved} reserved, {row.num_tokens} known), got {num_computed_tokens} in commit"
            )
        self._settle()
        row.num_computed = num_computed_tokens

    def advance(self, sequences: Int64Array, num_computed_tokens: Int64Array, tokens: Int32Array) -> None:
        for index, (sequence, count) in enumerate(
            zip(sequences.tolist(), num_computed_tokens.tolist(), strict=True)
        ):
            self.commit(sequence, count)
            self.append(sequence, tokens[index : index + 1])

    def complete(self, step: int) -> None:
        if not 1 <= step <= self.newest_step:
            raise ValueError(f"expected a step of 1 .. {self.newest_step}, got {step} in complete")
        self.completed_step = max(self.completed_step, step)
        if self.overlapped_steps:
            self._settle()

    # Rewinding, closing

    def fork(self, sequence: int) -> int:
        self.rows[sequence]
        raise ValueError(
            f"expected a storage whose sequences share their past, got a fork of sequence {sequence} in one where "
            "each lies in one piece of its own; open its tokens anew, or use storage paged or virtual"
        )

    def rewind(self, sequence: int, position: int) -> int:
        row = self.rows[sequence]
        if not 0 <= position <= row.num_tokens:
            raise ValueError(
                f"expected a position of 0 .. {row.num_tokens} for sequence {sequence}, got {position} in rewind"
            )
        self._settle()
        row.num_tokens = position
        row.num_computed = row.reserved = min(position, row.num_computed)
        return row.num_computed

    def close(self, sequence: int) -> None:
        row = self.rows.pop(sequence)
        self._settle()
        if row.place is not None:
            self._lease(row, row.place, None)
            self._settle()

    def _lease(self, row: Row, place: Place, kept: Place | None) -> None:
        """Given up but for `kept`: free once the newest step has ended."""
        units = self.space.units_of(place, kept)
        self.num_held -= units
        self.num_leased += units
        # What is closed between two steps nobody reads; what a step copies from is read until it has ended.
        last = self.newest_step if self.overlapped_steps or kept is not None else 0
        self._leases.append((last, place, kept, row.account))

    def _settle(self) -> None:
        """Free the places whose step has ended: without overlapped steps every one, at the next call that changes
        something."""
        if not self._leases:
            return
        done = self.completed_step if self.overlapped_steps else self.newest_step
        waiting: list[tuple[int, Place, Place | None, int]] = []
        for last, place, kept, account in self._leases:
            if last > done:
                waiting.append((last, place, kept, account))
                continue
            self.num_leased -= self.space.units_of(place, kept)
            for table in range(self.space.num_tables):
                start = int(place.starts[table])
                if kept is None or start != int(kept.starts[table]):
                    self._released.append((table, start, start + int(place.capacities[table])))
            self.space.give(place, kept)
        self._leases = waiting

    # Accounts: counted, without limits. Where every sequence keeps a place of its own there is nothing to take from one
    # that rests for one that runs, and an engine that wants to hold somebody back admits less.

    def set_limits(self, account: int, floor_units: int, quota_units: int) -> None:
        if not floor_units and quota_units < 0:
            return  # no limits, as ever
        raise ValueError(
            f"expected a storage whose sequences share memory, got limits for account {account} in one where each lies "
            "in one piece of its own; use storage paged or virtual"
        )

    def account_counts(self, account: int) -> tuple[int, int, int]:
        places = [row.place for row in self.rows.values() if row.account == account]
        held = sum(self.space.units_of(place, None) for place in places if place is not None)
        leases = [(place, kept) for _, place, kept, number in self._leases if number == account]
        return held, 0, sum(self.space.units_of(place, kept) for place, kept in leases)

    def num_available(self, account: int) -> int:
        return self.space.num_free

    def max_units(self, account: int) -> int:
        return self.space.num_units

    # The whole: nothing is found again, so nothing happens that an event could tell

    def record_events(self, is_on: bool) -> None:
        pass

    @property
    def num_events(self) -> int:
        return 0

    def take_events(self) -> EventArrays:
        return EventLog(self.space.num_tables, self.row_tokens).take()

    def tree(self) -> TreeArrays:
        return empty_tree(self.space.num_tables)

    def namespaces(self) -> list[bytes]:
        return []

    def reset(self) -> None:
        if self.rows:
            raise ValueError(f"expected no open sequence in reset, got {len(self.rows)}; close them first")

    def counts(self) -> tuple[int, int, int, int]:
        return self.space.num_free, 0, self.num_held, self.num_leased

    def stats(self) -> dict[str, int]:
        return {
            "num_blocks": self.space.num_units,
            "free": self.space.num_free,
            "cached": 0,
            "held": self.num_held,
            "leased": self.num_leased,
            "num_sequences": len(self.rows),
            "num_nodes": 0,
            "hit_tokens": 0,
            "query_tokens": self.num_query_tokens,
            "evicted_blocks": 0,
            "copied_blocks": 0,
            "deduplicated_blocks": 0,
            "moved_tokens": self.num_moved_tokens,
        }

    def spans(self) -> list[tuple[int, int, int]]:
        """(row, first unit, units) of all that is out; row -1: leased. Buffers lie in many lanes of address space: they
        stand one after another here."""
        out = [(row.id, row.place, None) for row in self.rows.values() if row.place is not None]
        out += [(-1, place, kept) for _, place, kept, _ in self._leases]
        spans: list[tuple[int, int, int]] = []
        end = 0
        for owner, place, kept in out:
            units = self.space.units_of(place, kept)
            spans.append((owner, end if self.space.grows else int(place.starts[0]), units))
            end += units
        return spans

    def unit_map(self) -> tuple[NDArray[np.uint8], Int32Array]:
        states = np.full(self.space.num_units, FREE, np.uint8)
        for owner, start, units in self.spans():
            states[start : start + units] = HELD if owner >= 0 else LEASED
        return states, np.full(len(states), -1, np.int32)

    def content_of(self, unit: int) -> None:
        return None  # nothing is found again

    def check(self) -> None:
        places = [row.place for row in self.rows.values() if row.place is not None]
        held = sum(self.space.units_of(place, None) for place in places)
        leased = sum(self.space.units_of(place, kept) for _, place, kept, _ in self._leases)
        counted = (self.num_held, self.num_leased, self.space.num_free + held + leased)
        if counted != (held, leased, self.space.num_units):
            raise InvariantError(
                f"W1: {self.space.num_free} free + {held} held ({self.num_held} counted) + {leased} leased "
                f"({self.num_leased} counted) are not {self.space.num_units} units"
            )
        self.space.check(places + [place for _, place, _, _ in self._leases])
        for row in self.rows.values():
            if row.room < row.reserved or row.num_computed > min(row.reserved, row.num_tokens):
                raise InvariantError(
                    f"W2: row {row.id} has room for {row.room}, {row.reserved} reserved, {row.num_tokens} known, "
                    f"{row.num_computed} computed"
                )


def _moves(row: Row, old: Place, new: Place) -> list[tuple[int, int, int, int]]:
    """(table, from, to, tokens) of each range of the row that becomes another."""
    moved = np.flatnonzero(old.starts != new.starts)
    return [(t, int(old.starts[t]), int(new.starts[t]), row.num_computed) for t in moved.tolist()]
