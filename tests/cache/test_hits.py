"""Hits: token-granular prefixes, identity, sharing on commit, sequences that keep looking."""

from __future__ import annotations

import numpy as np
import pytest
from support.cache_case import FULL, advance, compute, make, prompt, store


def test_nothing_is_found_in_an_empty_cache(backend: str) -> None:
    cache = make(backend)
    assert cache.match(prompt(9)).num_tokens == 0
    assert cache.open(prompt(9)).num_cached_tokens == 0
    assert cache.open([]).num_cached_tokens == 0


@pytest.mark.parametrize("common", range(18))
def test_a_hit_ends_at_the_first_different_token(backend: str, common: int) -> None:
    cache = make(backend)
    store(cache, prompt(17))
    tokens = np.concatenate([prompt(17)[:common], prompt(9, seed=1)])
    assert cache.match(tokens).num_tokens == common


@pytest.mark.parametrize("length", range(1, 14))
def test_the_last_token_of_a_prompt_and_only_that_is_left_to_compute(backend: str, length: int) -> None:
    cache = make(backend)
    store(cache, prompt(length))
    sequence = cache.open(prompt(length))
    assert sequence.num_cached_tokens == sequence.num_computed_tokens == length - 1
    plan = advance(cache, sequence)
    assert plan.context_lengths.tolist() == [length]
    assert len(plan.slot_mapping) == 1


@pytest.mark.parametrize("block_size", [1, 2, 3, 16, 100, 512, 4096])
def test_any_block_size(backend: str, block_size: int) -> None:
    cache = make(backend, num_blocks=2500 // block_size + 8, block_size=block_size)
    store(cache, prompt(1100))
    for common in (1, 99, 511, 512, 513, 1024, 1099):
        tokens = np.concatenate([prompt(1100)[:common], prompt(3, seed=2)])
        assert cache.match(tokens).num_tokens == common
    plan = advance(cache, cache.open(np.concatenate([prompt(1100)[:700], prompt(700, seed=3)])))
    assert plan.query_start.tolist() == [0, 700]
    copied = plan.copies[:, 2].tolist()
    assert copied == ([700 % block_size] if 700 % block_size else [])


def test_whole_blocks_are_shared_and_the_partial_one_is_copied(backend: str) -> None:
    cache = make(backend)
    first = compute(cache, prompt(12))
    second = cache.open(np.concatenate([prompt(12)[:10], prompt(6, seed=1)]))
    plan = cache.reserve([second], [6])
    assert plan is not None
    table = first.block_table()
    assert plan.block_tables[0, :2].tolist() == table[:2].tolist()
    assert plan.copies.tolist() == [[table[2], plan.block_tables[0, 2], 2]]
    assert plan.slot_mapping[0] == plan.block_tables[0, 2] * 4 + 2


def test_a_prefix_that_ends_where_a_closed_sequence_ended_is_written_on_in_place(backend: str) -> None:
    cache = make(backend)
    store(cache, prompt(10))
    used = cache.stats()["cached"]
    sequence = cache.open(np.concatenate([prompt(10), prompt(2, seed=1)]))
    assert sequence.num_cached_tokens == 10
    assert len(advance(cache, sequence).copies) == 0
    assert cache.stats()["held"] == used


def test_two_sequences_opened_before_either_computed_share_when_one_commits(backend: str) -> None:
    cache = make(backend)
    first, second = cache.open(prompt(11)), cache.open(prompt(11))
    assert first.num_cached_tokens == second.num_cached_tokens == 0
    advance(cache, first)
    assert second.num_computed_tokens == second.num_cached_tokens == 10
    advance(cache, second)
    assert first.block_table()[:2].tolist() == second.block_table()[:2].tolist()
    assert cache.stats()["held"] == 4


def test_two_sequences_computed_at_the_same_time_share_their_full_blocks_on_commit(backend: str) -> None:
    cache = make(backend)
    first, second = cache.open(prompt(11)), cache.open(prompt(11))
    plan = cache.reserve([first, second], [11, 11])
    assert plan is not None
    assert cache.stats()["held"] == 6
    cache.commit(first, 11)
    cache.commit(second, 11)
    cache.check()
    assert first.block_table()[:2].tolist() == second.block_table()[:2].tolist()
    assert cache.stats()["held"] == 4
    assert cache.stats()["deduplicated_blocks"] == 2
    assert plan.block_tables[1].tolist() == [3, 4, 5], "a plan does not change with the tables"


def test_a_chunked_prefill_is_found_chunk_by_chunk(backend: str) -> None:
    cache = make(backend)
    sequence = cache.open(prompt(14))
    for end in (3, 6, 7, 13, 14):
        assert cache.reserve([sequence], [end - sequence.num_computed_tokens]) is not None
        cache.commit(sequence, end)
        cache.check()
        assert cache.match(np.append(prompt(14), 1)).num_tokens == end


def test_a_commit_may_come_in_pieces(backend: str) -> None:
    cache = make(backend)
    sequence = cache.open(prompt(14))
    assert cache.reserve([sequence], [14]) is not None
    for end in (2, 9, 9, 14):
        cache.commit(sequence, end)
        cache.check()
        assert cache.match(np.append(prompt(14), 1)).num_tokens == end


def test_generated_tokens_are_found_too(backend: str) -> None:
    cache = make(backend)
    sequence = compute(cache, prompt(6))
    for token in range(5):
        sequence.append([token])
        advance(cache, sequence)
    assert cache.match([*prompt(6), 0, 1, 2, 3, 4, 5]).num_tokens == 11
    assert cache.match([*prompt(6), 0, 1, 7]).num_tokens == 8


def test_namespaces_do_not_see_each_other(backend: str) -> None:
    cache = make(backend)
    store(cache, prompt(9), namespace=b"a")
    assert cache.match(prompt(9), namespace=b"a").num_tokens == 8
    assert cache.match(prompt(9), namespace=b"b").num_tokens == 0
    assert cache.match(prompt(9)).num_tokens == 0


@pytest.mark.parametrize("position", range(8))
def test_an_extra_key_counts_from_its_position_on(backend: str, position: int) -> None:
    cache = make(backend)
    store(cache, prompt(9), extra_keys={position: b"cat"})
    assert cache.match(prompt(9), extra_keys={position: b"cat"}).num_tokens == 8
    for other in ({}, {position: b"dog"}, {position: b""}, {position: b"cat\0"}, {position: b"ca"}):
        assert cache.match(prompt(9), extra_keys=other).num_tokens == position
    if position:
        both = {position: b"cat", position - 1: b"cat"}
        assert cache.match(prompt(9), extra_keys=both).num_tokens == position - 1


def test_extra_keys_of_any_bytes_keep_contents_apart(backend: str) -> None:
    cache = make(backend, num_blocks=64)
    keys = [b"", b"\0", b"\0\0", b"\0\xff", b"\xff", b"\0\xff\0", b"\0\0\0\x02", b"a\0", b"a"]
    for key in keys:
        assert cache.match(prompt(7), extra_keys={1: key, 5: key}).num_tokens in (0, 1)
        store(cache, prompt(7), extra_keys={1: key, 5: key})
    for key in keys:
        assert cache.match(prompt(7), extra_keys={1: key, 5: key}).num_tokens == 6
        assert cache.match(prompt(7), extra_keys={1: key}).num_tokens == 5


def test_keys_of_forgotten_positions_are_forgotten(backend: str) -> None:
    cache = make(backend)
    sequence = compute(cache, prompt(9), extra_keys={2: b"x", 6: b"y"})
    assert cache.rewind(sequence, 5) == 5
    sequence.append(prompt(9)[5:])
    advance(cache, sequence)
    assert cache.match(prompt(9), extra_keys={2: b"x"}).num_tokens == 8


def test_without_prefix_caching_nothing_is_found(backend: str) -> None:
    cache = make(backend, prefix_caching=False)
    sequence = compute(cache, prompt(9))
    assert cache.match(prompt(9)).num_tokens == 0
    assert cache.open(prompt(9)).num_cached_tokens == 0
    cache.close(sequence)
    assert cache.num_cached_blocks == 0
    assert cache.num_free_blocks == 16


def test_match_changes_nothing(backend: str) -> None:
    """Looking at the oldest prompt does not save it."""
    cache = make(backend, num_blocks=4)
    store(cache, prompt(8, seed=1))
    store(cache, prompt(8, seed=2))
    before = cache.stats()
    assert cache.match(prompt(9, seed=1)).num_tokens == 8
    assert cache.stats() == before
    cache.check()
    store(cache, prompt(8, seed=3))
    assert cache.match(prompt(9, seed=1)).num_tokens == 0
    assert cache.match(prompt(9, seed=2)).num_tokens == 8


def test_statistics_count_what_admitted_sequences_found(backend: str) -> None:
    cache = make(backend)
    store(cache, prompt(8))
    sequence = cache.open(prompt(8))
    assert cache.stats()["query_tokens"] == 8
    advance(cache, sequence)
    stats = cache.stats()
    assert (stats["query_tokens"], stats["hit_tokens"]) == (16, 7)
    assert stats["num_sequences"] == 1
    assert stats["copied_blocks"] == 1


def test_equal_tokens_behind_different_prefixes_are_different(backend: str) -> None:
    cache = make(backend, FULL, num_blocks=16)
    store(cache, [1, 2, 3, 4, 9, 9, 9, 9])
    assert cache.match([5, 6, 7, 8, 9, 9, 9, 9, 1]).num_tokens == 0
    store(cache, [5, 6, 7, 8, 9, 9, 9, 9])
    assert cache.match([5, 6, 7, 8, 9, 9, 9, 9, 1]).num_tokens == 8
