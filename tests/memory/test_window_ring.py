"""Mirror rings: a row of a windowed layer wraps round, and any window of it is contiguous in memory."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from support.faulty_calls import FaultyCalls
from support.sequences_case import NAN, Sequences

from quire import Cache
from quire.attention import AttentionOptions, attention_batch, reference_attention
from quire.errors import ArgumentError, CapacityError, InvariantError
from quire.memory import VirtualStorage
from quire.memory.placement import MemfdBackend, unsupported_reason
from quire.memory.virtual.window_ring import WindowRing
from quire.spec import KVSpec, LayerSpec, Span

if (_reason := unsupported_reason()) is not None:
    pytest.skip(f"no virtual storage here: {_reason}", allow_module_level=True)

FULL, WINDOW, CHUNKED = Span(), Span("window", 10), Span("chunked", 12)
# A token is 1 KiB of keys and of values: blocks of 4 tokens are one page each.
SLIDING = KVSpec(layers=(LayerSpec(WINDOW, 2, 128, 128),), dtype="float32")
# Two windows, chunks and rows that keep all, keys and values of unequal width, a layer without its own.
MIXED = KVSpec(
    layers=(
        LayerSpec(WINDOW, 2, 256, 512),
        LayerSpec(FULL, 4, 512, 256),
        LayerSpec(WINDOW, 2, 256, 512),
        LayerSpec(CHUNKED, 2, 256, 512),
        LayerSpec(WINDOW, 2, 256, 512),
        LayerSpec(WINDOW, 2, 256, 512, shares_kv_with=0),
        LayerSpec(Span("window", 3), 2, 512, 256),
    ),
    dtype="bfloat16",
)


def make(spec: KVSpec, num_blocks: int, **options: Any) -> tuple[Cache, VirtualStorage]:
    options = {
        "max_model_len": 200,
        "max_num_seqs": 5,
        "max_blocks": num_blocks,
        "step_tokens": 9,
        **options,
    }
    prefix_caching = options.pop("prefix_caching", False)
    storage = VirtualStorage(spec, num_blocks, 4, **options)
    return Cache(spec, num_blocks=num_blocks, block_size=4, prefix_caching=prefix_caching), storage


def rings(storage: VirtualStorage) -> list[WindowRing]:
    return [places for places in storage._places if isinstance(places, WindowRing)]


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("spec", [SLIDING, MIXED])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.ci)])
def test_rings_hold_what_a_recompute_would_write(spec: KVSpec, prefix_caching: bool, seed: int) -> None:
    """Many laps, chunks, lookahead, forks, rewinds, blocks given back, rows adopted; with a prefix cache hits too."""
    rng = random.Random(seed)
    cache, storage = make(spec, 45 * len(spec.groups), prefix_caching=prefix_caching)
    assert len(rings(storage)) == sum(group.span.kind != "full" for group in spec.groups)
    storage.fill(NAN)
    work = Sequences(cache, storage)
    prompt = [rng.randrange(3) for _ in range(60)]
    longest = 0
    for _ in range(150):
        choice = rng.random()
        if choice < 0.1 and len(work.open) < 5:
            work.open.append(cache.open([*prompt[: rng.randrange(1, 60)], rng.randrange(4)]))
        elif choice < 0.12 and work.open:
            work.close(rng.choice(work.open))
        elif choice < 0.16 and work.open and len(work.open) < 5:
            parent = rng.choice(work.open)
            if parent.num_computed_tokens == parent.num_tokens:
                parent.append([rng.randrange(4)])
            work.open.append(cache.fork(parent))
        elif choice < 0.2 and work.open:
            sequence = rng.choice(work.open)
            cache.rewind(sequence, rng.randrange(max(1, sequence.num_tokens - 9), sequence.num_tokens + 1))
            sequence.append([rng.randrange(4)])
        elif choice < 0.22:
            held = {
                block_id
                for sequence in work.open
                for group in range(len(spec.groups))
                for block_id in sequence.block_table(group).tolist()
            }
            if not prefix_caching:
                storage.give_back(
                    [block_id for block_id in range(storage.num_blocks) if block_id not in held]
                )
        elif work.open:
            some = rng.sample(work.open, rng.randrange(1, len(work.open) + 1))
            some = [sequence for sequence in some if sequence.num_tokens < 180]
            for sequence in some:
                if sequence.num_computed_tokens == sequence.num_tokens:
                    sequence.append([rng.randrange(4) for _ in range(rng.randrange(1, 8))])
            num_new = [min(7, rng.randrange(1, s.num_tokens - s.num_computed_tokens + 1)) for s in some]
            if some and work.step(some, num_new, lookahead=rng.randrange(3)):
                work.check_rows(some)
                longest = max(longest, *(sequence.num_tokens for sequence in some))
        storage.check()
        cache.check()
    assert longest > 60  # several laps
    storage.close()


def test_a_window_is_one_tensor_for_an_unmodified_kernel() -> None:
    """torch's own attention on the plain view of a stretch, at every lap, against the reference on the table."""
    cache, storage = make(SLIDING, 16, step_tokens=5)
    (ring,) = rings(storage)
    storage.fill(NAN)
    other, sequence = cache.open([3]), cache.open(list(range(180)))
    storage.prepare(cache.reserve([other], [1]), np.array([other.id]))  # the ring is not the first
    rng = torch.Generator().manual_seed(1)
    view, laps = storage.view(0), set()
    for start in range(0, 180, 5):
        stop = start + 5
        plan = cache.reserve([sequence], [5])
        ((block_tables, slot_mapping),) = storage.prepare(plan, np.array([sequence.id]))
        k, v, query = (torch.randn(5, heads, 128, generator=rng) for heads in (2, 2, 4))
        reference_attention.write(view, k, v, torch.from_numpy(slot_mapping))
        first = max(0, start - 9)
        entry = int(block_tables[0, 0])
        laps.add(entry)
        keys, values = view.k[entry, :, first:stop], view.v[entry, :, first:stop]
        assert keys.transpose(0, 1).is_contiguous()
        rows, columns = torch.arange(start, stop)[:, None], torch.arange(first, stop)
        got = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=(columns <= rows) & (rows - columns < 10),
            enable_gqa=True,
        )
        attention = attention_batch(plan.query_start, plan.context_lengths, block_tables, view.block_size)
        want = reference_attention.run(view, query, attention, AttentionOptions(scale=128**-0.5, window=10))
        torch.testing.assert_close(got[0].transpose(0, 1), want)
        cache.commit(sequence, stop)
    assert len(laps) == -(-180 // ring.ring_tokens)
    storage.close()


def test_a_byte_is_reached_at_two_addresses() -> None:
    cache, storage = make(SLIDING, 16)
    (ring,) = rings(storage)
    sequence = cache.open([1, 2, 3])
    ((block_tables, _),) = storage.prepare(cache.reserve([sequence], [3]), np.array([sequence.id]))
    keys = storage.view(0).k[int(block_tables[0, 0])]
    keys[1, 2, 7] = 1234.0
    assert float(keys[1, 2 + ring.ring_tokens, 7]) == 1234.0
    storage.close()


def test_memory_and_addresses_are_those_of_the_window() -> None:
    """64 Ki tokens: what is committed, mapped and reserved stays; the addresses of a plain row grow with the length."""
    length, options = 1 << 16, {"max_num_seqs": 64, "step_tokens": 2048}
    cache, storage = make(SLIDING, 2000, max_model_len=length, **options)
    (ring,) = rings(storage)
    sequence = cache.open(np.arange(length) % 7)
    seen, taken = [], []
    for start in range(0, length, 2048):
        storage.prepare(cache.reserve([sequence], [2048]), np.array([sequence.id]))
        cache.commit(sequence, start + 2048)
        seen.append((ring.range.num_mapped, storage.num_mappings))
        taken.append(storage.bytes_committed)
    # The first step fills its part, from the second on it is a ring.
    assert {mapped for mapped, _ in seen[3:]} == {2 * ring.ring_blocks}
    assert max(mappings for _, mappings in seen) <= 2 + 2 * (2 * ring.ring_blocks + 1)
    assert max(taken) <= (ring.ring_blocks + 1) * storage.block_bytes
    twice = 2 * ring.ring_tokens * 64 * 2 * 1024  # of 64 rings, keys and values
    margins = 2 * ring.num_laps * ring.ring_tokens * 1024
    assert 0 <= storage.bytes_reserved - twice - margins < 2 * (2 << 20)  # both rounded up to huge pages
    _, plain = make(SLIDING, 2000, max_model_len=length, **{**options, "step_tokens": None})
    assert plain.bytes_reserved == length * 64 * 2 * 1024
    assert storage.bytes_reserved < plain.bytes_reserved * 0.1
    plain.close()
    storage.close()


@pytest.mark.parametrize("every", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
def test_a_failing_prepare_leaves_the_rings_of_others_alone(every: int) -> None:
    """Sequence a goes on into its second lap where b begins; every n-th call fails."""
    calls = FaultyCalls()
    cache, storage = make(MIXED, 120, backend=MemfdBackend(calls))
    work = Sequences(cache, storage)
    a = cache.open(list(range(64)))
    for _ in range(9):
        assert work.step([a], [7])
    before = [(places.range.entries.copy(), places.range.num_mappings) for places in storage._places]
    b = cache.open(list(range(50, 57)))
    a.append([5] * 6)
    plan = cache.reserve([a, b], [7, 7])
    calls.arm(every)
    failed = False
    try:
        storage.prepare(plan, np.array([a.id, b.id]))
    except CapacityError:
        failed = True
    calls.arm(0)
    assert failed
    assert storage.row_of(b.id) is None
    for places, (entries, mappings) in zip(storage._places, before, strict=True):
        assert np.array_equal(places.range.entries, entries)
        assert places.range.num_mappings == mappings
    storage.check()
    work.check_rows([a])
    assert work.step([a, b], [7, 7])
    work.check_rows([a, b])
    storage.close()


def test_a_step_longer_than_the_ring_is_refused_and_nothing_is_kept() -> None:
    cache, storage = make(SLIDING, 40)
    sequence = cache.open(list(range(100)))
    plan = cache.reserve([sequence], [40])
    with pytest.raises(
        ArgumentError, match=r"at most 6 blocks of 4 tokens at once, .* got 10; raise step_tokens"
    ):
        storage.prepare(plan, np.array([sequence.id]))
    assert storage.row_of(sequence.id) is None
    storage.check()
    storage.close()


def test_rows_shorter_than_a_ring_and_its_mirror_stay_rows() -> None:
    _, storage = make(SLIDING, 40, max_model_len=48)
    assert rings(storage) == []
    assert storage.bytes_reserved == 48 * 5 * 2 * 1024
    storage.close()
    _, storage = make(SLIDING, 40, max_model_len=49)
    assert len(rings(storage)) == 1
    storage.close()
    with pytest.raises(ArgumentError, match="step_tokens of at least 1, got 0"):
        make(SLIDING, 40, step_tokens=0)


def test_a_mirror_that_differs_is_found() -> None:
    cache, storage = make(SLIDING, 16)
    (ring,) = rings(storage)
    sequence = cache.open([1, 2, 3])
    storage.prepare(cache.reserve([sequence], [3]), np.array([sequence.id]))
    storage._heap.map([(ring.range, [ring.ring_blocks], [-1])])
    with pytest.raises(InvariantError, match="W2: the ring of row 0"):
        storage.check()
    storage.close()
