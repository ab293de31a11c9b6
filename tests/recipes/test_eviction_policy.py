"""The recipe of an eviction policy: one file that registers it. It orders the evictable blocks; the laws of the cache
hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from laws.pin_rules import PinMachine
from support.cache_case import compute, make, prompt, store

from quire import Cache
from quire.cache.manager.eviction import EvictionPolicy, register, unregister
from quire.cache.types import DISCARD, KEEP
from quire.errors import ArgumentError


@pytest.fixture(autouse=True)
def fifo() -> Iterator[type[EvictionPolicy]]:
    """Registered for these tests alone: others say which policies there are."""
    from recipes.fifo import Fifo

    register("fifo", Fifo)
    yield Fifo
    unregister("fifo")


def filled(eviction: str) -> Cache:
    """Prompts 1, 2 and 3 of two blocks each, in a pool of six; then prompt 1 is used again."""
    cache = make("python", num_blocks=6, eviction=eviction)
    for seed in (1, 2, 3):
        store(cache, prompt(8, seed=seed))
    cache.close(cache.open(np.append(prompt(8, seed=1), 0)))
    cache.check()
    return cache


def found(cache: Cache, *seeds: int) -> list[int]:
    return [cache.match(np.append(prompt(8, seed=seed), 0)).num_tokens for seed in seeds]


def test_a_hit_keeps_nothing_longer_and_a_tail_goes_before_its_head() -> None:
    for eviction, first, second in (("lru", [8, 4, 8], [8, 0, 8]), ("fifo", [4, 8, 8], [0, 8, 8])):
        cache = filled(eviction)
        store(cache, prompt(4, seed=4))
        assert found(cache, 1, 2, 3) == first
        store(cache, prompt(4, seed=5))
        assert found(cache, 1, 2, 3) == second


def test_a_head_stays_for_a_younger_tail() -> None:
    cache = make("python", num_blocks=6, eviction="fifo")
    store(cache, prompt(4, seed=1))
    store(cache, prompt(8, seed=2))
    oldest_then_youngest = np.append(prompt(4, seed=1), prompt(4, seed=3))
    store(cache, oldest_then_youngest)
    store(cache, prompt(16, seed=4))
    assert found(cache, 1, 2) == [4, 0]


def test_pins_and_cache_priorities_come_first() -> None:
    cache = make("python", num_blocks=6, eviction="fifo")
    store(cache, prompt(4, seed=1), cache_priority=KEEP)
    store(cache, prompt(4, seed=2))
    cache.pins.add(prompt(4, seed=2))
    store(cache, prompt(4, seed=3))
    store(cache, prompt(4, seed=4), cache_priority=DISCARD)
    held = [compute(cache, prompt(8, seed=5))]  # what is free
    for seed, left in ((6, [4, 4, 4, 0]), (7, [4, 4, 0, 0]), (8, [0, 4, 0, 0])):
        held.append(compute(cache, prompt(4, seed=seed)))
        assert found(cache, 1, 2, 3, 4) == left


def test_the_laws_hold() -> None:
    class Machine(PinMachine):
        cache_options: ClassVar = {"eviction": "fifo"}

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_a_name_is_taken_once(fifo: type[EvictionPolicy]) -> None:
    register("fifo", fifo)  # the same again is nothing new
    for name in ("fifo", "frequency", "lru"):
        with pytest.raises(ArgumentError, match=f"expected a new name for an eviction policy, got '{name}'"):
            register(name, EvictionPolicy)
    with pytest.raises(
        ArgumentError, match=r"policy, one of \['fifo', 'frequency', 'lru'\], got 'mru' - in `eviction`"
    ):
        make("python", eviction="mru")


def test_the_native_core_says_that_it_has_it_not() -> None:
    pytest.importorskip("quire._native")
    with pytest.raises(
        ArgumentError, match=r"expected eviction 'frequency' or 'lru' on backend 'native', .* got 'fifo'"
    ):
        make("native", eviction="fifo")
