"""A consumer's index built from events only: it has every block's parent, and every block that it could have."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.observe.event_types import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from quire.observe.known_parents import KnownParents

PARENTS: dict[int, int | None] = {1: None, 2: 1, 3: 2, 4: 3, 5: 2, 6: 5, 7: None, 8: 7, 9: 8, 10: 4}
MEDIA = ("CPU", "CPU_TIER1", "DISK")
_Held = set[tuple[int, str]]


def stored(numbers: list[int], medium: str) -> BlockStored:
    tokens = tuple(token for number in numbers for token in (number, -number))
    keys = tuple(((0, bytes([number])),) for number in numbers)
    return BlockStored(tuple(numbers), PARENTS[numbers[0]], tokens, 2, "", keys, medium)


def chain(number: int) -> list[int]:
    parent = PARENTS[number]
    return [number] if parent is None else [*chain(parent), number]


class Index:
    """A consumer: what is in which medium."""

    def __init__(self) -> None:
        self.there: _Held = set()

    def take(self, events: list[KVEvent]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                assert event == stored(list(event.block_hashes), event.medium)
                new = {(number, event.medium) for number in event.block_hashes}
                assert not new & self.there
                self.there |= new
            elif isinstance(event, BlockRemoved):
                gone = {(number, event.medium) for number in event.block_hashes}
                assert len(gone) == len(event.block_hashes)
                assert gone <= self.there
                self.there -= gone
            elif event.medium is None:
                self.there.clear()
            known = {number for number, _ in self.there}
            assert all(PARENTS[number] in known | {None} for number in known)


def placed(held: _Held) -> _Held:
    somewhere = {number for number, _ in held}
    return {one for one in held if set(chain(one[0])) <= somewhere}


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 12), st.sampled_from(MEDIA), st.integers(1, 10), st.integers(1, 5)),
        max_size=40,
    )
)
def test_every_block_in_the_index_has_its_parent_there(steps: list[tuple[int, str, int, int]]) -> None:
    known, index, held = KnownParents(), Index(), set[tuple[int, str]]()
    for kind, medium, number, length in steps:
        run = chain(number)[-length:]
        if kind == 0:
            events: list[KVEvent] = [AllBlocksCleared()]
            held.clear()
        elif kind <= 6:
            new = [one for one in run if (one, medium) not in held]
            one_run = all(PARENTS[b] == a for a, b in pairwise(new))
            parts = [new] if new and one_run else [[one] for one in new]
            events = [stored(part, medium) for part in parts]
            held |= {(one, medium) for one in new}
        else:
            gone = [one for one in run if (one, medium) in held]
            events = [BlockRemoved(tuple(gone), "", "evicted", medium)] if gone else []
            held -= {(one, medium) for one in gone}
        index.take(known.filter_events(events))
        assert index.there == placed(held)
    assert set(known._held) == {number for number, _ in held}
    linked = {child for children in known._children.values() for child in children}
    assert linked == {number for number, _ in held if PARENTS[number] is not None}


def test_a_tail_goes_before_its_head_and_comes_back_behind_it() -> None:
    known = KnownParents()
    assert known.filter_events([stored([2, 3], "DISK")]) == []
    head, tail = stored([1], "CPU"), stored([2, 3], "DISK")
    assert known.filter_events([head]) == [head, tail]
    gone = BlockRemoved((1,), "", "evicted", "CPU")
    assert known.filter_events([gone]) == [BlockRemoved((3, 2), "", "unreachable", "DISK"), gone]
    assert known.filter_events([BlockRemoved((3,), "", "evicted", "DISK")]) == []
    assert known.filter_events([head]) == [head, stored([2], "DISK")]


def test_what_goes_together_goes_around_what_stands_between() -> None:
    """2 and 4 leave memory in one event, 3 between them is on disk alone: 4 goes first, then 3, then 2."""
    known = KnownParents()
    known.filter_events([stored([1, 2], "CPU"), stored([3], "DISK"), stored([4], "CPU")])
    assert known.filter_events([BlockRemoved((2, 4), "", "evicted", "CPU")]) == [
        BlockRemoved((4,), "", "evicted", "CPU"),
        BlockRemoved((3,), "", "unreachable", "DISK"),
        BlockRemoved((2,), "", "evicted", "CPU"),
    ]
