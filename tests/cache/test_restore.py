"""A sequence longer than its windows is restored with its content, and no other part of it is found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.cache_case import BACKENDS, FULL, compute, make, prompt, store

from quire import Cache
from quire.errors import ArgumentError
from quire.observe.tree_mirror import TreeMirror
from quire.spec import Span

WINDOW = Span("window", 6)


@pytest.fixture(params=BACKENDS)
def backend(request: Any) -> str:
    return request.param


def is_kept(cache: Cache, sequence: Any, num_tokens: int) -> list[list[bool]]:
    num_blocks = -(-num_tokens // cache.block_size)
    return [(sequence.block_table(g)[:num_blocks] >= 0).tolist() for g in range(cache.num_groups)]


@pytest.mark.parametrize("num_tokens", [22, 24, 25])
@pytest.mark.parametrize("groups", [[FULL, WINDOW], [WINDOW, FULL], [WINDOW]], ids=["full", "behind", "only"])
def test_it_has_what_it_had(backend: str, groups: list[Span], num_tokens: int) -> None:
    cache = make(backend, *groups, num_blocks=30)
    tokens = prompt(num_tokens)
    sequence = compute(cache, tokens)
    had = is_kept(cache, sequence, num_tokens)
    assert not all(map(all, had))
    cache.close(sequence)
    cache.drop([])
    again = cache.open(tokens)
    needed = cache.num_blocks_to_restore(again, num_tokens)
    assert needed == sum(map(sum, had))
    num_free = cache.num_free_blocks
    plan = cache.restore(again, num_tokens)
    assert plan is not None
    assert num_free - cache.num_free_blocks == needed
    cache.check()
    for group in range(cache.num_groups):
        slots = plan.group(group).slot_mapping
        assert ((slots >= 0) == np.repeat(had[group], 4)[:num_tokens]).all()
    assert again.num_computed_tokens == 0
    cache.commit(again, num_tokens)
    cache.check()
    assert is_kept(cache, again, num_tokens) == had
    # Found is only what a window's content reaches.
    assert cache.match([*tokens, 5]).num_tokens == num_tokens
    assert cache.match(tokens[:12]).num_tokens == 0
    again.append([7])
    assert cache.reserve([again], [1]) is not None
    cache.commit(again, num_tokens + 1)
    cache.close(again)
    cache.check()


def test_a_block_that_others_hold_in_part_is_neither_written_nor_extended(backend: str) -> None:
    """The hit ends within a block that is behind the window in the end: what the tree says of it stays what it was."""
    cache = make(backend, FULL, WINDOW, num_blocks=40)
    tokens = prompt(22)
    for is_held in (False, True):
        other = compute(cache, tokens[:6])
        if not is_held:
            cache.close(other)
        again = cache.open(tokens)
        assert again.num_computed_tokens == 6
        before = [again.block_table(group)[1] for group in (0, 1)]
        plan = cache.restore(again, 22)
        assert plan is not None
        for group in (0, 1):
            [(source, destination, count)] = plan.group(group).copies.tolist()
            assert (source, count) == (before[group], 2)
            assert destination not in before
        cache.commit(again, 22)
        cache.check()
        tree = cache.tree()
        [row] = [r for r in range(len(tree)) if tree.depths[r] == 2 and tree.num_tokens[r] == 4]
        assert (tree.block_ids[row] >= 0).tolist() == [True, False]
        if is_held:
            assert cache.match(tokens[:7]).num_tokens == 6
            cache.close(other)
        cache.close(again)
        cache.drop([])
        assert cache.num_free_blocks == 40


def test_a_block_of_its_own_in_part_is_not_extended_either(backend: str) -> None:
    cache = make(backend, FULL, WINDOW, num_blocks=40)
    tokens = prompt(22)
    sequence = cache.open(tokens)
    assert cache.reserve([sequence], [6]) is not None
    cache.commit(sequence, 6)
    plan = cache.restore(sequence, 22)
    assert plan is not None
    assert len(plan.copies) == 1
    cache.commit(sequence, 22)
    cache.check()
    assert cache.match(tokens[:9]).num_tokens <= 4
    assert cache.match([*tokens, 1]).num_tokens == 22


def test_what_the_tree_still_has_is_shared(backend: str) -> None:
    cache = make(backend, FULL, WINDOW, num_blocks=40)
    tokens = prompt(22)
    store(cache, tokens[:20])
    again = cache.open([*tokens[:4], 1, 2, 3])
    assert again.num_computed_tokens == 4
    cache.close(again)
    held = compute(cache, tokens)
    other = cache.open(tokens[:18])
    plan = cache.restore(other, 18)
    assert plan is not None
    cache.commit(other, 18)
    assert other.block_table(0)[:4].tolist() == held.block_table(0)[:4].tolist()
    cache.check()


def test_until_it_is_committed_it_only_goes_back(backend: str) -> None:
    cache = make(backend, FULL, WINDOW, num_blocks=20)
    tokens = prompt(22)
    sequence = cache.open(tokens)
    for wrong in (0, 23):
        with pytest.raises(ArgumentError, match=r"expected 1 \.\. 22 computed tokens .* in restore"):
            cache.restore(sequence, wrong)
    assert cache.restore(sequence, 20) is not None
    before = cache.stats()
    with pytest.raises(ArgumentError, match="expected a commit of all 20 tokens"):
        cache.reserve([sequence], [1])
    with pytest.raises(ArgumentError, match="expected a commit of all 20 tokens"):
        cache.restore(sequence, 21)
    with pytest.raises(ArgumentError, match=r"expected 20 computed tokens .* restored to these, got 8"):
        cache.commit(sequence, 8)
    child = cache.fork(sequence)
    assert cache.stats()["held"] == before["held"]
    cache.close(child)
    assert cache.rewind(sequence, 22) == 0
    cache.check()
    assert cache.num_free_blocks == 20
    assert cache.reserve([sequence], [22]) is None or cache.stats()["held"] == 12
    small = make(backend, FULL, WINDOW, num_blocks=7)
    tight = small.open(tokens)
    assert small.num_blocks_to_restore(tight, 22) == 8
    assert small.restore(tight, 22) is None
    assert small.stats()["held"] == 0


def test_without_prefix_caching_too(backend: str) -> None:
    cache = make(backend, FULL, WINDOW, prefix_caching=False)
    sequence = cache.open(prompt(22))
    assert cache.restore(sequence, 22) is not None
    cache.commit(sequence, 22)
    assert is_kept(cache, sequence, 22) == [[True] * 6, [False] * 4 + [True] * 2]
    cache.check()


def test_subscribers_hear_of_what_is_there(backend: str) -> None:
    """Of blocks without any block they hear nothing, nor of those below, whose names they could not know."""
    for groups, num_known in (([FULL, WINDOW], 5), ([WINDOW], 0)):
        cache = make(backend, *groups, num_blocks=30)
        cache.record_events(True)
        mirror = TreeMirror(cache, lambda: 0.0)
        sequence = cache.open(prompt(22))
        assert cache.restore(sequence, 22) is not None
        mirror.apply(list(cache.take_events()))
        assert not mirror.by_id
        cache.commit(sequence, 22)
        mirror.apply(list(cache.take_events()))
        assert len(mirror.by_id) == num_known
        assert sorted(block.depth for block in mirror.by_id.values()) == list(range(1, num_known + 1))
