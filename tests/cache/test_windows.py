"""Window and chunked groups: they free blocks behind the window and still find prefixes."""

from __future__ import annotations

import numpy as np
import pytest
from support.cache_case import FULL, advance, compute, make, prompt, store

from quire.spec import Span

WINDOW = Span("window", 6)
CHUNKED = Span("chunked", 8)


def test_blocks_behind_the_window_are_given_up(backend: str) -> None:
    cache = make(backend, FULL, WINDOW, num_blocks=64)
    sequence = cache.open(prompt(40))
    for _ in range(40):
        assert cache.reserve([sequence], [1]) is not None
        cache.commit(sequence, sequence.num_computed_tokens + 1)
        cache.check()
        # The next query reads at most 5 earlier tokens, which lie in at most 2 blocks, and writes its own.
        assert (sequence.block_table(1) >= 0).sum() <= 3
        assert (sequence.block_table(0) >= 0).all()
    assert cache.stats()["held"] == 10 + 2


def test_a_window_bounds_what_is_held_without_prefix_caching(backend: str) -> None:
    cache = make(backend, WINDOW, num_blocks=3, prefix_caching=False)
    sequence = cache.open(prompt(200))
    for _ in range(200):
        assert cache.reserve([sequence], [1]) is not None
        cache.commit(sequence, sequence.num_computed_tokens + 1)
    cache.check()


def test_a_chunk_is_given_up_when_the_next_begins(backend: str) -> None:
    cache = make(backend, CHUNKED, num_blocks=64)
    sequence = cache.open(prompt(40))
    for length in range(1, 41):
        assert cache.reserve([sequence], [1]) is not None
        cache.commit(sequence, length)
        cache.check()
        kept = np.flatnonzero(sequence.block_table() >= 0)
        assert kept.tolist() == list(range(length // 8 * 2, -(-length // 4)))


@pytest.mark.parametrize("groups", [(FULL, WINDOW), (WINDOW,), (FULL, WINDOW, CHUNKED), (CHUNKED, WINDOW)])
def test_windows_still_find_prefixes(backend: str, groups: tuple[Span, ...]) -> None:
    """With room enough nothing is evicted, so every prefix is found to the token."""
    cache = make(backend, *groups, num_blocks=2000)
    store(cache, prompt(40))
    for common in range(1, 40):
        tokens = np.concatenate([prompt(40)[:common], prompt(8, seed=1)])
        assert cache.match(tokens).num_tokens == common
        advance(cache, sequence := cache.open(tokens))
        cache.close(sequence)
        cache.check()


def test_a_hit_takes_only_the_blocks_the_window_covers(backend: str) -> None:
    cache = make(backend, FULL, WINDOW, num_blocks=64)
    store(cache, prompt(40))
    sequence = cache.open(np.append(prompt(40)[:30], 1))
    assert sequence.num_cached_tokens == 30
    assert (sequence.block_table(0) >= 0).tolist() == [True] * 8
    assert (sequence.block_table(1) >= 0).tolist() == [False] * 6 + [True] * 2


def test_a_hit_must_be_valid_for_every_group(backend: str) -> None:
    """The window's blocks were evicted while the full ones stayed: the hit ends where a window is complete."""
    cache = make(backend, FULL, WINDOW, num_blocks=14)
    sequence = cache.open(prompt(40))
    for _ in range(10):
        assert cache.reserve([sequence], [4]) is not None
        cache.commit(sequence, sequence.num_computed_tokens + 4)
        cache.check()
    cache.close(sequence)
    assert cache.stats()["evicted_blocks"] == 6, "only the window's old blocks"
    assert cache.match(np.append(prompt(40), 1)).num_tokens == 40
    assert cache.match(np.append(prompt(40)[:39], 1)).num_tokens == 39
    assert cache.match(np.append(prompt(40)[:30], 1)).num_tokens == 30
    assert cache.match(np.append(prompt(40)[:20], 1)).num_tokens == 0


def test_a_hole_is_filled_by_who_computes_the_block_again(backend: str) -> None:
    cache = make(backend, FULL, WINDOW, num_blocks=12)
    sequence = cache.open(prompt(32))
    for _ in range(8):
        assert cache.reserve([sequence], [4]) is not None
        cache.commit(sequence, sequence.num_computed_tokens + 4)
    cache.close(sequence)
    assert cache.match(np.append(prompt(32)[:9], 1)).num_tokens == 0
    before = cache.stats()["deduplicated_blocks"]
    again = compute(cache, np.append(prompt(32)[:9], 1))
    assert cache.stats()["deduplicated_blocks"] == before + 2, "the two full blocks of the full group"
    cache.close(again)
    assert cache.match(np.append(prompt(32)[:9], 1)).num_tokens == 9


def test_rewind_goes_back_to_where_the_window_is_complete(backend: str) -> None:
    cache = make(backend, FULL, WINDOW, num_blocks=64)
    sequence = compute(cache, prompt(40))
    assert (sequence.block_table(1) >= 0).tolist() == [False] * 8 + [True] * 2
    assert cache.rewind(sequence, 38) == 38
    assert cache.rewind(sequence, 37) == 37, "the query at 37 reads 32 .. 36"
    assert cache.rewind(sequence, 36) == 0, "the query at 36 reads 31, which is gone"
    cache.check()
    assert sequence.num_tokens == 36
    assert sequence.num_cached_tokens == 0
    advance(cache, sequence)
    assert (sequence.block_table(1) >= 0).sum() == 2


def test_all_window_models_drop_what_nobody_can_find(backend: str) -> None:
    cache = make(backend, Span("window", 4), num_blocks=6)
    for seed in range(30):
        store(cache, prompt(24, seed=seed))
    assert cache.stats()["num_nodes"] <= 12


def test_a_window_of_one_needs_nothing_of_the_past(backend: str) -> None:
    cache = make(backend, Span("window", 1), num_blocks=4)
    sequence = cache.open(prompt(50))
    for length in range(1, 51):
        assert cache.reserve([sequence], [1]) is not None
        cache.commit(sequence, length)
        cache.check()
    cache.close(sequence)
    cache.check()


@pytest.mark.parametrize("reader_runs_alone", [False, True])
def test_a_hole_is_filled_from_a_block_that_another_sequence_reads(
    backend: str, reader_runs_alone: bool
) -> None:
    """The reader then holds a block of the full node in one group and one that is in no node in the other."""
    cache = make(backend, FULL, Span("window", 2), num_blocks=15)
    first = compute(cache, prompt(2))
    second = compute(cache, prompt(8))
    assert cache.stats()["cached"] == 1, "the window's first block of the second sequence"
    reader = cache.open([*prompt(2), 0])
    assert reader.num_cached_tokens == 2
    filler = compute(cache, prompt(20, seed=1))
    assert cache.stats()["evicted_blocks"] >= 1
    cache.close(filler)
    first.append(prompt(8)[2:5])
    advance(cache, first)
    cache.close(second)
    cache.close(first)
    cache.check()
    if reader_runs_alone:
        # 7 blocks in 2 groups and no room for the copies: the block is written in place.
        reader.append([0] * 25)
        assert len(advance(cache, reader).copies) == 0
    else:
        assert cache.match([*prompt(4), 0]).num_tokens == 4
        assert len(advance(cache, reader).copies) == 1
        assert cache.match([*prompt(4), 0]).num_tokens == 4
    cache.close(reader)
    cache.check()
    assert cache.match([*prompt(2), 0, 0]).num_tokens == 3
