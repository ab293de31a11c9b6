"""The growth of the Python back end's cost, in nodes compared: independent of the number of cached prompts."""

from __future__ import annotations

import numpy as np
import pytest

from quire import Cache, KVSpec
from quire.cache.manager.block_manager import PythonBlockManager

NO_KEYS = (np.empty(0, np.int64), [])


def filled(num_prompts: int, num_blocks: int, *, common: int = 0) -> PythonBlockManager:
    """A pool filled by prompts of 4 blocks of 4 tokens, the first `common` tokens equal."""
    manager = PythonBlockManager([("full", 0)], num_blocks, 4, True, 0, False, 1)
    for index in range(num_prompts):
        run(manager, tokens_of(index, common))
    return manager


def tokens_of(index: int, common: int) -> np.ndarray:
    tokens = np.full(16, 7, np.int32)
    tokens[common:] = index + 100
    return tokens


def run(manager: PythonBlockManager, tokens: np.ndarray) -> None:
    sequence = manager.open(tokens, b"", *NO_KEYS)
    num_new = len(tokens) - manager.num_computed_tokens(sequence)
    assert manager.reserve(np.array([sequence]), np.array([num_new]), 0) is not None
    manager.commit(sequence, len(tokens))
    manager.close(sequence)


def visited(manager: PythonBlockManager, call) -> int:
    before = manager.blocks.tree.num_visited
    call()
    return manager.blocks.tree.num_visited - before


@pytest.mark.parametrize("common", [0, 2, 4, 6])
def test_match_insert_and_evict_visit_hardly_more_nodes_at_four_times_the_prompts(common: int) -> None:
    counts = []
    for num_prompts in (200, 800):
        manager = filled(num_prompts, 4 * num_prompts, common=common)
        matching = visited(manager, lambda m=manager: m.match(tokens_of(50, common), b"", *NO_KEYS))
        # The pool is full (up to what is shared): a new prompt inserts 4 nodes and evicts old ones.
        inserting = visited(manager, lambda m=manager, n=num_prompts: run(m, tokens_of(n + 5, common)))
        counts.append((matching, inserting))
        manager.check()
    (small_match, small_insert), (large_match, large_insert) = counts
    # log2 grows by 2: two more comparisons for each search among siblings.
    assert large_match <= small_match + 2 * 4
    assert large_insert <= small_insert + 2 * 30


def test_evicting_visits_the_same_whatever_is_cached() -> None:
    counts = []
    for num_prompts in (100, 400):
        manager = filled(num_prompts, 4 * num_prompts)
        assert manager.counts()[0] == 0
        counts.append(visited(manager, lambda m=manager: [run(m, tokens_of(5000 + i, 0)) for i in range(20)]))
        assert manager.stats()["evicted_blocks"] == 80
    assert counts[1] <= counts[0] + 20 * 2 * 30


def test_a_decode_step_does_not_grow_with_the_length_of_the_sequence() -> None:
    counts = []
    for length in (100, 400):
        manager = PythonBlockManager([("full", 0)], 1000, 4, True, 0, False, 1)
        sequence = manager.open(np.arange(length, dtype=np.int32), b"", *NO_KEYS)
        assert manager.reserve(np.array([sequence]), np.array([length]), 0) is not None
        manager.commit(sequence, length)

        def decode(manager=manager, sequence=sequence, length=length) -> None:
            manager.append(sequence, np.array([1], np.int32))
            assert manager.reserve(np.array([sequence]), np.array([1]), 0) is not None
            manager.commit(sequence, length + 1)

        counts.append(visited(manager, decode))
    assert counts[0] == counts[1]


def test_looking_again_costs_nothing_while_nothing_was_committed() -> None:
    manager = filled(50, 400)
    sequence = manager.open(tokens_of(3, 0), b"", *NO_KEYS)
    assert visited(manager, lambda: manager.num_computed_tokens(sequence)) == 0
    run(manager, tokens_of(777, 0))
    assert visited(manager, lambda: manager.num_computed_tokens(sequence)) > 0


@pytest.mark.parametrize("num_prompts", [100, 400])
def test_nodes_compared_by_each_call(backend: str, num_prompts: int) -> None:
    """reserve (and native eviction): none; a hit and an insert: a search among siblings, their log2, for each block."""
    num_tokens, block_size = 64, 4
    num_blocks = num_tokens // block_size
    cache = Cache(
        KVSpec.uniform(num_layers=1, num_kv_heads=1, head_dim=8),
        num_blocks=num_blocks * num_prompts,
        block_size=block_size,
        backend=backend,
    )
    manager = cache._manager
    tree = manager.blocks.tree if isinstance(manager, PythonBlockManager) else manager

    def counted(call) -> tuple[int, object]:
        before = tree.num_visited
        result = call()
        return tree.num_visited - before, result

    def prompt(index: int) -> np.ndarray:
        return np.arange(num_tokens, dtype=np.int32) + 1000 * index

    search = 2 * num_prompts.bit_length() + 4
    for index in range(num_prompts + 3):  # the last three out of a full pool
        inserted, sequence = counted(lambda index=index: cache.open(prompt(index)))
        reserved, plan = counted(lambda sequence=sequence: cache.reserve([sequence], [num_tokens]))
        assert plan is not None
        evicts = index >= num_prompts and backend == "python"  # it finds a node's place to remove it
        assert reserved <= (search + 4 * num_blocks if evicts else 0)
        committed, _ = counted(lambda sequence=sequence: cache.commit(sequence, num_tokens))
        assert inserted + committed <= 2 * (search + 4 * num_blocks)
        cache.close(sequence)
    assert cache.stats()["evicted_blocks"] == 3 * num_blocks
    hit, sequence = counted(lambda: cache.open(prompt(num_prompts // 2)))
    assert sequence.num_cached_tokens == num_tokens - 1
    assert num_blocks - 1 <= hit <= search + 4 * num_blocks
    sequence.append(np.array([5], np.int32))
    assert counted(lambda: cache.reserve([sequence], [2]))[0] <= (search if backend == "python" else 0)
    cache.check()
