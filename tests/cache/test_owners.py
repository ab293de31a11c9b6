"""Owners and cache priorities: the order of eviction, protected floors, and quotas."""

from __future__ import annotations

import numpy as np
import pytest
from support.cache_case import FULL, compute, make, prompt, store

from quire.cache.cache import OwnerCounts
from quire.errors import ArgumentError
from quire.spec import Span


def found(cache, *seeds: int, length: int = 8) -> list[int]:
    return [cache.match(np.append(prompt(length, seed=seed), 0)).num_tokens for seed in seeds]


def refused(cache, tokens, **options) -> None:
    """Nothing fits, and nothing changes."""
    sequence = cache.open(tokens, **options)
    before = cache.stats()
    assert cache.reserve([sequence], [len(tokens)]) is None
    assert cache.stats() == before
    cache.check()
    cache.close(sequence)


# Retention


def test_lower_cache_priority_goes_first_whatever_was_used_last(backend: str) -> None:
    cache = make(backend, num_blocks=6)
    store(cache, prompt(8, seed=1), cache_priority=2)
    store(cache, prompt(8, seed=2), cache_priority=1)
    store(cache, prompt(8, seed=3), cache_priority=0)
    store(cache, prompt(8, seed=4))
    assert found(cache, 1, 2, 3, 4) == [8, 8, 0, 8]
    store(cache, prompt(12, seed=5))
    assert found(cache, 1, 2, 4) == [8, 0, 4]
    store(cache, prompt(20, seed=6))
    assert found(cache, 1) == [4]
    assert cache.stats()["evicted_blocks"] == 2 + 3 + 5


def test_a_block_keeps_the_highest_cache_priority_of_those_who_used_it(backend: str) -> None:
    cache = make(backend, num_blocks=4)
    store(cache, prompt(8, seed=1), cache_priority=0)
    cache.close(cache.open(np.append(prompt(8, seed=1), 0), cache_priority=2))
    cache.close(cache.open(np.append(prompt(8, seed=1), 0), cache_priority=0))
    store(cache, prompt(8, seed=2))
    store(cache, prompt(8, seed=3))
    assert found(cache, 1, 2, 3) == [8, 0, 8]
    assert cache.tree().cache_priorities.ravel().tolist() == [2, 1, 2, 1]


def test_content_computed_twice_is_kept_as_the_one_who_wants_it_most_says(backend: str) -> None:
    cache = make(backend, num_blocks=8)
    tokens = prompt(8)
    first, second = cache.open(tokens, cache_priority=0), cache.open(tokens, cache_priority=2)
    assert cache.reserve([first, second], [8, 8]) is not None
    cache.commit(first, 8)
    cache.commit(second, 8)
    assert cache.stats()["deduplicated_blocks"] == 2
    assert cache.tree().cache_priorities.ravel().tolist() == [2, 2]
    cache.check()


def test_a_block_handed_out_again_has_the_cache_priority_of_its_new_owner(backend: str) -> None:
    cache = make(backend, num_blocks=2)
    store(cache, prompt(8, seed=1), cache_priority=2, owner_id=3)
    store(cache, prompt(8, seed=2), cache_priority=0, owner_id=4)
    tree = cache.tree()
    assert tree.cache_priorities.ravel().tolist() == [0, 0]
    assert tree.owner_ids.ravel().tolist() == [4, 4]


# Floors


def test_an_owner_at_its_floor_loses_nothing_to_others(backend: str) -> None:
    cache = make(backend, num_blocks=6)
    cache.set_limits(1, floor_blocks=2)
    store(cache, prompt(8, seed=1), owner_id=1)
    for seed in range(2, 9):
        store(cache, prompt(8, seed=seed), owner_id=2)
        assert found(cache, 1) == [8]
    refused(cache, prompt(20, seed=20), owner_id=2)
    assert cache.num_available_blocks(2) == 4
    assert cache.num_available_blocks(1) == 6
    assert cache.max_owner_blocks(2) == 4


def test_what_is_above_the_floor_may_go(backend: str) -> None:
    cache = make(backend, num_blocks=6)
    cache.set_limits(1, floor_blocks=1)
    store(cache, prompt(12, seed=1), owner_id=1)
    store(cache, prompt(12, seed=2), owner_id=2)
    store(cache, prompt(12, seed=3), owner_id=2)
    assert found(cache, 1, 2, length=12) == [4, 8]
    assert cache.owner_counts(1) == OwnerCounts(held=0, cached=1, in_flight=0)


def test_an_owner_gives_up_what_is_below_its_own_floor_for_its_own_need(backend: str) -> None:
    cache = make(backend, num_blocks=4)
    cache.set_limits(1, floor_blocks=4)
    store(cache, prompt(16, seed=1), owner_id=1)
    refused(cache, prompt(4, seed=2), owner_id=2)
    store(cache, prompt(16, seed=3), owner_id=1)
    assert found(cache, 1, 3, length=16) == [0, 16]


def test_a_call_of_several_owners_never_fails_in_its_middle(backend: str) -> None:
    """The one under its floor takes what is free; what it has cached then has to serve the other, or one of them
    would go without though both fit."""
    cache = make(backend, num_blocks=10)
    cache.set_limits(1, floor_blocks=10)
    store(cache, prompt(20, seed=1), owner_id=1)
    sequences = [cache.open(prompt(20, seed=2), owner_id=1), cache.open(prompt(20, seed=3), owner_id=2)]
    assert cache.reserve(sequences, [20, 20]) is not None
    cache.check()
    assert cache.owner_counts(1) == (5, 0, 0)
    assert cache.owner_counts(2) == (5, 0, 0)


def test_a_floor_does_not_keep_the_window_of_an_evicted_node_of_another_owner(backend: str) -> None:
    """A node whose window block one owner supplied and whose other block is another's: each loses its own only."""
    cache = make(backend, FULL, Span("window", 4), num_blocks=8, block_size=4)
    store(cache, prompt(8, seed=1), owner_id=1)
    store(cache, prompt(8, seed=2), owner_id=2)
    cache.set_limits(1, floor_blocks=3)
    store(cache, prompt(8, seed=3), owner_id=2)
    held, cached, in_flight = cache.owner_counts(1)
    assert (held, in_flight) == (0, 0)
    assert cached >= 3
    cache.check()


def test_floors_yield_to_resize_after_all_else(backend: str) -> None:
    cache = make(backend, num_blocks=6)
    store(cache, prompt(8, seed=1), owner_id=1)
    store(cache, prompt(16, seed=2), owner_id=2)
    cache.set_limits(1, floor_blocks=2)
    cache.resize(2)
    assert found(cache, 1, 2) == [8, 0]
    cache.resize(1)
    assert found(cache, 1) == [4]
    cache.check()


def test_floors_together_are_no_more_than_there_is(backend: str) -> None:
    cache = make(backend, num_blocks=6)
    cache.set_limits(1, floor_blocks=4)
    with pytest.raises(ArgumentError, match="6 blocks together, got 3 for owner 2 beside 4"):
        cache.set_limits(2, floor_blocks=3)
    cache.set_limits(1, floor_blocks=3)
    cache.set_limits(2, floor_blocks=3)


# Quotas


def test_a_quota_makes_room_in_the_owners_own_content_though_blocks_are_free(backend: str) -> None:
    cache = make(backend, num_blocks=16)
    cache.set_limits(1, quota_blocks=3)
    store(cache, prompt(8, seed=1), owner_id=1)
    store(cache, prompt(8, seed=2), owner_id=2)
    store(cache, prompt(8, seed=3), owner_id=1)
    assert found(cache, 1, 2, 3) == [4, 8, 8]
    assert cache.owner_counts(1) == (0, 3, 0)
    assert cache.stats()["evicted_blocks"] == 1


def test_more_than_the_quota_is_refused_and_changes_nothing(backend: str) -> None:
    cache = make(backend, num_blocks=16)
    cache.set_limits(1, quota_blocks=3)
    held = compute(cache, prompt(8, seed=1), owner_id=1)
    store(cache, prompt(4, seed=2), owner_id=1)
    assert cache.num_available_blocks(1) == 1
    assert cache.max_owner_blocks(1) == 3
    refused(cache, prompt(8, seed=3), owner_id=1)
    assert found(cache, 2, length=4) == [4]
    held.append([1, 2, 3, 4])
    assert cache.reserve([held], [4]) is not None
    assert cache.owner_counts(1) == (3, 0, 0)
    cache.close(held)


def test_a_lowered_quota_takes_effect_when_the_owner_next_needs_a_block(backend: str) -> None:
    cache = make(backend, num_blocks=16)
    held = compute(cache, prompt(6, seed=1), owner_id=1)
    store(cache, prompt(16, seed=2), owner_id=1)
    cache.set_limits(1, quota_blocks=2)
    assert cache.owner_counts(1) == (2, 4, 0)
    held.append([1])
    assert cache.reserve([held], [1]) is not None, "it needs no block"
    cache.commit(held, 7)
    assert cache.owner_counts(1) == (2, 4, 0)
    held.append([1, 2])
    assert cache.reserve([held], [2]) is None
    cache.set_limits(1, quota_blocks=3)
    assert cache.reserve([held], [2]) is not None
    assert cache.owner_counts(1) == (3, 0, 0)
    cache.check()


def test_a_hit_counts_in_the_owner_that_computed_it(backend: str) -> None:
    cache = make(backend, num_blocks=16)
    store(cache, prompt(8), owner_id=1)
    cache.set_limits(2, quota_blocks=1)
    sequence = cache.open(np.append(prompt(8), [1, 2]), owner_id=2)
    assert cache.reserve([sequence], [2]) is not None
    assert cache.owner_counts(1) == (2, 0, 0)
    assert cache.owner_counts(2) == (1, 0, 0)


def test_one_alone_writes_over_what_it_hit_rather_than_exceed_its_quota(backend: str) -> None:
    cache = make(backend, num_blocks=16)
    store(cache, prompt(4), owner_id=1)
    cache.set_limits(1, quota_blocks=1)
    sequence = cache.open([*prompt(4)[:2], 5], owner_id=1)
    assert sequence.num_cached_tokens == 2
    plan = cache.reserve([sequence], [1])
    assert plan is not None
    assert len(plan.copies) == 0
    assert cache.owner_counts(1) == (1, 0, 0)


def test_in_flight_blocks_count(backend: str) -> None:
    cache = make(backend, num_blocks=8, overlapped_steps=True)
    sequence = cache.open(prompt(8), owner_id=1)
    plan = cache.reserve([sequence], [8])
    cache.commit(sequence, 8)
    cache.close(sequence)
    assert cache.owner_counts(1) == (0, 0, 2)
    cache.set_limits(1, quota_blocks=3)
    refused(cache, prompt(8, seed=1), owner_id=1)
    cache.complete(plan.step)
    assert cache.owner_counts(1) == (0, 2, 0)
    assert cache.num_available_blocks(1) == 3


def test_counts_begin_with_what_was_there_before_anybody_had_an_owner(backend: str) -> None:
    cache = make(backend, num_blocks=8, overlapped_steps=True)
    held = cache.open(prompt(8))
    plan = cache.reserve([held], [8])
    cache.commit(held, 8)
    cache.complete(plan.step)
    store(cache, prompt(4, seed=1))
    cache.complete(2)
    assert cache.owner_counts(0) == (2, 1, 0)
    assert cache.owner_counts(5) == (0, 0, 0)
    cache.set_limits(1, floor_blocks=1)
    assert cache.owner_counts(0) == (2, 1, 0)
    cache.close(held)
    assert cache.owner_counts(0) == (0, 3, 0)
    cache.check()
    cache.reset()
    assert cache.owner_counts(0) == (0, 0, 0)
    cache.check()


def test_a_fork_belongs_to_the_owner_of_its_parent(backend: str) -> None:
    cache = make(backend, num_blocks=8)
    parent = compute(cache, prompt(6), owner_id=4, cache_priority=2)
    child = cache.fork(parent)
    child.append([1])
    assert cache.reserve([child], [1]) is not None
    assert cache.owner_counts(4) == (3, 0, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda cache: cache.open([1], owner_id=-1), "0 .. 65535 for an owner, got -1"),
        (lambda cache: cache.open([1], owner_id=65536), "got 65536"),
        (lambda cache: cache.open([1], owner_id="a"), "an integer for an owner"),
        (
            lambda cache: cache.open([1], cache_priority=3),
            "0 .. 2 for a cache priority .0 discard, 1 normal, 2 keep., got 3",
        ),
        (lambda cache: cache.open([1], cache_priority=True), "an integer for a cache priority"),
        (lambda cache: cache.set_limits(0, 1), "1 .. 65535 for an owner, got 0"),
        (lambda cache: cache.set_limits(1, -1), "at least 0 for floor_blocks"),
        (lambda cache: cache.set_limits(1, 0, 0), "at least 1, or -1 for no quota, got 0 for owner 1"),
        (lambda cache: cache.set_limits(1, 4, 3), "at least floor_blocks=4, got 3"),
        (lambda cache: cache.set_limits(1, 0, -2), "at least -1 for quota_blocks"),
        (lambda cache: cache.owner_counts(-1), "got -1"),
    ],
)
def test_bad_arguments_are_refused(backend: str, call, message: str) -> None:
    cache = make(backend)
    before = cache.stats()
    with pytest.raises(ArgumentError, match=message):
        call(cache)
    assert cache.stats() == before


# Cost


@pytest.mark.parametrize("num_prompts", [100, 400])
def test_evicting_with_owners_visits_no_more_nodes_than_without(backend: str, num_prompts: int) -> None:
    visits = []
    for owner_ids in (1, 8):
        cache = make(backend, num_blocks=4 * num_prompts)
        for seed in range(num_prompts):
            sequence = cache.open(prompt(16, seed=seed), owner_id=seed % owner_ids, cache_priority=seed % 3)
            cache.reserve([sequence], [16])
            cache.commit(sequence, 16)
            cache.close(sequence)
        sequence = cache.open(prompt(160, seed=9999), owner_id=1)
        before = cache._manager.num_visited
        assert cache.reserve([sequence], [160]) is not None
        visits.append(cache._manager.num_visited - before)
        assert cache.stats()["evicted_blocks"] == 40
    # The Python tree searches a node's siblings to take it out, the native one does not even do that.
    assert max(visits) <= (40 * 2 * num_prompts.bit_length() if backend == "python" else 0)
