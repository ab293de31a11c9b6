"""`Cache.set_cache_priority`: the eviction level of known content, changed after the fact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.cache_case import BACKENDS, FULL, advance, compute, make, prompt, store

from quire import Cache
from quire.cache.results import PriorityChange
from quire.errors import ArgumentError
from quire.spec import Span

DISCARD, NORMAL, KEEP = 0, 1, 2


def found(cache: Cache, tokens: Any, **where: Any) -> int:
    return cache.match([*tokens, 7], **where).num_tokens


def levels(cache: Cache, tokens: Any) -> list[int]:
    """Of the blocks that a sequence of these tokens finds."""
    probe = cache.open([*tokens, 7], cache_priority=DISCARD)
    tree = cache.tree()
    by_block = dict(zip(tree.block_ids.ravel().tolist(), tree.cache_priorities.ravel().tolist(), strict=True))
    table = probe.block_table(0).tolist()
    cache.close(probe)
    return [by_block[block_id] for block_id in table]


def test_discarded_content_goes_before_older_content(backend: str) -> None:
    cache = make(backend, num_blocks=6)
    for seed in (1, 2, 3):
        store(cache, prompt(8, seed=seed))
    assert cache.set_cache_priority(prompt(8, seed=3), DISCARD) == PriorityChange(2, 0)
    cache.check()
    store(cache, prompt(8, seed=4))
    assert [found(cache, prompt(8, seed=seed)) for seed in (1, 2, 3, 4)] == [8, 8, 0, 8]


def test_kept_content_goes_last_and_lowered_again_by_its_age(backend: str) -> None:
    cache = make(backend, num_blocks=6)
    for seed in (1, 2, 3):
        store(cache, prompt(8, seed=seed))
    assert cache.set_cache_priority(prompt(8, seed=1), KEEP).num_blocks == 2
    store(cache, prompt(4, seed=4))
    assert [found(cache, prompt(8, seed=seed)) for seed in (1, 2, 3)] == [8, 4, 8]
    assert cache.set_cache_priority(prompt(8, seed=1), NORMAL).num_blocks == 2
    cache.check()
    store(cache, prompt(8, seed=5))
    assert [found(cache, prompt(8, seed=seed)) for seed in (1, 2, 3)] == [0, 4, 8], "the oldest release"


def test_only_the_branch_from_its_start_on_is_discarded(backend: str) -> None:
    cache = make(backend)
    head, old, new = prompt(8, seed=1), prompt(8, seed=2), prompt(8, seed=3)
    store(cache, [*head, *old])
    store(cache, [*head, *new])
    assert cache.set_cache_priority([*head, *old], DISCARD, start=8) == (2, 8)
    assert levels(cache, [*head, *old]) == [1, 1, 0, 0]
    assert levels(cache, [*head, *new]) == [1, 1, 1, 1]


def test_a_block_is_not_lowered_below_what_continues_it(backend: str) -> None:
    cache = make(backend)
    head, one, two = prompt(8, seed=1), prompt(4, seed=2), prompt(4, seed=3)
    store(cache, [*head, *one])
    store(cache, [*head, *two])
    assert cache.set_cache_priority([*head, *one], DISCARD) == (1, 8), "the other branch needs the head"
    assert cache.set_cache_priority([*head, *two], DISCARD) == (3, 0)
    cache.check()


def test_a_raise_takes_the_head_along_and_tells_where_it_began(backend: str) -> None:
    cache = make(backend)
    tokens = prompt(16)
    store(cache, tokens)
    cache.set_cache_priority(tokens[:8], KEEP)
    assert cache.set_cache_priority(tokens, DISCARD, start=4) == (3, 4)
    assert cache.set_cache_priority(tokens, KEEP, start=12) == (3, 4)
    assert levels(cache, tokens) == [2, 2, 2, 2]
    assert cache.set_cache_priority(tokens, KEEP) == (0, 16)
    assert cache.set_cache_priority(tokens, NORMAL, start=8) == (2, 8)
    assert levels(cache, tokens) == [2, 2, 1, 1]


def test_held_content_changes_too_and_a_later_user_raises_it(backend: str) -> None:
    cache = make(backend)
    sequence = compute(cache, prompt(8))
    assert cache.set_cache_priority(prompt(8), DISCARD).num_blocks == 2
    cache.close(sequence)
    assert levels(cache, prompt(8)) == [0, 0]
    cache.close(cache.open([*prompt(8), 7], cache_priority=NORMAL))
    assert levels(cache, prompt(8)) == [1, 1]


def test_what_is_not_in_memory_is_skipped(backend: str) -> None:
    cache = make(backend)
    tokens = prompt(20)
    assert cache.set_cache_priority(tokens, KEEP) == (0, 20)
    store(cache, tokens[:10])
    assert cache.set_cache_priority(tokens, DISCARD, start=12) == (0, 20)
    assert cache.set_cache_priority(tokens, DISCARD, namespace=b"other") == (0, 20)
    assert cache.set_cache_priority([*tokens[:8], 9, 9, 9], DISCARD, start=8) == (0, 11), "another last block"
    assert cache.set_cache_priority(tokens, DISCARD) == (3, 0), "the partial block too"
    assert cache.set_cache_priority(tokens[:9], KEEP) == (3, 0), "the block goes on behind the prompt"
    assert cache.set_cache_priority(tokens[:9], DISCARD) == (0, 9), "so it is not the prompt's to lower"


def test_a_quota_and_pins_come_first(backend: str) -> None:
    cache = make(backend, num_blocks=6)
    cache.set_limits(1, quota_blocks=4)
    for seed in (1, 2):
        store(cache, prompt(8, seed=seed), owner_id=1)
    cache.set_cache_priority(prompt(8, seed=1), KEEP)
    pin = cache.pins.add(prompt(8, seed=2))
    cache.set_cache_priority(prompt(8, seed=2), DISCARD)
    store(cache, prompt(8, seed=3), owner_id=1)
    assert [found(cache, prompt(8, seed=seed)) for seed in (1, 2, 3)] == [0, 8, 8], (
        "kept, but within the quota"
    )
    cache.pins.remove(pin)
    store(cache, prompt(8, seed=4))
    assert [found(cache, prompt(8, seed=seed)) for seed in (2, 3, 4)] == [8, 8, 8], "two blocks were free"
    store(cache, prompt(8, seed=5))
    assert [found(cache, prompt(8, seed=seed)) for seed in (2, 3, 4)] == [0, 8, 8]
    cache.check()


def test_it_is_no_event(backend: str) -> None:
    cache = make(backend)
    store(cache, prompt(8))
    cache.record_events(True)
    cache.take_events()
    cache.set_cache_priority(prompt(8), KEEP)
    assert not cache.num_events


def test_windows_and_several_groups(backend: str) -> None:
    cache = make(backend, FULL, Span("window", 5))
    sequence = compute(cache, prompt(16))
    sequence.append([3])
    advance(cache, sequence)
    assert cache.set_cache_priority(prompt(16), KEEP).num_blocks == 8
    cache.close(sequence)
    cache.check()


@pytest.mark.parametrize("bad", [{"start": 9}, {"start": -1}, {"cache_priority": 3}, {"namespace": "a"}])
def test_bad_arguments_change_nothing(backend: str, bad: dict[str, Any]) -> None:
    cache = make(backend)
    store(cache, prompt(8))
    with pytest.raises(ArgumentError, match=r"expected .* got"):
        cache.set_cache_priority(prompt(8), **{"cache_priority": KEEP, **bad})
    assert levels(cache, prompt(8)) == [1, 1]


def test_the_end_of_a_path_is_evicted_up_to_what_others_need(backend: str) -> None:
    cache = make(backend)
    head, one, two = prompt(8, seed=1), prompt(6, seed=2), prompt(4, seed=3)
    store(cache, [*head, *one])
    store(cache, [*head, *two])
    holder = compute(cache, [*head, *two, 5, 6, 7])
    cache.record_events(True)
    cache.take_events()
    assert cache.evict_path([*head, *one]) == 2, "the partial block too; the other branch needs the head"
    assert [event.reason for event in cache.take_events()] == ["forgotten"]
    assert cache.evict_path([*head, *two]) == 0, "a sequence holds it"
    cache.close(holder)
    pin = cache.pins.add(head)
    assert cache.evict_path([*head, *two, 5, 6, 7]) == 2
    cache.pins.remove(pin)
    assert cache.evict_path([*head, *two]) == 2
    assert cache.stats()["num_nodes"] == 0
    cache.check()


def random_run(backend: str, seed: int) -> list[Any]:
    """Prompts of a few texts, owners and changes of levels, in a pool too small for them: block ids and changes."""
    rng = np.random.default_rng(seed)
    cache = make(backend, num_blocks=24)
    cache.set_limits(1, floor_blocks=2, quota_blocks=12)
    texts = [prompt(48, seed=text) for text in range(4)]
    trace: list[Any] = []
    for _ in range(300):
        text, cut, start = int(rng.integers(4)), int(rng.integers(1, 48)), int(rng.integers(30))
        tokens = [*texts[0][: int(rng.integers(0, 20))], *texts[text][:cut]]
        if not rng.integers(6):
            trace.append(cache.evict_path(tokens))
        elif rng.integers(2):
            level = int(rng.integers(3))
            trace.append(tuple(cache.set_cache_priority(tokens, level, start=min(start, len(tokens)))))
        else:
            sequence = cache.open(tokens, owner_id=int(rng.integers(2)), cache_priority=int(rng.integers(3)))
            plan = cache.reserve([sequence], [len(tokens) - sequence.num_computed_tokens])
            trace.append(None if plan is None else plan.block_tables.tolist())
            if plan is not None:
                cache.commit(sequence, len(tokens))
            cache.close(sequence)
        cache.check()
    return trace


@pytest.mark.skipif(len(BACKENDS) < 2, reason="needs the extension")
@pytest.mark.parametrize("seed", range(3))
def test_both_back_ends_do_the_same(seed: int) -> None:
    first, second = (random_run(backend, seed) for backend in BACKENDS)
    assert first == second
    assert any(isinstance(entry, tuple) and entry[0] for entry in first)
