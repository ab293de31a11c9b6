"""Events, explain and the tree as arrays."""

from __future__ import annotations

import numpy as np
import pytest
from support.cache_case import FULL, compute, make, prompt, store

from quire.cache.tree_view import STATES
from quire.spec import Span


def told(cache) -> list[tuple]:
    return [(event.kind, event.node_id, event.parent_id, event.block_ids) for event in cache.take_events()]


def test_nothing_is_noted_while_off(backend: str) -> None:
    cache = make(backend)
    store(cache, prompt(8))
    assert len(cache.take_events()) == 0


def test_full_blocks_are_stored_and_removed_with_all_that_is_known_of_them(backend: str) -> None:
    cache = make(backend, num_blocks=3)
    cache.record_events(True)
    tokens = prompt(10)
    store(cache, tokens, namespace=b"a", extra_keys={5: b"cat\0"}, owner_id=7)
    cleared, first, second = cache.take_events()
    assert (cleared.kind, cleared.node_id) == ("cleared", -1)
    assert (first.kind, first.parent_id, first.block_ids, first.owner_id) == ("stored", -1, (0,), 7)
    assert (second.parent_id, second.block_ids, second.namespace) == (first.node_id, (1,), b"a")
    assert first.tokens.tolist() == tokens[:4].tolist()
    assert second.tokens.tolist() == tokens[4:8].tolist()
    assert (first.extra_keys, second.extra_keys) == ({}, {1: b"cat\0"})
    # The partial block goes first, untold; then the deepest full one, for owner 8's need.
    sequence = cache.open(prompt(8, seed=1), owner_id=8)
    assert cache.reserve([sequence], [8]) is not None
    (gone,) = cache.take_events()
    assert (gone.kind, gone.node_id, gone.block_ids, gone.reason, gone.owner_id) == (
        "removed",
        second.node_id,
        (1,),
        "evicted",
        8,
    )
    cache.commit(sequence, 8)
    assert [event.kind for event in cache.take_events()] == ["stored", "stored"]


def test_events_say_which_limit_took_a_block(backend: str) -> None:
    """The owner's quota while the pool has free blocks, else the pool."""
    cache = make(backend, num_blocks=6)
    cache.record_events(True)
    cache.set_limits(7, 0, 2)
    store(cache, prompt(8), owner_id=7)
    store(cache, prompt(8, seed=1), owner_id=7)
    assert cache.stats()["free"] == 4
    gone = [(event.reason, event.owner_id) for event in cache.take_events() if event.kind == "removed"]
    assert gone == [("quota", 7)] * 2
    store(cache, prompt(24, seed=2), owner_id=8)
    removed = [event for event in cache.take_events() if event.kind == "removed"]
    assert [(event.reason, event.owner_id) for event in removed] == [("evicted", 8)] * 2
    assert all(event.is_eviction for event in removed)
    cache.drop(prompt(24, seed=2)[:1])
    assert {event.is_eviction for event in cache.take_events()} == {False}


def test_events_say_how_content_is_kept(backend: str) -> None:
    """As it was stored, and as it was when it went: a use in between may have raised it."""
    cache = make(backend, num_blocks=3)
    cache.record_events(True)
    store(cache, prompt(8), cache_priority=0)
    assert [event.cache_priority for event in cache.take_events() if event.kind == "stored"] == [0, 0]
    store(cache, [*prompt(4), 9], cache_priority=2)
    assert len(cache.take_events()) == 0
    sequence = cache.open(prompt(8, seed=1))
    assert cache.reserve([sequence], [8]) is not None
    assert [(event.kind, event.cache_priority) for event in cache.take_events()] == [("removed", 0)]
    cache.commit(sequence, 8)
    assert [(event.kind, event.cache_priority) for event in cache.take_events()] == [("stored", 1)] * 2
    cache.close(sequence)
    cache.drop(prompt(4)[:1])
    assert [(event.kind, event.cache_priority) for event in cache.take_events()] == [("removed", 2)]
    cache.record_events(False)
    cache.record_events(True)
    assert [event.cache_priority for event in cache.take_events()][1:] == [1, 1]


def test_a_block_that_fills_up_in_decoding_is_stored_once(backend: str) -> None:
    cache = make(backend)
    cache.record_events(True)
    sequence = compute(cache, prompt(3))
    assert len(told(cache)) == 1
    for token in range(3):
        sequence.append([token])
        cache.reserve([sequence], [1])
        cache.commit(sequence, 4 + token)
    events = list(cache.take_events())
    assert [event.kind for event in events] == ["stored"]
    assert events[0].tokens.tolist() == [*prompt(3), 0]


def test_events_are_counted_until_they_are_taken(backend: str) -> None:
    cache = make(backend)
    assert cache.num_events == 0
    cache.record_events(True)
    assert cache.num_events == 1  # cleared
    store(cache, prompt(10))
    assert cache.num_events == 3 == len(cache.take_events())
    assert cache.num_events == 0


def test_content_computed_twice_is_stored_once(backend: str) -> None:
    cache = make(backend)
    cache.record_events(True)
    sequences = [cache.open(prompt(8)), cache.open(prompt(8))]
    cache.reserve(sequences, [8, 8])
    for sequence in sequences:
        cache.commit(sequence, 8)
    assert [kind for kind, *_ in told(cache)] == ["cleared", "stored", "stored"]


def test_blocks_of_one_group_come_and_go(backend: str) -> None:
    cache = make(backend, FULL, Span("window", 4), num_blocks=10)
    cache.record_events(True)
    store(cache, prompt(16))
    node_ids = [event.node_id for event in cache.take_events() if event.kind == "stored"]
    tree = cache.tree()
    block_ids = dict(zip(tree.node_ids.tolist(), tree.block_ids.tolist(), strict=True))
    # The window's blocks were let go of first; then the last block goes, with both of its own.
    store(cache, prompt(12, seed=1))
    removed = [event for event in cache.take_events() if event.kind == "removed"]
    assert [(event.node_id, event.block_ids) for event in removed] == [
        (node_ids[2], (-1, block_ids[node_ids[2]][1])),
        (node_ids[1], (-1, block_ids[node_ids[1]][1])),
        (node_ids[0], (-1, block_ids[node_ids[0]][1])),
        (node_ids[3], tuple(block_ids[node_ids[3]])),
    ]
    # Who computes the first block again fills the hole of its node.
    store(cache, prompt(4))
    (stored,) = [event for event in cache.take_events() if event.kind == "stored"]
    assert stored.node_id == node_ids[0]
    assert stored.block_ids[0] == -1
    assert stored.block_ids[1] >= 0
    cache.check()


def test_reset_resize_and_drop_are_told(backend: str) -> None:
    cache = make(backend, num_blocks=4)
    cache.record_events(True)
    store(cache, prompt(16))
    ids = [event.node_id for event in cache.take_events()][1:]
    cache.resize(3)
    cache.drop(prompt(16)[:9])
    events = list(cache.take_events())
    assert [(event.kind, event.node_id, event.reason) for event in events] == [
        ("removed", ids[3], "forgotten"),
        ("removed", ids[2], "forgotten"),
    ]
    cache.reset()
    assert told(cache) == [("cleared", -1, -1, (-1,))]


def test_turned_on_late_the_events_begin_with_what_is_there(backend: str) -> None:
    cache = make(backend)
    store(cache, prompt(10), namespace=b"b")
    store(cache, prompt(4, seed=1), namespace=b"a")
    cache.record_events(True)
    events = list(cache.take_events())
    assert [(event.kind, event.namespace) for event in events] == [
        ("cleared", None),
        ("stored", b"a"),
        ("stored", b"b"),
        ("stored", b"b"),
    ]
    cache.record_events(True)
    assert not told(cache)
    cache.record_events(False)
    store(cache, prompt(4, seed=2))
    assert not told(cache)
    cache.record_events(True)
    assert [event.kind for event in cache.take_events()] == ["cleared"] + 4 * ["stored"]


def test_a_node_id_is_never_used_twice(backend: str) -> None:
    cache = make(backend, num_blocks=2)
    cache.record_events(True)
    seen: set[int] = set()
    for seed in range(10):
        store(cache, prompt(8, seed=seed))
        if seed == 5:
            cache.reset()
        new = {event.node_id for event in cache.take_events() if event.kind == "stored"}
        assert not new & seen
        seen |= new


# Explain


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 8, 11, 12])
def test_explain_goes_as_far_as_the_content(backend: str, length: int) -> None:
    cache = make(backend)
    store(cache, prompt(10))
    tokens = [*prompt(10)[:length], *([7, 7] if length <= 10 else [])]  # all of it, from 11 on
    found = cache.explain(tokens)
    assert found.num_hit_tokens == cache.match(tokens).num_tokens
    assert found.num_common_tokens == min(length, 10)
    begin = length // 4 * 4
    nearest = prompt(10)[begin : begin + 4].tolist() if length <= 10 else []
    assert found.nearest_block.tolist() == nearest


def test_explain_sees_the_last_token_and_what_was_evicted(backend: str) -> None:
    cache = make(backend, FULL, Span("window", 4), num_blocks=10)
    store(cache, prompt(16))
    found = cache.explain(prompt(16))
    assert (found.num_hit_tokens, found.num_common_tokens) == (15, 16)
    assert len(found.nearest_block) == 0
    store(cache, prompt(12, seed=1))
    # Blocks of the window are gone at the start; nodes are there.
    found = cache.explain([*prompt(4), 9, 9])
    assert (found.num_hit_tokens, found.num_common_tokens) == (0, 4)


def test_explain_knows_namespaces_and_keys(backend: str) -> None:
    cache = make(backend)
    store(cache, prompt(8), namespace=b"a", extra_keys={2: b"cat"})
    assert cache.explain(prompt(8)).num_common_tokens == 0
    assert len(cache.explain(prompt(8)).nearest_block) == 0
    found = cache.explain(prompt(8), namespace=b"a", extra_keys={2: b"dog"})
    assert found.num_common_tokens == 2
    assert found.nearest_block.tolist() == prompt(8)[:4].tolist()


# The tree


def test_the_tree_as_arrays(backend: str) -> None:
    cache = make(backend)
    held = compute(cache, prompt(8, seed=1), owner_id=2)
    store(cache, [*prompt(8, seed=1), 5, 6], namespace=b"z", cache_priority=2)
    cache.fork(held)
    tree = cache.tree()
    assert tree.namespaces == [b"", b"z"]
    assert tree.namespace_index.tolist() == [0, 1, 0, 1, 1]
    assert tree.depths.tolist() == [1, 1, 2, 2, 3]
    assert tree.num_tokens.tolist() == [4, 4, 4, 4, 2]
    assert tree.parent_ids.tolist() == [-1, -1, 0, 1, 3]
    assert tree.node_ids.tolist() == [0, 1, 2, 3, 4]
    assert tree.num_references.ravel().tolist() == [2, 0, 2, 0, 0]
    assert tree.owner_ids.ravel().tolist() == [2, 0, 2, 0, 0]
    assert tree.cache_priorities.ravel().tolist() == [1, 2, 1, 2, 2]
    held_state, cached = STATES.index("held"), STATES.index("cached")
    assert tree.states.ravel().tolist() == [held_state, cached, held_state, cached, cached]
    assert tree.block_ids.ravel().tolist() == [0, 2, 1, 3, 4]


def test_without_prefix_caching_there_is_nothing_to_tell(backend: str) -> None:
    cache = make(backend, prefix_caching=False)
    cache.record_events(True)
    store(cache, prompt(12), owner_id=1)
    assert [event.kind for event in cache.take_events()] == ["cleared"]
    assert len(cache.tree()) == 0
    assert cache.namespaces() == []
    assert cache.drop([]) == (0, 0)
    assert cache.explain(prompt(12)).num_common_tokens == 0
    assert np.array_equal(cache.tree().block_ids, np.empty((0, 1)))
