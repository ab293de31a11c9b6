"""A placement heap under random calls: references, mappings and memory equal those of a simple model.

The machine is the simulated one, with little memory and few mappings, so that calls fail in the middle; it refuses by
itself what a real one would punish. The model is a dictionary of who leads where.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from support.at_length import at_length
from support.run_laws import run_laws
from support.simulated_heap import SimulatedBackend

from quire.errors import ArgumentError, CapacityError
from quire.memory.placement import AddressRange, PlacementHeap

PAGE = 4096
BLOCKS, POSITIONS = 24, 10
some_blocks = st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=5)
some_positions = st.lists(st.integers(0, POSITIONS - 1), min_size=1, max_size=5, unique=True)


class HeapMachine(RuleBasedStateMachine):
    @initialize(
        merges=st.booleans(),
        max_pages=st.integers(20, 60),
        max_mappings=st.integers(20, 60),
        blocks_per_heap=st.sampled_from([7, 8]),
        huge_pages=st.sampled_from([0, 4, 4]),
    )
    def start(
        self, merges: bool, max_pages: int, max_mappings: int, blocks_per_heap: int, huge_pages: int
    ) -> None:
        self.machine = SimulatedBackend(
            PAGE,
            huge_bytes=huge_pages * PAGE,
            merges=merges,
            max_bytes=max_pages * PAGE,
            max_mappings=max_mappings,
        )
        self.heap = PlacementHeap(
            [PAGE, 2 * PAGE], max_blocks=BLOCKS, blocks_per_heap=blocks_per_heap, backend=self.machine
        )
        self.holds: Counter[int] = Counter()
        self.ranges: list[AddressRange] = []
        self.mapped: list[dict[int, int]] = []
        self.waiting: list[tuple[int, object]] = []
        self.step = self.completed = 0

    # What the model says

    def references(self) -> list[int]:
        counts = Counter(self.holds)
        for places in self.mapped:
            counts.update(places.values())
        return [counts[block_id] for block_id in range(BLOCKS)]

    def leaving(self) -> set[tuple[int, int]]:
        return {what for _, what in self.waiting if isinstance(what, tuple)}

    # Rules

    @rule(count=st.integers(0, 6), after=st.integers(-1, BLOCKS - 1))
    def allocate(self, count: int, after: int) -> None:
        free = [block_id for block_id, count in enumerate(self.references()) if not count]
        try:
            block_ids = self.heap.allocate(count, after).tolist()
        except CapacityError:
            assert len(free) < count or self.machine.budget.used >= self.machine.budget.limit
            return
        assert len(set(block_ids)) == count
        assert set(block_ids) <= set(free)
        self.holds.update(block_ids)

    @rule(block_ids=st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=3, unique=True))
    def claim(self, block_ids: list[int]) -> None:
        try:
            self.heap.claim(block_ids)
        except ArgumentError:
            assert any(self.references()[block_id] for block_id in block_ids)
        except CapacityError:
            pass
        else:
            self.holds.update(block_ids)

    @rule(block_ids=some_blocks)
    def hold(self, block_ids: list[int]) -> None:
        used = self.references()
        try:
            self.heap.hold(block_ids)
        except ArgumentError:
            assert not all(used[block_id] for block_id in block_ids)
        else:
            self.holds.update(block_ids)

    @rule(block_ids=some_blocks, later=st.booleans())
    def free(self, block_ids: list[int], later: bool) -> None:
        promised = Counter(
            block_id for _, what in self.waiting if isinstance(what, list) for block_id in what
        )
        if any(
            count > self.holds[block_id] - promised[block_id]
            for block_id, count in Counter(block_ids).items()
        ):
            with pytest.raises(ArgumentError, match="blocks that are held"):
                self.heap.free(block_ids)
            return
        if later:
            self.step += 1
            self.heap.free(block_ids, step=self.step)
            self.waiting.append((self.step, block_ids))
        else:
            self.heap.free(block_ids)
            self.holds.subtract(block_ids)

    @precondition(lambda self: len(self.ranges) < 4)
    @rule()
    def reserve(self) -> None:
        try:
            self.ranges.append(self.heap.reserve(POSITIONS))
            self.mapped.append({})
        except CapacityError:
            assert self.machine.budget.used >= self.machine.budget.limit

    @precondition(lambda self: self.ranges)
    @rule(which=st.integers(0, 3), positions=some_positions, data=st.data())
    def map(self, which: int, positions: list[int], data: st.DataObject) -> None:
        which %= len(self.ranges)
        used = [block_id for block_id, count in enumerate(self.references()) if count]
        block_ids = [data.draw(st.sampled_from([-1, *used])) for _ in positions]
        second = data.draw(st.booleans())
        changes = [(self.ranges[which], positions, block_ids)]
        if second:  # two ranges in one call
            changes.append((self.ranges[0], [POSITIONS - 1], block_ids[:1]))
        try:
            self.heap.map(changes)
        except ArgumentError:
            asked = {(which, position) for position in positions} | (
                {(0, POSITIONS - 1)} if second else set()
            )
            assert asked & self.leaving()
        except CapacityError:
            pass
        else:
            for index, places, leads in [(which, positions, block_ids), (0, [POSITIONS - 1], block_ids[:1])][
                : 1 + second
            ]:
                for position, block_id in zip(places, leads, strict=True):
                    self.mapped[index].pop(position, None)
                    if block_id >= 0:
                        self.mapped[index][position] = block_id

    @precondition(lambda self: self.ranges)
    @rule(which=st.integers(0, 3), position=st.integers(0, POSITIONS - 1), count=st.integers(2, POSITIONS))
    def map_run(self, which: int, position: int, count: int) -> None:
        """Blocks to positions that are the same modulo any huge page: what makes and completes them."""
        which %= len(self.ranges)
        free = [block_id for block_id, references in enumerate(self.references()) if not references]
        positions = range(position, min(position + count, POSITIONS))
        if {(which, one) for one in positions} & self.leaving():
            return
        try:
            wanted = [one for one in positions if one in free]
            if wanted:
                self.heap.claim(wanted)
                self.holds.update(wanted)
            self.heap.map([(self.ranges[which], list(positions), list(positions))])
        except CapacityError:
            return
        self.mapped[which].update((one, one) for one in positions)

    @rule(gives_huge=st.booleans())
    def run_out_of_huge_pages(self, gives_huge: bool) -> None:
        self.machine.gives_huge = gives_huge

    @precondition(lambda self: self.ranges)
    @rule(which=st.integers(0, 3), positions=some_positions, later=st.booleans())
    def unmap(self, which: int, positions: list[int], later: bool) -> None:
        which %= len(self.ranges)
        if {(which, position) for position in positions} & self.leaving():
            return
        if later:
            self.step += 1
            self.heap.unmap(self.ranges[which], positions, step=self.step)
            self.waiting += [(self.step, (which, position)) for position in positions]
        else:
            self.heap.unmap(self.ranges[which], positions)
            for position in positions:
                self.mapped[which].pop(position, None)

    @rule(ahead=st.integers(0, 2))
    def complete(self, ahead: int) -> None:
        self.completed = min(self.step, self.completed + ahead)
        self.heap.complete(self.completed)
        for _, what in [entry for entry in self.waiting if entry[0] <= self.completed]:
            if isinstance(what, list):
                self.holds.subtract(what)
            else:
                index, position = what  # type: ignore[misc]
                self.mapped[index].pop(position, None)
        self.waiting = [entry for entry in self.waiting if entry[0] > self.completed]

    @rule()
    def trim(self) -> None:
        self.heap.trim()
        used = sum(1 for count in self.references() if count)
        assert self.heap.committed_bytes <= used * 3 * PAGE
        assert self.heap.num_heaps <= used

    # What always holds

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "heap"):
            return
        self.heap.check()
        assert self.heap.references(np.arange(BLOCKS)).tolist() == self.references()
        assert self.heap.num_mappings == self.machine.budget.used
        pages = 0
        for address_range, places in zip(self.ranges, self.mapped, strict=True):
            want = [places.get(position, -1) for position in range(POSITIONS)]
            assert address_range.block_ids().tolist() == want
            pages += 3 * len(places)
            for position, block_id in places.items():  # the machine leads where the model says
                for layer_buffer in (0, 1):
                    address = (
                        address_range.address
                        + address_range.offsets[layer_buffer]
                        + position * (layer_buffer + 1) * PAGE
                    )
                    assert self.machine.mapped_at(address) == self.heap._files.place(block_id, layer_buffer)
        assert self.machine.num_mapped_pages == pages
        self.huge_pages_are_translated_as_one()

    def huge_pages_are_translated_as_one(self) -> None:
        for layer_buffer, each in enumerate(self.heap._files.frame_blocks):
            for address_range in self.ranges if each else []:
                for position in range(0, POSITIONS - each + 1, each):
                    block_ids = address_range.block_ids(position, position + each).tolist()
                    if (
                        block_ids[0] < 0
                        or block_ids[0] % each
                        or block_ids != list(range(block_ids[0], block_ids[0] + each))
                    ):
                        continue
                    if self.machine.is_huge(*self.heap._files.place(block_ids[0], layer_buffer)):
                        address = address_range.address + address_range.offsets[layer_buffer]
                        assert self.machine.is_translated_as_one(
                            address + position * (layer_buffer + 1) * PAGE
                        )


def test_the_laws_hold() -> None:
    run_laws(HeapMachine, num_examples=60, num_steps=40)


@pytest.mark.ci
def test_the_laws_hold_at_length() -> None:
    run_laws(HeapMachine, num_examples=at_length(1500), num_steps=60)
