"""Random walks over a RowCache whose tokens have bytes: a number for each table, place and token.

Whatever the order of calls, what a step would read is what was written for that very sequence and position; a
reserve that is refused, also because an allocation failed midway, leaves everything as it was. With overlapped steps a
plan is run some time after it was made, in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire import KVSpec
from quire.baselines.arena import Arena
from quire.baselines.buffers import Buffers, LayerBuffer
from quire.baselines.ranges import Ranges
from quire.baselines.row_cache import RowCache
from quire.spec import LayerSpec, Span

ROW = 400  # longest sequence
NOTHING = -1


@dataclass
class Known:
    """What the machine knows of a sequence: each token's number, and how many are computed."""

    sequence: Any
    most: int
    tokens: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_written: int = 0  # by steps that have run


@dataclass
class Planned:
    """A plan, and for each of its sequences (owner, first new position, tokens up to its end)."""

    plan: Any
    parts: list[tuple[int, int, list[int]]]


def make_space(name: str, size: int, tables: int) -> Arena | Buffers:
    if name in ("max", "pow2", "exact"):
        return Arena(size, ROW, name)
    growth, _, step = name.partition(":")
    # Lanes of different granules; the last one's so short that its address space runs out before the pages do.
    layer_buffers = [LayerBuffer(24 * size, 4 << table, 1 + table) for table in range(tables)]
    layer_buffers[-1] = LayerBuffer(
        -(-2 * size // (4 << tables - 1)) * (4 << tables - 1), 4 << tables - 1, tables
    )
    return Buffers(layer_buffers, size, ROW, growth, int(step or 64))


class RowMachine(RuleBasedStateMachine):
    @initialize(
        name=st.sampled_from(["max", "pow2", "exact", "spread", "together:64", "together:7"]),
        size=st.integers(400, 2000),
        tables=st.integers(1, 3),
        overlapped=st.booleans(),
    )
    def begin(self, name: str, size: int, tables: int, overlapped: bool) -> None:
        self.space = make_space(name, size, tables)
        layer = LayerSpec(Span(), 1, 8, 8)
        self.cache = RowCache(
            KVSpec((layer,) * tables, "float32"),
            self.space,
            row_tokens=ROW,
            # Of a page at least what the granules' pages have to hold.
            block_bytes=64 * tables if isinstance(self.space, Arena) else 64 * (4 << tables),
            overlapped_steps=overlapped,
        )
        self.overlapped = overlapped
        layer_buffers = (
            [size]
            if isinstance(self.space, Arena)
            else [layer_buffer.num_tokens for layer_buffer in self.space.layer_buffers]
        )
        self.bytes = [np.full(tokens, NOTHING, np.int64) for tokens in layer_buffers]
        self.open: dict[int, Known] = {}
        self.under_way: list[Planned] = []
        self.next_token = 0
        for count in (3, 20):
            self.open_one(count, 300, True)

    def _tokens(self, count: int) -> list[int]:
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    def _array(self, tokens: list[int]) -> np.ndarray:
        return np.array(tokens, np.int32)

    # What callers do

    @precondition(lambda self: len(self.open) < 6)
    @rule(count=st.integers(1, 100), more=st.integers(0, 200), says=st.booleans())
    def open_one(self, count: int, more: int, says: bool) -> None:
        tokens = self._tokens(count)
        most = min(count + more, ROW) if says else ROW
        sequence = self.cache.open(self._array(tokens), max_num_tokens=most if says else None)
        self.open[sequence.id] = Known(sequence, most, tokens)

    @precondition(lambda self: self.open)
    @rule(count=st.sampled_from([1, 5, 40, 129, 130]))
    def append(self, count: int) -> None:
        """To all of them: a sequence outgrows its buffers by 129 to 192 tokens only."""
        for known in self.open.values():
            tokens = self._tokens(min(count, known.most - len(known.tokens)))
            known.sequence.append(self._array(tokens))
            known.tokens += tokens

    @precondition(lambda self: self.open)
    @rule(
        picks=st.sampled_from([[0], [1, 0], [0, 1, 2], [5, 3, 1, 0], list(range(6))]),
        commits=st.sampled_from([True, True, False]),
        part=st.sampled_from([1, 2, 3, 1000]),
        fails_at=st.sampled_from([None, None, None, 0, 1, 2, 3]),
    )
    def reserve(self, picks: list[int], commits: bool, part: int, fails_at: int | None) -> None:
        """Some sequences' next tokens; the take of a range fails at the `fails_at`-th, where that is given."""
        everyone = list(self.open.values())
        chosen = [everyone[pick] for pick in picks if pick < len(everyone)]
        chosen = [known for known in chosen if len(known.tokens) > known.num_computed]
        counts = [min(part, len(known.tokens) - known.num_computed) for known in chosen]
        if not chosen:
            return
        if not self.overlapped:
            self._run_all()
        sequences = [known.sequence for known in chosen]
        needed = self.cache.num_blocks_needed(sequences, counts)
        state = self._state()
        free = self.cache.num_free_blocks
        with failing_take(fails_at) as failed:
            plan = self.cache.reserve(sequences, counts)
        if plan is None:
            assert self._state() == state
            if len(chosen) == 1 and not failed() and needed <= free and chosen[0].sequence.shared is None:
                assert self._no_gap_for(chosen[0], chosen[0].num_computed + counts[0], needed)
            return
        # A further extent is refused at its usual size, and given at the size that is needed.
        assert not failed() or any(known.sequence.shared is not None for known in chosen)
        assert needed <= free
        parts = []
        for known, count in zip(chosen, counts, strict=True):
            end = known.num_computed + count
            parts.append((known.sequence.id, known.num_computed, known.tokens[:end]))
            known.num_written = end
        self._nothing_in_use_is_released(plan)
        self.under_way.append(Planned(plan, parts))
        if not self.overlapped:
            self._run_all()
        for known in chosen if commits else []:
            self.cache.commit(known.sequence, known.num_written)
            known.num_computed = known.num_written

    def _no_gap_for(self, known: Known, end: int, needed: int) -> bool:
        """Whether no free range is long enough, though all together would be."""
        if isinstance(self.space, Arena):
            return needed > self.space.largest_free
        granule = self.space.layer_buffers[-1].granule_tokens
        wanted = int(self.space.capacities(max(end, len(known.tokens)))[-1])
        return -(-wanted // granule) > self.space._ranges[-1].largest_free

    @precondition(lambda self: self.open)
    @rule(pick=st.integers(0, 99), part=st.sampled_from([0.0, 0.5, 1.0, 1.0]))
    def commit(self, pick: int, part: float) -> None:
        known = list(self.open.values())[pick % len(self.open)]
        to = known.num_computed + int(part * max(0, known.num_written - known.num_computed))
        self.cache.commit(known.sequence, to)
        known.num_computed = to

    @precondition(lambda self: self.open)
    @rule(pick=st.integers(0, 99), part=st.floats(0, 1))
    def rewind(self, pick: int, part: float) -> None:
        known = list(self.open.values())[pick % len(self.open)]
        self._run_all()
        position = int(part * len(known.tokens))
        assert self.cache.rewind(known.sequence, position) == min(position, known.num_computed)
        known.tokens = known.tokens[:position]
        known.num_computed = known.num_written = min(position, known.num_computed)

    @precondition(lambda self: self.open)
    @rule(count=st.sampled_from([1, 5, 40, 129, 130]), fails_at=st.sampled_from([None, None, 0, 1, 2, 3]))
    def generate(self, count: int, fails_at: int | None) -> None:
        """More tokens for everybody, computed at once; those that there is no room for end, youngest first."""
        self.append(count)
        self.reserve(list(range(6)), True, 1000, fails_at)
        while self.open and any(len(known.tokens) > known.num_computed for known in self.open.values()):
            self.reserve(list(range(6)), True, 1000, None)
            if any(len(known.tokens) > known.num_computed for known in self.open.values()):
                self.close(len(self.open) - 1)

    @precondition(lambda self: 0 < len(self.open) < 8)
    @rule(pick=st.integers(0, 99))
    def fork(self, pick: int) -> None:
        """The steps under way have run: a beam is forked once its step's candidates are known."""
        self._run_all()
        parent = list(self.open.values())[pick % len(self.open)]
        sequence = self.cache.fork(parent.sequence)
        self.open[sequence.id] = Known(
            sequence, parent.most, list(parent.tokens), parent.num_computed, parent.num_computed
        )

    @precondition(lambda self: len(self.open) > 1)
    @rule(pick=st.integers(0, 99))
    def close(self, pick: int) -> None:
        sequence_id = list(self.open)[pick % len(self.open)]
        self.cache.close(self.open.pop(sequence_id).sequence)

    @precondition(lambda self: self.under_way)
    @rule()
    def run_oldest(self) -> None:
        self._run(self.under_way.pop(0))

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self._run_all()
            for known in self.open.values():
                self.cache.close(known.sequence)
            self.cache.check()
            assert self.cache.num_free_blocks == self.cache.num_blocks

    # What a storage does

    def _run_all(self) -> None:
        while self.under_way:
            self._run(self.under_way.pop(0))

    def _run(self, planned: Planned) -> None:
        """Give back, copy, write, read; then the step has ended."""
        plan = planned.plan
        for table, start, stop in plan.rows.released.tolist():
            self.bytes[table][start:stop] = NOTHING
        for table, memory in enumerate(self.bytes):
            part = plan.group(table)
            for source, destination, count in part.copies.tolist():
                memory[destination : destination + count] = memory[source : source + count]
            slots = part.slot_mapping
            by_token = plan.rows.tokens is not None
            places = slots if by_token else slots // ROW + slots % ROW
            assert len(set(places.tolist())) == len(places)
            for row, (_, first, tokens) in enumerate(planned.parts):
                begin, end = plan.query_start[row : row + 2].tolist()
                memory[places[begin:end]] = tokens[first:]
                assert plan.context_lengths[row] == len(tokens)
            assert plan.rows.tops[table] <= len(memory)
            for row, (_, _, tokens) in enumerate(planned.parts):
                entries = part.block_tables[row]
                read = entries[: len(tokens)] if by_token else np.arange(entries[0], entries[0] + len(tokens))
                assert by_token <= (entries[len(tokens) :] == -1).all()
                found = memory[read].tolist()
                assert found == tokens, f"table {table}: {found} is not what was written"
        self.cache.complete(plan.step)

    # The laws

    def _nothing_in_use_is_released(self, plan: Any) -> None:
        """What steps under way read or write, sources of their copies included, a new plan does not give back."""
        in_use: list[tuple[int, int, int]] = []
        for planned in self.under_way:
            for table in range(len(self.bytes)):
                part = planned.plan.group(table)
                for entries, (_, _, tokens) in zip(part.block_tables.tolist(), planned.parts, strict=True):
                    if planned.plan.rows.tokens is not None:
                        in_use += [(table, entry, entry + 1) for entry in entries if entry >= 0]
                    else:
                        in_use.append((table, entries[0], entries[0] + len(tokens)))
                in_use += [(table, source, source + count) for source, _, count in part.copies.tolist()]
        for table, start, stop in plan.rows.released.tolist():
            assert not any(one == table and start < last and first < stop for one, first, last in in_use)

    def _state(self) -> Any:
        places = [
            (
                row.id,
                row.reserved,
                row.num_computed,
                row.place and row.place.starts.tolist(),
                row.offsets.tolist(),
            )
            for row in self.cache.rows.values()
        ]
        ranges = [self.space.ranges] if isinstance(self.space, Arena) else self.space._ranges
        # Old places that were waiting for their step may have been freed meanwhile.
        self.cache._settle()
        return places, [one.free() for one in ranges], self.cache.stats()

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        use = self.cache.memory_use()
        assert 0 <= use.used <= use.used + use.later <= use.reserved <= use.peak <= use.total
        assert use.reserved + use.external <= use.total
        tokens = 64 * len(self.cache.spec.layers)  # bytes of one
        computed = {
            (part.shared, part.offsets[at]) if part.shared is not None else (part.id, at)
            for part in self.cache.rows.values()
            for at in range(part.num_computed)
        }
        assert use.used == tokens * len(computed)


class failing_take:  # noqa: N801 - a context manager in the form of contextlib's
    """`Ranges.take` answers None at the n-th call from now on; calling what `with` gives tells whether it did."""

    def __init__(self, fails_at: int | None) -> None:
        self.left = -1 if fails_at is None else fails_at
        self.failed = False

    def __enter__(self) -> Any:
        self.take = take = Ranges.take

        def failing(ranges: Ranges, size: int) -> int | None:
            self.left -= 1
            if self.left == -1:
                self.failed = True
                return None
            return take(ranges, size)

        if self.left >= 0:
            Ranges.take = failing  # type: ignore[method-assign]
        return lambda: self.failed

    def __exit__(self, *error: object) -> None:
        Ranges.take = self.take  # type: ignore[method-assign]
