"""Groups with several blocks to a node of the prefix tree: sharing, copies, windows and reports (the laws draw them
too)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.cache_case import BACKENDS, FULL, advance, compute, prompt, spec_of, store

from quire import Cache
from quire.cache.event_dispatcher import EventDispatcher
from quire.errors import ArgumentError
from quire.observe.kv_events import BlockRemoved, BlockStored, EventBatch, KVEventSubscribers
from quire.observe.tree_mirror import TreeMirror
from quire.spec import Span

SPEC = spec_of(FULL, Span("window", 8), blocks_per_node=(1, 4))  # blocks of 16 and of 4 tokens, nodes of 16
BOTH_FULL = spec_of(FULL, FULL, blocks_per_node=(1, 4))


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def test_a_sequence_takes_blocks_as_its_tokens_need_them(backend: str) -> None:
    cache = Cache(BOTH_FULL, num_blocks=40, block_size=4, backend=backend)
    assert (cache.block_size, cache.node_tokens) == (4, 16)
    sequence = compute(cache, prompt(18))
    assert [len(sequence.block_table(group)) for group in (0, 1)] == [2, 5]
    assert cache.num_blocks_for(18) == cache.stats()["held"] == 7
    sequence.append([1] * 3)
    plan = advance(cache, sequence)
    assert [len(sequence.block_table(group)) for group in (0, 1)] == [2, 6]
    slots = [plan.group(group).slot_mapping for group in (0, 1)]
    for group, size in enumerate((16, 4)):
        table = sequence.block_table(group)
        assert slots[group].tolist() == [int(table[p // size]) * size + p % size for p in (18, 19, 20)]


def test_a_branch_within_a_node_copies_what_it_shares_of_it(backend: str) -> None:
    cache = Cache(BOTH_FULL, num_blocks=40, block_size=4, backend=backend)
    tokens = prompt(32)
    store(cache, tokens)
    other = np.append(tokens[:26], prompt(6, seed=5))
    sequence = cache.open(other)
    assert sequence.num_cached_tokens == 26
    plan = cache.reserve([sequence], [6])
    assert plan is not None
    assert plan.group(0).copies[:, 2].tolist() == [10]
    assert plan.group(1).copies[:, 2].tolist() == [4, 4, 2]
    cache.commit(sequence, 32)
    cache.check()
    assert cache.match(np.append(other, 0)).num_tokens == cache.match(np.append(tokens, 0)).num_tokens == 32


def test_a_hit_ends_where_small_blocks_are_left(backend: str) -> None:
    """A node has lost its last blocks; what a sequence holds of it is found on."""
    cache = Cache(BOTH_FULL, num_blocks=12, block_size=4, backend=backend)
    tokens = prompt(16)
    store(cache, tokens)
    holder = cache.open(tokens[:11])  # holds three of the four small blocks
    assert holder.num_cached_tokens == 10
    other = cache.open(prompt(24, seed=1))
    plan = cache.reserve([other], [24])  # 8 of the 7 free
    assert plan is not None
    cache.check()
    assert cache.stats()["evicted_blocks"] == 1
    assert cache.match(np.append(tokens, 0)).num_tokens == 12


def test_a_node_that_is_too_large_is_refused() -> None:
    with pytest.raises(ArgumentError, match="block_size of at most 2047"):
        Cache(BOTH_FULL, num_blocks=4, block_size=2048)


def test_events_keep_the_block_size_that_was_asked_for(backend: str) -> None:
    """Whoever routes by blocks of 4 tokens sees the hashes of a cache whose blocks all have 4."""
    tokens = prompt(40)
    keys = {5: b"cat", 17: b"dog"}

    def told(spec: object) -> list[EventBatch]:
        cache = Cache(spec, num_blocks=24, block_size=4, backend=backend)  # type: ignore[arg-type]
        mirror, batches = TreeMirror(cache), []
        feed = EventDispatcher(cache)
        feed.listen(mirror.apply)
        KVEventSubscribers(mirror, lambda: 0.0).add(batches.append)
        store(cache, tokens, extra_keys=keys)
        feed.collect()
        assert mirror.path(mirror.hashes(b"", tokens, keys)) == list(mirror.by_id.values())
        cache.drop([])
        feed.collect()
        return batches

    stored, uniform = (
        [event for batch in told(spec) for event in batch.events if isinstance(event, BlockStored)]
        for spec in (BOTH_FULL, spec_of(FULL))
    )
    assert sum(len(event.block_hashes) for event in stored) == 8  # of two whole nodes

    def of(events: list[BlockStored], index: int) -> list[Any]:
        return [one for event in events for one in (event.block_hashes, event.extra_keys)[index]][:8]

    assert {event.block_size for event in stored} == {4}
    assert of(stored, 0) == of(uniform, 0)
    assert of(stored, 1) == of(uniform, 1)
    assert stored[0].token_ids[:16] == tuple(tokens[:16].tolist())
    removed = [
        event for batch in told(BOTH_FULL) for event in batch.events if isinstance(event, BlockRemoved)
    ]
    assert [one for event in removed for one in event.block_hashes] == of(stored, 0)[::-1]
