"""`block_map` and `content_of` against the counts and the tree; both back ends agree on random calls."""

from __future__ import annotations

import numpy as np
import pytest
from support.cache_case import BACKENDS, FULL, advance, compute, make, prompt, store

from quire import Cache
from quire.baselines.arena import Arena
from quire.baselines.row_cache import RowCache
from quire.cache.block_map import CACHED, FREE, GIVEN_UP, HELD, IN_FLIGHT, PINNED
from quire.errors import ArgumentError
from quire.spec import Span


def check_against_counts_and_tree(cache: Cache) -> None:
    found, stats, tree = cache.block_map(), cache.stats(), cache.tree()
    for state, name in (
        (FREE, "free"),
        (CACHED, "cached"),
        (HELD, "held"),
        (IN_FLIGHT, "in_flight"),
        (PINNED, "pinned"),
    ):
        assert int((found.states == state).sum()) == stats[name], name
    assert len(found.states) == cache.num_block_ids
    assert int((found.states == GIVEN_UP).sum()) == cache.num_block_ids - cache.num_blocks
    assert found.namespaces == tree.namespaces
    expected = np.full(cache.num_block_ids, -1, np.int32)
    for group in range(cache.num_groups):
        there = tree.block_ids[:, group] >= 0
        expected[tree.block_ids[there, group]] = tree.namespace_index[there]
    assert np.array_equal(found.namespace_index, expected)


def test_what_is_pinned_is_so_whoever_else_holds_it(backend: str) -> None:
    cache = make(backend, num_blocks=16)
    tokens = prompt(9, seed=2)
    store(cache, tokens, namespace=b"b")
    pin = cache.pins.add(tokens, namespace=b"b")
    reader = cache.open([*tokens, 1, 2], namespace=b"b")
    found = cache.block_map()
    assert sorted(np.flatnonzero(found.states == PINNED).tolist()) == sorted(pin.block_ids)
    assert found.states[reader.block_table()[0]] == PINNED
    check_against_counts_and_tree(cache)
    cache.pins.remove(pin)
    assert cache.block_map().states[reader.block_table()[0]] == HELD
    check_against_counts_and_tree(cache)


def test_states_and_contents(backend: str) -> None:
    cache = make(backend, num_blocks=8)
    held = compute(cache, prompt(6, seed=1), namespace=b"a")
    store(cache, prompt(9, seed=2), namespace=b"b")
    found = cache.block_map()
    assert found.namespaces == [b"a", b"b"]
    for index, block_id in enumerate(held.block_table().tolist()):
        assert found.states[block_id] == HELD
        content = cache.content_of(block_id)
        assert content is not None
        assert content.namespace == b"a"
        assert content.num_own == (4, 2)[index]
        assert content.tokens.tolist() == prompt(6, seed=1)[: 4 * index + content.num_own].tolist()
    assert int((found.states == CACHED).sum()) == 3
    assert all(found.namespace_index[found.states == CACHED] == 1)
    free = int(np.flatnonzero(found.states == FREE)[0])
    assert cache.content_of(free) is None
    check_against_counts_and_tree(cache)


def test_no_such_block(backend: str) -> None:
    cache = make(backend, num_blocks=8)
    with pytest.raises(ArgumentError, match=r"0 \.\. 7, got 8"):
        cache.content_of(8)
    with pytest.raises(ArgumentError):
        cache.content_of(-1)


def test_what_is_reserved_and_not_committed_has_no_content(backend: str) -> None:
    cache = make(backend, num_blocks=8)
    sequence = cache.open(prompt(6))
    assert cache.reserve([sequence], [6]) is not None
    found = cache.block_map()
    for block_id in sequence.block_table().tolist():
        assert found.states[block_id] == HELD
        assert found.namespace_index[block_id] == -1
        assert cache.content_of(block_id) is None


@pytest.mark.skipif(len(BACKENDS) < 2, reason="the extension is not built")
@pytest.mark.parametrize("seed", range(6))
def test_both_back_ends_alike(seed: int) -> None:
    spans = [(FULL,), (FULL, Span("window", 9))][seed % 2]
    caches = [
        make(name, *spans, num_blocks=24, overlapped_steps=seed % 3 == 0) for name in ("python", "native")
    ]
    rng = np.random.default_rng(seed)
    pairs: list[tuple] = []
    for _ in range(60):
        choice = rng.integers(0, 5)
        if choice <= 1 and len(pairs) < 4:
            tokens = rng.integers(0, 2, rng.integers(1, 14)).astype(np.int32)
            name = bytes([97 + int(rng.integers(0, 3))])
            opened = [cache.open(tokens, namespace=name) for cache in caches]
            left = [one.num_tokens - one.num_computed_tokens for one in opened]
            plans = [cache.reserve([one], [n]) for cache, one, n in zip(caches, opened, left, strict=True)]
            if plans[0] is None:
                for cache, one in zip(caches, opened, strict=True):
                    cache.close(one)
            else:
                for cache, one in zip(caches, opened, strict=True):
                    cache.commit(one, one.num_tokens)
                pairs.append(tuple(opened))
        elif choice == 2 and pairs:
            for cache, one in zip(caches, pairs.pop(int(rng.integers(0, len(pairs)))), strict=True):
                cache.close(one)
        elif choice == 3:
            size = int(rng.integers(20, 30))
            if size >= sum(caches[0].stats()[name] for name in ("held", "in_flight")) + 1:
                for cache in caches:
                    cache.resize(size)
        elif choice == 4 and pairs and caches[0].num_free_blocks > 4:
            for cache, one in zip(caches, pairs[0], strict=True):
                one.append([1])
                advance(cache, one)
        maps = [cache.block_map() for cache in caches]
        assert np.array_equal(maps[0].states, maps[1].states)
        assert np.array_equal(maps[0].namespace_index, maps[1].namespace_index)
        assert maps[0].namespaces == maps[1].namespaces
        for cache in caches:
            check_against_counts_and_tree(cache)
        for block_id in range(caches[0].num_block_ids):
            a, b = (cache.content_of(block_id) for cache in caches)
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert (a.namespace, a.tokens.tolist(), a.num_own) == (
                    b.namespace,
                    b.tokens.tolist(),
                    b.num_own,
                )


def test_rows_of_an_arena() -> None:
    spec = make("python").spec
    cache = RowCache(spec, Arena(40, 16), row_tokens=16, block_bytes=spec.bytes_per_token)
    first, second = cache.open([1, 2, 3]), cache.open([4, 5])
    assert cache.reserve([first, second], [3, 2]) is not None
    states = cache.block_map().states
    assert states.tolist() == [HELD] * 32 + [FREE] * 8
    cache.close(first)
    assert cache.block_map().states.tolist() == [FREE] * 16 + [HELD] * 16 + [FREE] * 8
    assert cache.content_of(20) is None
