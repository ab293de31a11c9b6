"""The eviction policy "frequency": content used once goes before content used again; ghosts; both back ends alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from laws.pin_rules import PinMachine
from support.cache_case import BACKENDS, FULL, compute, make, prompt, spec_of, store
from support.run_laws import run_laws

from quire import Cache
from quire.cache.manager.elements import ExtraKeys, encode
from quire.cache.manager.ghosts import ENTRIES, Ghosts
from quire.errors import ArgumentError
from quire.spec import Span


def found(cache: Cache, tokens: np.ndarray) -> int:
    return cache.match(np.append(tokens, 0)).num_tokens


def use(cache: Cache, tokens: np.ndarray) -> None:
    """A hit of all tokens."""
    sequence = cache.open(np.append(tokens, 0))
    assert sequence.num_cached_tokens == len(tokens)
    cache.close(sequence)


def flood(cache: Cache, num_prompts: int, first_seed: int = 1000) -> None:
    """Prompts of two blocks each, used once."""
    for seed in range(first_seed, first_seed + num_prompts):
        store(cache, prompt(8, seed=seed))


# What stays


@pytest.mark.parametrize(("eviction", "num_found"), [("frequency", 8), ("lru", 0)])
def test_a_flood_of_single_uses_does_not_push_out_what_is_used_again(
    backend: str, eviction: str, num_found: int
) -> None:
    cache = make(backend, num_blocks=16, eviction=eviction)
    store(cache, prompt(8))
    use(cache, prompt(8))
    flood(cache, 9)  # 18 blocks through a pool of 16
    assert found(cache, prompt(8)) == num_found


def test_what_is_no_longer_used_ages_by_its_uses(backend: str) -> None:
    """Content of n uses goes at (n + 1) / 2 times the age of content of one, of five or more at three times."""
    lasted = []
    for num_uses in (1, 2, 3, 5, 30):
        cache = make(backend, num_blocks=16)
        store(cache, prompt(4))
        for _ in range(num_uses - 1):
            use(cache, prompt(4))
        lasted.append(next(n for n in range(200) if flood(cache, 1, 1000 + n) or not found(cache, prompt(4))))
    assert lasted[0] == 7  # 14 others fill the pool, with its own block 15: the eighth prompt evicts it
    assert lasted[1] == pytest.approx(1.5 * lasted[0], abs=1)
    assert lasted[2] == pytest.approx(2 * lasted[0], abs=1)
    assert lasted[3] == lasted[4] == pytest.approx(3 * lasted[0], abs=2)


def test_the_working_set_moves_on(backend: str) -> None:
    """Old content of many uses does not keep a new working set out."""
    cache = make(
        backend, num_blocks=13
    )  # one for the copy of a last block, whose last token is always computed
    for seed in (1, 2, 3):
        store(cache, prompt(16, seed=seed))
    for _ in range(10):
        for seed in (1, 2, 3):
            use(cache, prompt(16, seed=seed))
    for _ in range(12):
        for seed in (4, 5, 6):
            store(cache, prompt(16, seed=seed))
    assert [found(cache, prompt(16, seed=seed)) for seed in (1, 2, 3, 4, 5, 6)] == [0, 0, 0, 16, 16, 16]


def test_a_fork_is_no_use(backend: str) -> None:
    cache = make(backend, num_blocks=16)
    sequence = compute(cache, prompt(8))
    for one in [*(cache.fork(sequence) for _ in range(5)), sequence]:
        cache.close(one)
    flood(cache, 9)
    assert found(cache, prompt(8)) == 0


def test_a_hit_that_grows_while_a_request_waits_is_one_use(backend: str) -> None:
    """Its head has as many uses as its tail."""
    cache = make(backend, num_blocks=16)
    first = cache.open(np.append(prompt(16), 0))
    waiting = cache.open(np.append(prompt(16), 0))
    for end in (4, 8, 12, 16):
        assert cache.reserve([first], [4]) is not None
        cache.commit(first, end)
        assert waiting.num_cached_tokens == end
        cache.check()
    cache.close(first)
    cache.close(waiting)
    lasted = next(n for n in range(200) if flood(cache, 1, 1000 + n) or found(cache, prompt(16)) < 16)
    cache.check()
    assert 4 < lasted < 11  # two uses, not five


# Ghosts


def test_content_computed_again_counts_as_used_again(backend: str) -> None:
    cache = make(backend, num_blocks=16)
    store(cache, prompt(8))
    flood(cache, 9)
    assert found(cache, prompt(8)) == 0
    store(cache, prompt(8))
    flood(cache, 9, 2000)
    assert found(cache, prompt(8)) == 8


def test_content_under_another_path_was_not_used(backend: str) -> None:
    """The second block equals one that was evicted; its first block is new."""
    cache = make(backend, num_blocks=16)
    tail = prompt(4, seed=7)
    store(cache, np.append(prompt(4, seed=1), tail))
    flood(cache, 9)
    other = np.append(prompt(4, seed=2), tail)
    store(cache, other)
    flood(cache, 9, 2000)
    assert found(cache, other) == 0


def test_ghosts_of_other_keys_are_other_content(backend: str) -> None:
    cache = make(backend, num_blocks=16)
    store(cache, prompt(8), extra_keys={0: b"one image"})
    flood(cache, 9)
    store(cache, prompt(8), extra_keys={0: b"another"})
    flood(cache, 9, 2000)
    assert cache.match(np.append(prompt(8), 0), extra_keys={0: b"another"}).num_tokens == 0
    store(cache, prompt(8), extra_keys={0: b"another"})  # the second time
    flood(cache, 9, 3000)
    assert cache.match(np.append(prompt(8), 0), extra_keys={0: b"another"}).num_tokens == 8


def test_a_reset_forgets_the_ghosts(backend: str) -> None:
    cache = make(backend, num_blocks=16)
    store(cache, prompt(8))
    flood(cache, 9)
    cache.reset()
    store(cache, prompt(8))
    flood(cache, 9, 2000)
    assert found(cache, prompt(8)) == 0


def content(seed: int) -> bytes:
    return encode(prompt(16, seed=seed), ExtraKeys(), 0, 16)


def test_a_table_of_ghosts_has_two_entries_a_block() -> None:
    ghosts = Ghosts(256, 16)
    for seed in range(4000):
        ghosts.add(content(seed), seed % 6 + 1)
    sizes = [len(entries) for entries in ghosts._buckets.values()]
    assert (max(sizes), sum(sizes)) == (ENTRIES, 2 * 256)
    found = [seed for seed in range(3000, 4000) if ghosts.pop(content(seed)) == seed % 6 + 1]
    assert len(found) >= 500
    assert np.mean(found) > 3650  # the latest
    assert all(ghosts.pop(content(seed)) == 0 for seed in found[:50])  # an entry is found once
    ghosts.add(content(1), 3)
    ghosts.grow(512)
    assert ghosts.pop(content(1)) == 3
    ghosts.add(content(1), 3)
    ghosts.grow(513)
    assert ghosts.pop(content(1)) == 0


def test_a_hash_of_zeros_and_of_keys_is_defined() -> None:
    keys = ExtraKeys([3, 9], [b"\0", b"key"])
    ghosts = Ghosts(64, 16)
    for tokens, extra in ((np.zeros(16, np.int32), ExtraKeys()), (prompt(16), keys)):
        ghosts.add(encode(tokens, extra, 0, 16), 5)
        assert ghosts.pop(encode(tokens, extra, 0, 16)) == 5


# The two back ends


SHAPES: list[dict[str, Any]] = [
    {},
    {"spans": (Span(), Span("window", 8))},
    {"spans": (Span("window", 8),)},
    {"spans": (Span(), Span()), "blocks_per_node": (1, 2)},
    {"overlapped_steps": True},
    {"eviction": "lru"},
]


def outcome(backend: str, seed: int, spans: Any = (FULL,), blocks_per_node: Any = (), **options: Any) -> Any:
    """Everything observable of a random run: hits, block ids, evictions."""
    rng = np.random.default_rng(seed)
    spec = spec_of(*spans, blocks_per_node=blocks_per_node)
    cache = Cache(spec, num_blocks=40, block_size=4, backend=backend, **options)
    texts = [prompt(48, seed=text) for text in range(6)]
    running: list[Any] = []
    seen: list[Any] = []
    num_steps = 0
    for number in range(300):
        kind = rng.integers(10)
        if kind == 0 and number % 40 == 0:
            cache.resize(int(rng.choice([30, 40, 90, 200, 40])) if not running else cache.num_blocks)
        elif kind < 7 and len(running) < 3:
            text = texts[int(rng.integers(6))] if rng.random() < 0.6 else prompt(48, seed=10_000 + number)
            length = int(rng.integers(1, 49))
            keys = {int(rng.integers(length)): b"key"} if rng.random() < 0.1 else None
            tokens = np.append(text[:length], int(rng.integers(50)))
            owner_id, cache_priority = (
                (int(rng.integers(3)), int(rng.integers(3))) if number > 150 else (0, 1)
            )
            sequence = cache.open(tokens, extra_keys=keys, owner_id=owner_id, cache_priority=cache_priority)
            seen.append(sequence.num_cached_tokens)
            running.append(sequence)
        elif running:
            sequence = running.pop(int(rng.integers(len(running))))
            plan = cache.reserve([sequence], [sequence.num_tokens - sequence.num_computed_tokens])
            if plan is not None:
                num_steps += 1
                seen.append(plan.block_tables.tolist())
                cache.commit(sequence, sequence.num_tokens)
                if rng.random() < 0.2:
                    cache.close(cache.fork(sequence))
                if rng.random() < 0.2:
                    cache.rewind(sequence, int(rng.integers(1, sequence.num_tokens)))
            cache.close(sequence)
            if options.get("overlapped_steps") and num_steps:
                cache.complete(num_steps)
        cache.check()
    return seen, cache.stats()


@pytest.mark.skipif(len(BACKENDS) < 2, reason="the native back end is not built")
@pytest.mark.parametrize("options", SHAPES, ids=str)
def test_both_back_ends_evict_the_same_blocks(options: dict[str, Any]) -> None:
    num_evicted = 0
    for seed in range(6):
        python, native = (outcome(backend, seed, **options) for backend in ("python", "native"))
        assert python == native
        num_evicted += python[1]["evicted_blocks"]
    assert num_evicted > 200


def test_the_laws_hold_of_the_least_recently_used_too() -> None:
    class Machine(PinMachine):
        backends = tuple(BACKENDS)
        cache_options = {"eviction": "lru"}  # noqa: RUF012

    run_laws(Machine, num_examples=30, num_steps=40)


def test_an_unknown_policy_is_refused() -> None:
    for backend in BACKENDS:
        with pytest.raises(ArgumentError, match=r"expected .*frequency.* got 'mru'"):
            make(backend, eviction="mru")
