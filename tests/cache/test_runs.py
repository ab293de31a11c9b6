"""Adjacent blocks of a sequence: runs of ids, neighbours, and blocks evicted together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cache_case import FULL, advance, compute, make, prompt, store

from quire.cache.manager.free_blocks import FreeBlocks
from quire.errors import ArgumentError
from quire.spec import Span


def test_each_sequence_grows_in_a_run_of_its_own(backend: str) -> None:
    cache = make(backend, num_blocks=32, block_size=4, run_blocks=8)
    a, b = compute(cache, prompt(12, 1)), compute(cache, prompt(8, 2))
    assert (a.block_table(0).tolist(), b.block_table(0).tolist()) == ([0, 1, 2], [8, 9])
    for _ in range(3):
        for sequence in (a, b):
            sequence.append(prompt(8, 3))
            advance(cache, sequence)
    assert a.block_table(0).tolist() == [*range(8), 16]  # the next run was taken
    assert b.block_table(0).tolist() == list(range(8, 16))
    cache.check()


def test_a_run_is_entered_where_the_sequence_stands(backend: str) -> None:
    cache = make(backend, num_blocks=32, block_size=4, run_blocks=8)
    tokens = prompt(12, 1)
    a = compute(cache, tokens)
    b = cache.open(np.r_[tokens, prompt(8, 2)])
    assert b.num_cached_tokens == 12
    advance(cache, b)
    # Its block 3 would have gone behind a's last one, which is free.
    assert b.block_table(0).tolist() == [0, 1, 2, 3, 4]
    c = cache.open(np.r_[tokens, prompt(8, 3)])
    advance(cache, c)
    assert c.block_table(0).tolist() == [0, 1, 2, 8 + 3, 8 + 4]
    assert a.block_table(0).tolist() == [0, 1, 2]


def test_with_runs_of_one_the_lowest_free_ids_come_first(backend: str) -> None:
    cache = make(backend, num_blocks=16, block_size=4, prefix_caching=False)
    a, b, c = (compute(cache, prompt(8, seed)) for seed in range(3))
    assert c.block_table(0).tolist() == [4, 5]
    cache.close(a)
    cache.close(b)
    d = compute(cache, prompt(20, 4))
    assert d.block_table(0).tolist() == [0, 1, 2, 3, 6]


def test_what_is_evicted_together_is_handed_out_in_order(backend: str) -> None:
    cache = make(backend, num_blocks=16, block_size=4, run_blocks=8)
    store(cache, prompt(64, 1))
    a = compute(cache, prompt(24, 2))
    assert cache.stats()["evicted_blocks"] == 6
    assert a.block_table(0).tolist() == [10, 11, 12, 13, 14, 15]


def test_windows_use_again_what_they_gave_back(backend: str) -> None:
    cache = make(backend, FULL, Span("window", 6), num_blocks=64, block_size=4, run_blocks=8)
    a = cache.open(prompt(16, 1))
    advance(cache, a)
    assert a.block_table(0).tolist() == [0, 1, 2, 3]
    assert a.block_table(1).tolist() == [-1, -1, 6, 7]  # of 4 to 7, the lowest free ones
    assert cache.resize(60).tolist() == [8, 9, 10, 11]  # 4 and 5 are cached
    cache.check()
    windowed = make(backend, Span("window", 6), num_blocks=64, block_size=4, prefix_caching=False)
    b = compute(windowed, prompt(8, 1))
    seen = set(b.block_table(0).tolist())
    for _ in range(40):
        b.append(prompt(4, 2))
        advance(windowed, b)
        seen |= set(b.block_table(0).tolist())
    assert len(seen - {-1}) <= 4


def test_a_run_is_a_power_of_two(backend: str) -> None:
    for wrong in (0, 3, 8192):
        with pytest.raises(ArgumentError, match="run_blocks"):
            make(backend, run_blocks=wrong)


@given(
    num_ids=st.integers(1, 70),
    run=st.sampled_from([1, 2, 8, 16]),
    moves=st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 90)), max_size=60),
)
def test_blocks_are_taken_by_the_rule(num_ids: int, run: int, moves: list[tuple[int, int]]) -> None:
    block_ids, free = FreeBlocks(num_ids, run), set(range(num_ids))
    for move, number in moves:
        if move == 3 and number < 0:
            block_ids.grow(5)
            free |= set(range(num_ids, num_ids + 5))
            num_ids += 5
        elif move == 3 and number < num_ids:
            block_ids.add(number)
            free.add(number)
        elif free:
            position = number % 40 if move else -1
            block_id = block_ids.take(number, position)
            runs = [r for r in range(0, num_ids, run) if free >= set(range(r, r + run))]
            if position < 0:
                assert block_id == min(free)
            elif number >= 0 and number + 1 in free:
                assert block_id == number + 1
            elif runs:
                assert block_id == runs[0] + number % 40 % run
            else:
                assert block_id == min(free)
            free.remove(block_id)
        assert list(block_ids) == sorted(free)
        assert len(block_ids) == len(free)
