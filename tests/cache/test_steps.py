"""Overlapped steps: blocks that a running step may still read are neither reused nor evicted before it completes."""

from __future__ import annotations

import numpy as np
import pytest
from support.cache_case import FULL, advance, compute, make, prompt

from quire.errors import ArgumentError
from quire.spec import Span


def test_frees_wait_for_the_steps_under_way(backend: str) -> None:
    cache = make(backend, num_blocks=4, overlapped_steps=True)
    sequence = compute(cache, prompt(8, seed=1))
    cache.close(sequence)
    cache.check()
    assert cache.stats()["in_flight"] == 2
    assert (cache.num_free_blocks, cache.num_cached_blocks) == (2, 0)
    assert cache.usage == 0.5
    big = cache.open(prompt(12, seed=2))
    assert cache.reserve([big], [12]) is None
    cache.complete(1)
    cache.check()
    assert (cache.num_free_blocks, cache.num_cached_blocks) == (4, 2)
    advance(cache, big)


def test_completing_a_step_completes_all_before_it(backend: str) -> None:
    cache = make(backend, overlapped_steps=True)
    for seed in range(3):
        cache.close(compute(cache, prompt(4, seed=seed)))
    assert cache.stats()["in_flight"] == 3
    cache.complete(2)
    assert cache.stats()["in_flight"] == 1
    cache.complete(1)
    assert cache.stats()["in_flight"] == 1
    cache.complete(3)
    cache.check()
    assert (cache.stats()["in_flight"], cache.num_cached_blocks) == (0, 3)


def test_in_flight_content_is_found(backend: str) -> None:
    cache = make(backend, overlapped_steps=True)
    cache.close(compute(cache, prompt(9)))
    sequence = cache.open(prompt(9))
    assert sequence.num_cached_tokens == 8
    cache.check()
    assert cache.stats()["in_flight"] == 1
    cache.complete(1)
    cache.check()


def test_a_block_a_step_may_still_write_is_copied_not_continued(backend: str) -> None:
    cache = make(backend, overlapped_steps=True)
    first = cache.open(prompt(9))
    assert cache.reserve([first], [9]) is not None
    cache.commit(first, 6)
    cache.close(first)
    second = cache.open(np.append(prompt(6), [1, 2]))
    assert second.num_cached_tokens == 6
    plan = advance(cache, second)
    assert len(plan.copies) == 1
    cache.close(second)
    cache.complete(2)
    third = cache.open(np.append(prompt(6), [1, 2, 3]))
    assert len(advance(cache, third).copies) == 0


def test_duplicates_dropped_by_commit_wait_too(backend: str) -> None:
    cache = make(backend, FULL, Span("window", 3), overlapped_steps=True)
    a, b = cache.open(prompt(8)), cache.open(prompt(8))
    assert cache.reserve([a, b], [8, 8]) is not None
    cache.commit(a, 8)
    cache.commit(b, 8)
    cache.check()
    stats = cache.stats()
    assert stats["deduplicated_blocks"] == 4
    assert stats["in_flight"] == 5, "4 duplicates and the window's block behind"
    cache.complete(1)
    cache.check()
    assert cache.stats()["in_flight"] == 0


def test_complete_does_nothing_without_overlapped_steps_but_checks_the_step(backend: str) -> None:
    for overlapped in (True, False):
        cache = make(backend, overlapped_steps=overlapped)
        for step in (0, 1):
            with pytest.raises(ArgumentError, match=str(step)):
                cache.complete(step)
        sequence = compute(cache, prompt(4))
        before = cache.stats()
        cache.complete(1)
        assert cache.stats() == before
        cache.close(sequence)
        assert cache.stats()["in_flight"] == 0


def test_reset_leaves_in_flight_blocks_alone(backend: str) -> None:
    cache = make(backend, num_blocks=4, overlapped_steps=True)
    cache.close(compute(cache, prompt(8)))
    cache.reset()
    cache.check()
    assert cache.stats()["in_flight"] == 2
    assert cache.num_free_blocks == 2
    assert cache.match(prompt(8)).num_tokens == 0
    cache.complete(1)
    cache.check()
    assert (cache.num_free_blocks, cache.num_cached_blocks) == (4, 0)
