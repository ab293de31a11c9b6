"""The step plan: shapes and dtypes, all or nothing, lookahead, watermark, running alone."""

from __future__ import annotations

import numpy as np
import pytest
from support.cache_case import FULL, advance, compute, make, prompt, store

from quire.spec import Span


def test_a_plan_has_the_documented_arrays(backend: str) -> None:
    cache = make(backend)
    a, b = cache.open(prompt(6, seed=1)), cache.open(prompt(3, seed=2))
    plan = cache.reserve([a, b], [6, 2], num_lookahead_tokens=3)
    assert plan is not None
    assert plan.step == 1
    assert plan.num_groups == 1
    for name, dtype, value in (
        ("query_start", np.int32, [0, 6, 8]),
        ("context_lengths", np.int32, [6, 2]),
        ("slot_mapping", np.int64, [0, 1, 2, 3, 4, 5, 12, 13]),
        ("lookahead_slots", np.int64, [6, 7, 8, 14, 15, 16]),
        ("block_tables", np.int32, [[0, 1, 2], [3, 4, -1]]),
        ("copies", np.int32, np.empty((0, 3))),
    ):
        array = getattr(plan, name)
        assert array.dtype == dtype, name
        assert np.array_equal(array, value), name
        assert np.array_equal(array, getattr(plan.group(0), name)), name
    with pytest.raises(IndexError):
        plan.group(1)
    with pytest.raises(IndexError):
        plan.group(-1)


def test_each_group_has_its_own_blocks_of_one_pool(backend: str) -> None:
    cache = make(backend, FULL, Span("window", 6))
    sequence = cache.open(prompt(6))
    assert cache.num_blocks_needed([sequence], [6]) == 4
    plan = cache.reserve([sequence], [6])
    assert plan is not None
    assert plan.block_tables.tolist() == plan.group(0).block_tables.tolist() == [[0, 1]]
    assert plan.group(1).block_tables.tolist() == [[2, 3]]
    assert plan.group(1).slot_mapping.tolist() == [8, 9, 10, 11, 12, 13]


def test_ids_may_come_as_an_array(backend: str) -> None:
    cache = make(backend)
    a, b = cache.open(prompt(6, seed=1)), cache.open(prompt(3, seed=2))
    plan = cache.reserve(np.array([b.id, a.id], np.int32), np.array([3, 1]))
    assert plan is not None
    assert plan.context_lengths.tolist() == [3, 1]


def test_an_empty_step_is_a_step(backend: str) -> None:
    cache = make(backend)
    plan = cache.reserve([], [])
    assert plan is not None
    assert plan.step == 1
    assert plan.block_tables.shape == (0, 0)
    assert plan.query_start.tolist() == [0]


def test_reserve_is_all_or_nothing(backend: str) -> None:
    cache = make(backend, num_blocks=4)
    store(cache, prompt(4, seed=9))
    a, b = cache.open(prompt(9, seed=1)), cache.open(prompt(8, seed=2))
    before = cache.stats()
    assert cache.num_blocks_needed([a, b], [9, 8]) == 5
    assert cache.reserve([a, b], [9, 8]) is None
    assert cache.stats() == before
    assert len(a.block_table()) == len(b.block_table()) == 0
    assert cache.match(prompt(5, seed=9)).num_tokens == 4
    cache.check()
    plan = cache.reserve([a, b], [8, 8])
    assert plan is not None
    assert plan.step == 2, "a refused one is no step"


def test_reserving_again_without_commit_reuses_the_blocks(backend: str) -> None:
    cache = make(backend)
    sequence = cache.open(prompt(9))
    first = cache.reserve([sequence], [9], num_lookahead_tokens=4)
    again = cache.reserve([sequence], [5])
    assert first is not None
    assert again is not None
    assert (first.step, again.step) == (1, 2)
    assert again.slot_mapping.tolist() == first.slot_mapping[:5].tolist()
    assert again.block_tables.tolist() == [[0, 1]]
    assert len(sequence.block_table()) == 4
    with pytest.raises(ValueError, match="5 reserved"):
        cache.commit(sequence, 6)
    cache.check()


def test_a_step_within_a_block_takes_nothing(backend: str) -> None:
    cache = make(backend)
    sequence = compute(cache, prompt(5))
    for token in (1, 2, 3):
        sequence.append([token])
        assert cache.num_blocks_needed([sequence], [1]) == 0
        advance(cache, sequence)
    sequence.append([4])
    assert cache.num_blocks_needed([sequence], [1]) == 1


def test_lookahead_is_never_found_before_it_is_accepted(backend: str) -> None:
    cache = make(backend)
    sequence = compute(cache, prompt(5))
    sequence.append([7])
    plan = cache.reserve([sequence], [1], num_lookahead_tokens=6)
    assert plan is not None
    assert len(plan.lookahead_slots) == 6
    assert plan.context_lengths.tolist() == [6]
    cache.commit(sequence, 6)
    cache.check()
    drafted = [*prompt(5), 7, 8, 8, 8, 8, 8, 8]
    assert cache.match(drafted).num_tokens == 6
    sequence.append([8, 8])
    assert cache.match(drafted).num_tokens == 6
    cache.commit(sequence, 8)
    cache.check()
    assert cache.match(drafted).num_tokens == 8
    sequence.append([8] * 9)
    with pytest.raises(ValueError, match="12 reserved"):
        cache.commit(sequence, 13)


def test_commit_cannot_pass_the_known_tokens(backend: str) -> None:
    cache = make(backend)
    sequence = cache.open(prompt(5))
    assert cache.reserve([sequence], [5], num_lookahead_tokens=3) is not None
    with pytest.raises(ValueError, match="5 known"):
        cache.commit(sequence, 6)
    cache.commit(sequence, 5)
    with pytest.raises(ValueError, match="got 4"):
        cache.commit(sequence, 4)


def test_the_watermark_is_left_when_a_sequence_is_admitted(backend: str) -> None:
    cache = make(backend, num_blocks=10, watermark=0.2)
    running = compute(cache, prompt(4, seed=1))
    big, small = cache.open(prompt(29, seed=2)), cache.open(prompt(28, seed=3))
    assert cache.reserve([big], [29]) is None
    assert cache.num_blocks_needed([big], [29]) == 8
    assert cache.reserve([small], [28]) is not None
    cache.commit(small, 28)
    running.append([1, 2, 3, 4, 5])
    advance(cache, running)
    assert cache.num_free_blocks == 0


def test_what_fits_into_the_pool_can_run_alone(backend: str) -> None:
    """The watermark is waived, and a block that would be copied but for lack of room is written in place."""
    cache = make(backend, num_blocks=3, watermark=0.5)
    store(cache, prompt(12))
    for tokens, num_cached in (
        (prompt(12), 11),
        (np.concatenate([prompt(3), prompt(9, seed=1)]), 3),
        (prompt(12, seed=2), 0),
    ):
        sequence = cache.open(tokens)
        assert sequence.num_cached_tokens == num_cached
        plan = advance(cache, sequence)
        assert len(plan.copies) == 0
        assert cache.match(np.append(tokens, 0)).num_tokens == 12
        cache.close(sequence)
        cache.check()


def test_a_block_is_not_written_in_place_while_another_sequence_runs(backend: str) -> None:
    cache = make(backend, num_blocks=4)
    store(cache, prompt(12))
    running = compute(cache, prompt(3, seed=1))
    sequence = cache.open(prompt(12))
    assert cache.reserve([sequence], [1]) is None
    assert cache.match(prompt(12)).num_tokens == 11
    cache.close(running)
    assert len(advance(cache, sequence).copies) == 1


@pytest.mark.parametrize("block_size", [1, 4])
def test_a_plan_never_changes(backend: str, block_size: int) -> None:
    cache = make(backend, num_blocks=64, block_size=block_size)
    a = compute(cache, prompt(20, seed=1))
    a.append([1])
    plan = cache.reserve([a], [1])
    assert plan is not None
    tables, slots = a.block_table().tolist(), plan.slot_mapping.tolist()
    cache.rewind(a, 6)
    a.append(prompt(30, seed=2))
    b = cache.open(prompt(20, seed=1))
    assert cache.reserve([a, b], [30, 1]) is not None
    cache.close(b)
    assert plan.block_tables.tolist() == [tables]
    assert plan.slot_mapping.tolist() == slots


def test_reserve_does_not_look_for_a_longer_hit(backend: str) -> None:
    """The number of new tokens was read before; a hit taken inside would make it wrong."""
    cache = make(backend)
    first, second = cache.open(prompt(9)), cache.open(prompt(9))
    advance(cache, first)
    plan = cache.reserve([second], [9])
    assert plan is not None
    assert plan.query_start.tolist() == [0, 9]
    assert second.num_cached_tokens == 0
    cache.commit(second, 9)
    cache.check()


def test_the_peak_is_of_the_fullest_reservation(backend: str) -> None:
    cache = make(backend, num_blocks=8)
    peaks = []
    for length, keep in ((6, True), (13, False), (3, True)):
        sequence = compute(cache, prompt(length, seed=length))
        peaks.append(cache.memory_use().peak // cache.block_bytes)
        if not keep:
            cache.close(sequence)
    assert cache.open(prompt(40)) is not None
    assert peaks == [2, 6, 6]
    assert cache.memory_use().peak == 6 * cache.block_bytes
