"""The order of eviction."""

from __future__ import annotations

import numpy as np
import pytest
from support.cache_case import FULL, advance, compute, make, prompt, store

from quire.errors import ArgumentError
from quire.spec import Span


def found(cache, *seeds: int, length: int = 8) -> list[int]:
    return [cache.match(np.append(prompt(length, seed=seed), 0)).num_tokens for seed in seeds]


def test_freed_blocks_stay_findable_until_their_room_is_needed(backend: str) -> None:
    cache = make(backend, num_blocks=6)
    for seed in (1, 2, 3):
        store(cache, prompt(8, seed=seed))
    assert cache.num_cached_blocks == 6
    assert cache.num_free_blocks == 6
    assert cache.usage == 0.0
    assert found(cache, 1, 2, 3) == [8, 8, 8]


def test_least_recently_used_goes_first_and_tails_before_heads(backend: str) -> None:
    cache = make(backend, num_blocks=6)
    for seed in (1, 2, 3):
        store(cache, prompt(8, seed=seed))
    store(cache, prompt(4, seed=4))
    assert found(cache, 1, 2, 3) == [4, 8, 8]
    store(cache, prompt(4, seed=5))
    assert found(cache, 1, 2, 3) == [0, 8, 8]
    store(cache, prompt(4, seed=6))
    assert found(cache, 1, 2, 3) == [0, 4, 8]
    assert cache.stats()["evicted_blocks"] == 3


def test_a_hit_refreshes_the_whole_path(backend: str) -> None:
    cache = make(backend, num_blocks=6)
    for seed in (1, 2, 3):
        store(cache, prompt(8, seed=seed))
    sequence = cache.open(np.append(prompt(8, seed=1), 0))
    cache.close(sequence)
    store(cache, prompt(8, seed=4))
    assert found(cache, 1, 2, 3, 4) == [8, 0, 8, 8]


def test_never_committed_blocks_are_used_before_all_cached_ones(backend: str) -> None:
    cache = make(backend, num_blocks=6)
    for seed in (1, 2):
        store(cache, prompt(8, seed=seed))
    aborted = cache.open(prompt(8, seed=3))
    assert cache.reserve([aborted], [8]) is not None
    cache.close(aborted)
    assert (cache.num_free_blocks, cache.num_cached_blocks) == (6, 4)
    store(cache, prompt(8, seed=4))
    assert found(cache, 1, 2, 4) == [8, 8, 8]


def test_a_requests_own_hit_is_never_evicted_to_serve_it(backend: str) -> None:
    """The oldest content in a full pool is exactly what the request hits."""
    cache = make(backend, num_blocks=4)
    store(cache, prompt(8, seed=1))
    store(cache, prompt(8, seed=2))
    sequence = cache.open(np.concatenate([prompt(8, seed=1), prompt(8, seed=3)]))
    assert sequence.num_cached_tokens == 8
    head = sequence.block_table().tolist()
    plan = advance(cache, sequence)
    assert plan.block_tables[0, :2].tolist() == head
    assert len(set(plan.block_tables[0].tolist())) == 4
    assert found(cache, 1, 2) == [8, 0]


def test_a_shared_head_outlives_its_tails(backend: str) -> None:
    cache = make(backend, num_blocks=8)
    head = prompt(8)
    for seed in range(20):
        store(cache, np.concatenate([head, prompt(4, seed=seed)]))
        assert cache.match(np.append(head, 1)).num_tokens == 8
    assert cache.stats()["evicted_blocks"] == 22 - 8


def test_held_blocks_are_never_evicted(backend: str) -> None:
    cache = make(backend, num_blocks=4)
    held = compute(cache, prompt(8, seed=1))
    table = held.block_table().tolist()
    for seed in range(2, 12):
        store(cache, prompt(8, seed=seed))
    assert held.block_table().tolist() == table
    big = cache.open(prompt(12, seed=20))
    assert cache.reserve([big], [12]) is None


def test_evicting_a_full_attention_block_frees_the_windows_blocks_of_that_node(backend: str) -> None:
    cache = make(backend, FULL, Span("window", 100), num_blocks=8)
    store(cache, prompt(16, seed=1))
    store(cache, prompt(4, seed=2))
    assert found(cache, 1, 2, length=16)[0] == 12
    stats = cache.stats()
    assert stats["evicted_blocks"] == 2
    assert (stats["free"], stats["cached"]) == (0, 8)


def test_an_aborted_sequence_leaves_what_it_committed(backend: str) -> None:
    cache = make(backend)
    sequence = cache.open(prompt(16))
    assert cache.reserve([sequence], [16]) is not None
    cache.commit(sequence, 7)
    cache.close(sequence)
    cache.check()
    assert found(cache, 0, length=16) == [7]
    assert cache.num_cached_blocks == 2


def test_partial_leftovers_of_a_longer_content_are_not_kept(backend: str) -> None:
    cache = make(backend, num_blocks=32)
    for length in (1, 2, 3):
        store(cache, prompt(4)[:length])
        assert cache.num_cached_blocks == 1
    reader = cache.open([*prompt(4)[:3], 5, 6])
    first = compute(cache, np.concatenate([prompt(4), prompt(3, seed=1)]))
    cache.close(reader)
    cache.check()
    assert first.num_tokens == 7
    assert cache.num_cached_blocks == 0


def test_reset_forgets_everything_and_is_refused_while_a_sequence_is_open(backend: str) -> None:
    cache = make(backend)
    store(cache, prompt(9))
    sequence = cache.open(prompt(9, seed=1))
    with pytest.raises(ArgumentError, match="1"):
        cache.reset()
    assert cache.match(prompt(9)).num_tokens == 8
    cache.close(sequence)
    cache.reset()
    cache.check()
    assert cache.match(prompt(9)).num_tokens == 0
    assert cache.num_cached_blocks == 0
    assert cache.stats()["num_nodes"] == 0
    assert compute(cache, prompt(9)).block_table().tolist() == [0, 1, 2]
