"""Pins: content that stays under any pressure, within a budget, for a time."""

from __future__ import annotations

import numpy as np
import pytest
from support.cache_case import BACKENDS, FULL, advance, make, prompt, store

from quire.cache.pins import Pins
from quire.cache.steady_clock import SteadyClock
from quire.errors import ArgumentError, CapacityError
from quire.spec import Span


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("groups", [(FULL,), (FULL, Span("window", 6))])
@pytest.mark.parametrize("num_tokens", [1, 4, 11, 12])
@pytest.mark.parametrize("backend", BACKENDS)
def test_pinned_content_is_found_whatever_else_is_computed(
    backend: str, num_tokens: int, groups: tuple[Span, ...]
) -> None:
    cache = make(backend, *groups, num_blocks=16)
    tokens = prompt(num_tokens)
    store(cache, tokens)
    pin = cache.pins.add(tokens, owner="alice")
    cache.check()
    for seed in range(1, 30):
        store(cache, prompt(20, seed))
    assert cache.stats()["evicted_blocks"] > 0
    assert cache.match([*tokens, 1]).num_tokens == num_tokens
    stats = cache.stats()
    assert stats["pinned"] == len(pin.block_ids) > 0
    assert sum(stats[state] for state in ("free", "cached", "held", "in_flight", "pinned")) == 16
    cache.pins.remove(pin)
    cache.pins.remove(pin)
    assert cache.stats()["pinned"] == 0
    for seed in range(1, 30):
        store(cache, prompt(20, seed))
    assert cache.match([*tokens, 1]).num_tokens == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_pinned_wins_over_held_and_blocks_are_counted_once(backend: str) -> None:
    cache = make(backend)
    store(cache, prompt(12))
    pins = [cache.pins.add(prompt(12)), cache.pins.add(prompt(8))]
    assert cache.stats()["pinned"] == 3
    reader = cache.open([*prompt(12), 5, 6])
    advance(cache, reader)
    stats = cache.stats()
    assert (stats["pinned"], stats["held"]) == (3, 1)
    cache.close(reader)
    cache.pins.remove(pins[0])
    assert cache.stats()["pinned"] == 2
    cache.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_over_the_budget_nothing_is_pinned(backend: str) -> None:
    cache = make(backend)
    cache.pins.max_blocks = 3
    store(cache, prompt(8))
    store(cache, prompt(8, 1))
    cache.pins.add(prompt(8))
    before = cache.stats()
    with pytest.raises(
        CapacityError, match=r"budget of .* \(3 blocks\), got one that needs 2 blocks more .* 2 are"
    ):
        cache.pins.add(prompt(8, 1))
    assert cache.stats() == before
    cache.pins.add(prompt(8)[:4])  # shares all it needs
    cache.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_room_for_a_pin_is_all_that_it_may_have(backend: str) -> None:
    """So many tokens can be pinned, and not a block more."""
    rng = np.random.default_rng(7)
    for case in range(40):
        cache = make(backend, num_blocks=40)
        cache.pins.max_blocks = int(rng.integers(0, 9))
        first, second = prompt(int(rng.integers(1, 20)), 1), prompt(int(rng.integers(1, 20)), 2)
        if case % 2:  # the second continues the first
            second = np.append(first, second)
        for tokens in (first, second):
            store(cache, tokens)
        if cache.pins.num_tokens_with_room(first) == len(first):
            cache.pins.add(first)
        num_tokens = cache.pins.num_tokens_with_room(second)
        if num_tokens:
            cache.pins.remove(cache.pins.add(second[:num_tokens]))
        if num_tokens < len(second):
            assert num_tokens % 4 == 0
            with pytest.raises(CapacityError):
                cache.pins.add(second[: num_tokens + 4])
        cache.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pin_ends_a_while_after_it_was_last_hit(backend: str) -> None:
    cache, clock, ended = make(backend), Clock(), []
    cache.pins.use_clock(clock)
    cache.pins.on_expired = ended.append
    store(cache, prompt(8))
    pin = cache.pins.add(prompt(8), ttl_s=10)
    clock.now += 9
    cache.pins.touch(prompt(8, 1))  # another prompt
    cache.pins.touch(prompt(8)[:7])  # not all of it
    cache.pins.touch(prompt(8), namespace=b"another")
    assert pin.num_hits == 0
    cache.pins.touch([*prompt(8), 1])
    assert pin.num_hits == 1
    clock.now += 9
    cache.pins.expire()
    assert len(cache.pins) == 1
    clock.now += 1
    cache.pins.expire()
    assert (len(cache.pins), ended) == (0, [pin])
    cache.check()


def test_a_clock_that_goes_back_neither_ends_nor_keeps_a_pin_longer() -> None:
    cache, clock = make("python"), Clock()
    cache.pins.use_clock(clock)
    store(cache, prompt(8))
    cache.pins.add(prompt(8), ttl_s=10)
    clock.now -= 1000
    cache.pins.expire()
    clock.now += 9.5
    cache.pins.expire()
    assert len(cache.pins) == 1
    clock.now += 0.5
    cache.pins.expire()
    assert not len(cache.pins)
    steady = SteadyClock(clock)
    readings = []
    for step in (1, -5, 2, 0, -1, 3):
        clock.now += step
        readings.append(steady())
    assert readings == [1, 1, 3, 3, 3, 6]


def test_what_cannot_be_pinned_is_refused() -> None:
    cache = make("python")
    store(cache, prompt(8))
    before = cache.stats()
    for tokens, options, message in (
        ([], {}, "expected tokens to pin, got none"),
        (prompt(9), {}, "expected 9 cached tokens to pin, got 8"),
        (prompt(8), {"ttl_s": 0}, "expected a ttl of more than 0 seconds, or None for no end, got 0"),
        (prompt(8), {"ttl_s": float("nan")}, "expected a ttl"),
        (prompt(8), {"ttl_s": "soon"}, "expected a ttl"),
        (prompt(8), {"namespace": b"another"}, "expected 8 cached tokens to pin, got 0"),
    ):
        with pytest.raises(ArgumentError, match=message):
            cache.pins.add(tokens, **options)
    assert cache.stats() == before
    cache.pins.add(prompt(8))
    with pytest.raises(ArgumentError, match="a clock before the first pin"):
        cache.pins.use_clock(Clock())
    with pytest.raises(ArgumentError):
        cache.resize(1)
    assert isinstance(cache.pins, Pins)
    cache.check()
