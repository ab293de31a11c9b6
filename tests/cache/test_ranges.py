"""First fit over free ranges against the obvious twin: a list of places, each free or not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.baselines.ranges import Ranges
from quire.errors import InvariantError

SIZE = 40


def first_fit(is_free: list[bool], size: int) -> int | None:
    return next((at for at in range(SIZE - size + 1) if all(is_free[at : at + size])), None)


def longest_run(is_free: list[bool]) -> int:
    longest = run = 0
    for free in is_free:
        run = run + 1 if free else 0
        longest = max(longest, run)
    return longest


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.integers(1, SIZE), st.integers(-20, -1)), max_size=60))
def test_every_take_is_the_first_fit(moves: list[int]) -> None:
    """A positive move takes so many places, a negative one gives the so-manieth range back."""
    ranges, is_free = Ranges(SIZE), [True] * SIZE
    out: list[tuple[int, int]] = []
    for move in moves:
        if move > 0:
            start = ranges.take(move)
            assert start == first_fit(is_free, move)
            if start is not None:
                is_free[start : start + move] = [False] * move
                out.append((start, move))
        elif out:
            start, size = out.pop(-move % len(out))
            ranges.give(start, size)
            is_free[start : start + size] = [True] * size
        ranges.check(out)
        assert ranges.num_free == sum(is_free)
        assert ranges.largest_free == longest_run(is_free)


def test_the_sum_of_gaps_is_not_a_gap() -> None:
    ranges = Ranges(12)
    starts = [ranges.take(4) for _ in range(3)]
    assert starts == [0, 4, 8]
    ranges.give(0, 4)
    ranges.give(8, 4)
    assert (ranges.num_free, ranges.largest_free) == (8, 4)
    assert ranges.take(5) is None
    ranges.give(4, 4)
    assert ranges.free() == [(0, 12)]


@pytest.mark.parametrize(("start", "size"), [(0, 4), (2, 4), (2, 1), (9, 4), (-1, 1), (5, 0), (0, 12)])
def test_giving_back_what_is_free_is_found_out(start: int, size: int) -> None:
    ranges = Ranges(10)
    assert ranges.take(10) == 0
    ranges.give(0, 3)
    before = ranges.free()
    with pytest.raises(InvariantError, match="A2"):
        ranges.give(start, size)
    assert ranges.free() == before


def test_the_check_can_fail() -> None:
    ranges = Ranges(10)
    ranges.take(4)
    with pytest.raises(InvariantError, match="A2"):
        ranges.check([])
    ranges.num_free = 9
    with pytest.raises(InvariantError, match="counted"):
        ranges.check([(0, 4)])
