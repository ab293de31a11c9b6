"""`Cache.drop`: content with a given prefix is not found any more, and its blocks are free once unused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.cache_case import FULL, advance, compute, make, prompt, store

from quire import Cache
from quire.cache.cache import Sequence
from quire.cache.results import Dropped
from quire.errors import ArgumentError, SequenceClosedError
from quire.spec import Span

WINDOW = Span("window", 5)
GROUPS = [(FULL,), (FULL, WINDOW), (WINDOW,)]


def found(cache: Cache, tokens: Any, **where: Any) -> int:
    """Tokens of these, the last one too, that somebody would find."""
    return cache.match([*tokens, 7], **where).num_tokens


def decode(cache: Cache, sequence: Sequence, num_tokens: int) -> None:
    for token in range(num_tokens):
        sequence.append([token])
        advance(cache, sequence)


def test_it_forgets_what_begins_with_the_tokens(backend: str) -> None:
    cache = make(backend)
    head = prompt(6)
    for seed in (1, 2):
        store(cache, [*head, *prompt(6, seed=seed)])
    store(cache, [*head[:5], 1, 2, 3])
    assert cache.stats()["cached"] == 1 + 2 * 2 + 1
    assert cache.drop(head) == Dropped(num_freed=4, num_held=0)
    cache.check()
    assert found(cache, head) == 5, "of the block that begins otherwise"
    assert cache.drop([]) == (2, 0)
    assert (cache.stats()["num_nodes"], cache.stats()["cached"]) == (0, 0)
    assert cache.namespaces() == []
    assert cache.drop(head) == (0, 0)


def test_of_whole_blocks_the_last_one_goes_too(backend: str) -> None:
    cache = make(backend)
    store(cache, prompt(12))
    assert cache.drop(prompt(8)) == (2, 0)
    assert found(cache, prompt(12)) == 4


def test_other_namespaces_stay(backend: str) -> None:
    cache = make(backend)
    store(cache, prompt(12))
    store(cache, prompt(12), namespace=b"a")
    assert cache.drop([]) == (3, 0)
    assert found(cache, prompt(12), namespace=b"a") == 12
    assert cache.namespaces() == [b"a"]


def test_in_flight_content_is_free_when_its_step_ends(backend: str) -> None:
    cache = make(backend, overlapped_steps=True)
    store(cache, prompt(8))
    assert cache.drop([]) == (0, 2)
    cache.check()
    assert found(cache, prompt(8)) == 0
    assert cache.stats()["in_flight"] == 2
    cache.complete(1)
    assert cache.stats()["free"] == 16


@pytest.mark.parametrize("groups", GROUPS, ids=["full", "full and window", "window"])
def test_what_a_running_sequence_holds_is_not_found_and_gone_when_it_ends(
    backend: str, groups: tuple[Span, ...]
) -> None:
    cache = make(backend, *groups, num_blocks=32)
    running = compute(cache, prompt(10))
    others = compute(cache, prompt(10, seed=1))
    before = cache.stats()
    dropped = cache.drop(prompt(10)[:3])
    cache.check()
    assert dropped.num_held > 0
    assert cache.stats()["held"] == before["held"], "it keeps what it computes with"
    assert (running.is_findable, others.is_findable) == (False, True)
    assert (running.num_computed_tokens, running.num_tokens) == (10, 10)
    assert found(cache, prompt(10)) == 0
    decode(cache, running, 9)
    assert found(cache, running.tokens) == 0, "nor what it computes now"
    late = cache.open([*running.tokens, 5])
    assert late.num_cached_tokens == 0
    cache.close(late)
    cache.close(running)
    cache.check()
    assert cache.stats()["held"] == len(groups) * 3 - (WINDOW in groups)
    assert found(cache, prompt(10)) == 0
    assert found(cache, prompt(10, seed=1)) == 10
    cache.close(others)
    cache.drop([])
    assert cache.stats()["free"] == 32


def test_blocks_before_the_one_in_which_the_tokens_end_stay(backend: str) -> None:
    cache = make(backend)
    running = compute(cache, prompt(14))
    assert cache.drop(prompt(14)[:9]) == (0, 2)
    assert found(cache, prompt(14)) == 8
    decode(cache, running, 6)
    assert found(cache, running.tokens) == 8
    cache.close(running)
    assert (cache.stats()["cached"], cache.stats()["free"]) == (2, 14)


def test_content_computed_twice_is_not_found_of_the_second_either(backend: str) -> None:
    """Its tail has no node of its own: the first one's says the same."""
    cache = make(backend)
    first, second = cache.open(prompt(6)), cache.open(prompt(6))
    for sequence in (first, second):
        cache.reserve([sequence], [6])
    for sequence in (first, second):
        cache.commit(sequence, 6)
    cache.drop(prompt(6))
    assert (first.is_findable, second.is_findable) == (False, False)
    decode(cache, second, 4)
    assert found(cache, second.tokens) == 4
    cache.close(first)
    cache.close(second)
    cache.check()
    assert (cache.stats()["cached"], cache.stats()["free"]) == (1, 15)


def test_who_shares_only_the_beginning_of_the_block_goes_on_findable(backend: str) -> None:
    cache = make(backend)
    running = compute(cache, prompt(8))
    other = cache.open([*prompt(8)[:6], 1, 2, 3])
    assert other.num_cached_tokens == 6
    cache.drop(prompt(8)[:7])
    cache.check()
    assert (running.is_findable, other.is_findable) == (False, True)
    plan = cache.reserve([other], [3])
    assert plan is not None
    assert len(plan.group(0).copies) == 1, "the block is the other's to write"
    cache.commit(other, 9)
    cache.close(running)
    cache.close(other)
    cache.check()
    assert found(cache, prompt(8)) == 6
    assert found(cache, other_tokens()) == 9


def other_tokens() -> list[int]:
    return [*prompt(8)[:6].tolist(), 1, 2, 3]


def test_the_same_prompt_computed_anew_is_found_beside_it(backend: str) -> None:
    cache = make(backend)
    running = compute(cache, prompt(9))
    cache.drop(prompt(9))
    store(cache, prompt(9))
    assert found(cache, prompt(9)) == 9
    decode(cache, running, 4)
    assert found(cache, running.tokens) == 9, "the new one's, not the old one's"
    cache.close(running)
    assert (cache.stats()["cached"], cache.stats()["free"]) == (3, 13)
    cache.check()


def fork_it(cache: Cache, sequence: Sequence) -> Sequence:
    return cache.fork(sequence)


def rewind_it(cache: Cache, sequence: Sequence) -> Sequence:
    assert cache.rewind(sequence, 2) == 2
    return sequence


@pytest.mark.parametrize("change", [fork_it, rewind_it], ids=["fork", "rewind"])
def test_neither_forks_nor_rewinds_bring_it_back(
    backend: str, change: Callable[[Cache, Sequence], Sequence]
) -> None:
    cache = make(backend)
    running = compute(cache, prompt(10))
    cache.drop(prompt(10)[:3])
    other = change(cache, running)
    assert not other.is_findable
    decode(cache, other, 8)
    assert found(cache, other.tokens) == 0
    for sequence in {running.id, other.id}:
        cache.close(sequence)
    cache.check()
    assert cache.stats()["free"] == 16


def test_one_opened_again_may_be_withdrawn(backend: str) -> None:
    """What an engine does with a sequence that was preempted after it was dropped, its bytes copied back."""
    cache = make(backend)
    running = compute(cache, prompt(10))
    cache.drop(prompt(10))
    cache.close(running)
    again = cache.open(prompt(10))
    cache.withdraw(again)
    cache.withdraw(again)
    assert cache.restore(again, 10) is not None
    cache.commit(again, 10)
    cache.check()
    assert found(cache, prompt(10)) == 8, "the block before the one in which they end was not dropped"
    cache.close(again)
    assert (cache.stats()["cached"], cache.stats()["free"]) == (2, 14)
    with pytest.raises(SequenceClosedError):
        cache.withdraw(again)


def test_a_sequence_that_has_computed_none_of_it_goes_on_findable(backend: str) -> None:
    cache = make(backend)
    waiting = cache.open(prompt(10))
    cache.drop(prompt(10))
    cache.drop([])
    assert waiting.is_findable
    advance(cache, waiting)
    assert found(cache, prompt(10)) == 10


def test_one_that_has_not_begun_keeps_its_hit_and_looks_no_more(backend: str) -> None:
    cache = make(backend)
    store(cache, prompt(8))
    waiting = cache.open(prompt(12))
    assert waiting.num_cached_tokens == 8
    assert cache.drop(prompt(12)[:2]) == (0, 2)
    store(cache, prompt(12))
    assert waiting.num_cached_tokens == 8
    advance(cache, waiting)
    cache.close(waiting)
    assert found(cache, prompt(12)) == 12
    assert cache.stats()["cached"] == 3
    cache.check()


def test_events_tell_of_it_once_when_it_is_dropped(backend: str) -> None:
    cache = make(backend)
    cache.record_events(True)
    running = compute(cache, prompt(10))
    cache.take_events()
    cache.drop(prompt(10)[:3])
    events = [(event.kind, event.node_id, event.block_ids, event.reason) for event in cache.take_events()]
    assert events == [("removed", 1, (1,), "forgotten"), ("removed", 0, (0,), "forgotten")]
    decode(cache, running, 4)
    cache.close(running)
    assert len(cache.take_events()) == 0


def test_what_is_pinned_is_refused(backend: str) -> None:
    cache = make(backend)
    store(cache, prompt(10))
    pin = cache.pins.add(prompt(10)[:6])
    before = cache.stats()
    for tokens in ([], prompt(10)[:3], prompt(10)[:6], prompt(10)[:7]):
        with pytest.raises(ArgumentError, match="a pin of 6 tokens; remove the pin first"):
            cache.drop(tokens)
    assert cache.stats() == before
    # What goes on behind the block in which the pin ends may go.
    assert cache.drop(prompt(10)[:9]) == (1, 0)
    assert cache.drop([*prompt(10)[:5], 1]) == (0, 0)
    assert cache.drop([], namespace=b"a") == (0, 0)
    cache.check()
    cache.pins.remove(pin)
    assert cache.drop(prompt(10)[:3]) == (2, 0)


def test_owners_count_what_is_dropped_until_it_is_free(backend: str) -> None:
    cache = make(backend)
    cache.set_limits(1, floor_blocks=4, quota_blocks=8)
    running = compute(cache, prompt(10), owner_id=1, cache_priority=2)
    cache.drop([])
    assert cache.owner_counts(1) == (3, 0, 0)
    cache.close(running)
    assert cache.owner_counts(1) == (0, 0, 0)
    cache.check()


# Trim


def test_trim_leaves_a_share_of_what_nobody_holds(backend: str) -> None:
    cache = make(backend)
    store(cache, prompt(8))
    store(cache, prompt(8, seed=1))
    unused = cache.trim(1.0).tolist()
    assert (len(unused), found(cache, prompt(9)), found(cache, prompt(9, seed=1))) == (12, 8, 8)
    assert unused == np.flatnonzero(cache.block_map().namespace_index < 0).tolist()
    cache.trim(0.5)
    assert (found(cache, prompt(9)), found(cache, prompt(9, seed=1))) == (0, 8), "the oldest goes first"
    cache.check()
    assert (cache.stats()["cached"], cache.num_blocks) == (2, 16)
    for wrong in (-0.1, 1.1, float("nan"), True, "1"):
        with pytest.raises(ArgumentError, match=r"expected 0 \.\. 1 for share_kept"):
            cache.trim(wrong)
    assert cache.stats()["cached"] == 2


def test_trim_leaves_nothing_that_nobody_holds(backend: str) -> None:
    cache = make(backend)
    store(cache, prompt(9), owner_id=1)
    cache.set_limits(1, floor_blocks=4)
    held = compute(cache, prompt(5, seed=1))
    assert cache.trim().tolist() == [block_id for block_id in range(16) if block_id not in held.block_table()]
    cache.check()
    assert (cache.stats()["cached"], cache.stats()["free"], cache.num_blocks) == (0, 14, 16)
    assert found(cache, prompt(9)) == 0
    assert found(cache, prompt(5, seed=1)) == 5
    cache.close(held)
    assert cache.trim().tolist() == list(range(16))
    assert cache.stats()["free"] == 16
    cache.resize(6)
    assert cache.trim().tolist() == list(range(16)), "those given up before too"
    assert (cache.num_blocks, cache.stats()["free"]) == (6, 6)
    store(cache, prompt(9))
    assert found(cache, prompt(9)) == 9
