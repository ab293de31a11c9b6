"""Storages side by side: their figures equal their caches', and every request ends in each of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.errors import ArgumentError
from quire.simulate.side_by_side import CACHED_CELL, NUM_CELLS, ComparedRequest, SideBySide


@pytest.fixture
def four() -> Iterator[SideBySide]:
    one = SideBySide()
    yield one
    one.close()


def by_name(four: SideBySide) -> dict[str, dict]:
    return {one["name"]: one for one in four.state()["storages"] if one["missing"] is None}


def test_nothing_yet(four: SideBySide) -> None:
    for one in by_name(four).values():
        assert set(one["owners"]) == {-1}
        assert len(one["owners"]) == len(one["fills"]) == NUM_CELLS
        assert one["reserved"] == one["used"] == one["running"] == 0


def test_contiguous_reserves_what_paged_does_not(four: SideBySide) -> None:
    for _ in range(20):
        four.add(ComparedRequest(60, 100))
    four.step(5)
    told = by_name(four)
    assert told["contiguous"]["running"] == 8  # as many as the longest fit
    assert told["contiguous"]["waiting"] == 12
    assert told["paged"]["running"] == 20
    assert told["paged"]["waste_share"] < told["contiguous"]["waste_share"]
    # All of the arena is somebody's, and the first cells of a row are those that are computed.
    contiguous = told["contiguous"]
    assert contiguous["owners"][:32] == [0] * 32
    assert contiguous["fills"][0] == 100
    assert contiguous["fills"][31] == 0


@pytest.mark.parametrize("seed", [0, 1])
def test_the_cells_add_up_to_what_the_cache_says(four: SideBySide, seed: int) -> None:
    for number in range(12):
        four.add(ComparedRequest(20 + 17 * ((number + seed) % 5), 40, 16 if number % 2 else 0))
    four.step(20 + seed)
    for one in by_name(four).values():
        cell_bytes = one["total"] / NUM_CELLS
        held = sum(owner >= 0 for owner in one["owners"]) * cell_bytes
        assert held == pytest.approx(one["reserved"], abs=one["total"] * 0.04), one["name"]
        filled = sum(fill for fill, owner in zip(one["fills"], one["owners"], strict=True) if owner >= 0)
        assert filled / 100 * cell_bytes == pytest.approx(one["used"], abs=one["total"] * 0.04), one["name"]
        assert {owner for owner in one["owners"] if owner >= 0} <= set(one["requests"])


def test_every_request_ends_and_all_blocks_come_back(four: SideBySide) -> None:
    for number in range(30):
        four.add(ComparedRequest(30 + number, 50, 24))
    four.step(5)
    four.finish(3)
    for _ in range(600):
        four.step()
    assert four.num_open == 0
    for one in by_name(four).values():
        assert one["done"] == 30
        assert one["reserved"] == 0
        assert one["generated"] > 29 * 50
    told = by_name(four)
    assert told["paged"]["prefix_tokens"] > 0
    assert told["contiguous"]["prefix_tokens"] == 0
    assert CACHED_CELL in told["paged"]["owners"]


def test_what_can_never_fit_is_refused_by_all(four: SideBySide) -> None:
    four.add(ComparedRequest(600, 10))
    assert {one["refused"] for one in by_name(four).values()} == {1}
    assert four.num_open == 0


def test_bad_requests() -> None:
    with pytest.raises(ArgumentError):
        ComparedRequest(4, 1, 5)
    with pytest.raises(ArgumentError):
        ComparedRequest(4, 0)


@pytest.mark.parametrize("reservation", ["pow2", "exact"])
def test_ranges_of_what_is_needed_leave_gaps(reservation: str) -> None:
    four = SideBySide(("contiguous", "paged"), block_size=64, reservation=reservation)
    try:
        for _ in range(12):  # every other one ends early and leaves its place between two that stay
            four.add(ComparedRequest(100, 10))
            four.add(ComparedRequest(200, 150))
        most = 0
        for _ in range(120):
            four.step()
            told = by_name(four)
            assert told["paged"]["external"] == 0
            most = max(most, told["contiguous"]["external"])
        assert most > 0
        assert (four.state()["block_size"], four.state()["reservation"]) == (64, reservation)
    finally:
        four.close()


@pytest.mark.parametrize("block_size", [1, 512])
def test_all_end_whatever_the_block_size(block_size: int) -> None:
    four = SideBySide(("paged",), block_size=block_size)
    try:
        for _ in range(10):
            four.add(ComparedRequest(100, 20, 50))
        while four.num_open:
            four.step()
        assert by_name(four)["paged"]["done"] == 10
    finally:
        four.close()
