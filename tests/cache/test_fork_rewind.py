"""Fork shares and copies one partial block; rewind forgets and never lets shared content be overwritten."""

from __future__ import annotations

import numpy as np
import pytest
from support.cache_case import advance, compute, make, prompt

from quire.errors import ArgumentError, SequenceClosedError


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("length", [7, 8, 9])
def test_fork_shares_and_the_child_copies_the_partial_block(
    backend: str, prefix_caching: bool, length: int
) -> None:
    cache = make(backend, prefix_caching=prefix_caching)
    parent = compute(cache, prompt(length))
    held = cache.stats()["held"]
    child = cache.fork(parent)
    cache.check()
    assert child.id != parent.id
    assert cache.stats()["held"] == held
    assert child.tokens.tolist() == parent.tokens.tolist()
    assert child.num_computed_tokens == length
    parent.append([1])
    child.append([2])
    plan = cache.reserve([parent, child], [1, 1])
    assert plan is not None
    cache.check()
    copied = [[parent.block_table()[length // 4], child.block_table()[length // 4], length % 4]]
    assert plan.copies.tolist() == (copied if length % 4 else [])
    assert len(set(plan.slot_mapping.tolist())) == 2
    cache.commit(parent, length + 1)
    cache.commit(child, length + 1)
    cache.check()
    if prefix_caching:
        for last in (1, 2):
            assert cache.match([*prompt(length), last, 0]).num_tokens == length + 1


def test_the_last_of_several_to_leave_a_block_writes_in_place(backend: str) -> None:
    cache = make(backend)
    parent = compute(cache, prompt(6))
    children = [cache.fork(parent) for _ in range(3)]
    cache.close(parent)
    for index, child in enumerate(children):
        child.append([index])
    plan = cache.reserve(children, [1, 1, 1])
    assert plan is not None
    assert len(plan.copies) == 2
    assert len(set(plan.slot_mapping.tolist())) == 3
    for child in children:
        cache.commit(child, 7)
        cache.check()


def test_reserved_blocks_stay_with_the_parent(backend: str) -> None:
    cache = make(backend)
    parent = compute(cache, prompt(6))
    parent.append(prompt(9, seed=1))
    assert cache.reserve([parent], [9]) is not None
    child = cache.fork(parent)
    assert len(child.block_table()) == 2
    cache.check()
    assert not set(advance(cache, child).slot_mapping) & set(range(0))
    cache.commit(parent, 15)
    cache.check()


def test_a_child_of_a_sequence_that_has_not_reserved_keeps_looking(backend: str) -> None:
    cache = make(backend)
    waiting = cache.open(prompt(9))
    child = cache.fork(waiting)
    compute(cache, prompt(9))
    assert child.num_cached_tokens == 8
    assert waiting.num_cached_tokens == 8


@pytest.mark.parametrize("position", range(12))
def test_rewind_forgets_tokens_and_keeps_what_others_find(backend: str, position: int) -> None:
    cache = make(backend, num_blocks=32)
    sequence = compute(cache, prompt(11))
    wanted = min(position, 11)
    assert cache.rewind(sequence, wanted) == wanted
    cache.check()
    assert sequence.num_tokens == sequence.num_computed_tokens == wanted
    assert cache.match(np.append(prompt(11), 0)).num_tokens == 11
    sequence.append(prompt(9, seed=5))
    advance(cache, sequence)
    assert cache.match(np.append(prompt(11), 0)).num_tokens == 11
    both = np.concatenate([prompt(11)[:wanted], prompt(9, seed=5), [0]])
    assert cache.match(both).num_tokens == wanted + 9


def test_rewind_gives_back_reserved_blocks(backend: str) -> None:
    cache = make(backend)
    sequence = compute(cache, prompt(5))
    sequence.append(prompt(20, seed=1))
    assert cache.reserve([sequence], [20]) is not None
    assert cache.stats()["held"] == 7
    assert cache.rewind(sequence, 5) == 5
    assert cache.stats()["held"] == 2
    with pytest.raises(ArgumentError, match="5 reserved"):
        cache.commit(sequence, 6)


def test_rewind_under_a_fork_does_not_disturb_it(backend: str) -> None:
    cache = make(backend, prefix_caching=False)
    parent = compute(cache, prompt(7))
    child = cache.fork(parent)
    cache.rewind(parent, 5)
    parent.append([1, 2, 3])
    plan = cache.reserve([parent], [3])
    assert plan is not None
    assert plan.copies.tolist() == [[child.block_table()[1], parent.block_table()[1], 1]]
    cache.check()


def test_a_position_out_of_range_is_refused(backend: str) -> None:
    cache = make(backend)
    sequence = compute(cache, prompt(7))
    for position in (8, -1):
        with pytest.raises(ArgumentError, match=str(position)):
            cache.rewind(sequence, position)
    assert sequence.num_tokens == 7


def test_a_closed_sequence_is_refused_everywhere(backend: str) -> None:
    cache = make(backend)
    sequence = compute(cache, prompt(7))
    cache.close(sequence)
    before = cache.stats()
    calls = (
        lambda: cache.close(sequence),
        lambda: cache.close(77),
        lambda: cache.commit(sequence, 7),
        lambda: cache.fork(sequence),
        lambda: cache.rewind(sequence, 1),
        lambda: cache.reserve([sequence], [1]),
        lambda: cache.num_blocks_needed([sequence], [1]),
        lambda: sequence.append([1]),
        lambda: sequence.tokens,
        lambda: sequence.num_tokens,
        lambda: sequence.num_cached_tokens,
        lambda: sequence.num_computed_tokens,
        lambda: sequence.block_table(),
    )
    for call in calls:
        with pytest.raises(SequenceClosedError, match=r"sequence (0|77)\b"):
            call()
    assert cache.stats() == before
    cache.check()
