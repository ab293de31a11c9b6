"""The virtual storage: rows lead to their sequences' blocks after any operation of the cache."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.faulty_calls import FaultyCalls
from support.sequences_case import NAN, Sequences
from support.simulated_heap import SimulatedBackend

from quire import Cache
from quire.attention import AttentionOptions, attention_batch, reference_attention
from quire.errors import ArgumentError, BackendError, CapacityError
from quire.memory import VirtualStorage
from quire.memory.placement import MappingBudget, MemfdBackend, unsupported_reason
from quire.memory.virtual import virtual_storage as virtual_module
from quire.memory.virtual.virtual_storage import virtual_block_size
from quire.spec import KVSpec, LayerSpec, Span

if (_reason := unsupported_reason()) is not None:
    pytest.skip(f"no virtual storage here: {_reason}", allow_module_level=True)

FULL, WINDOW = Span(), Span("window", 10)
# A token is 1 KiB of keys and of values: blocks of 4 tokens are one page each.
UNIFORM = KVSpec.uniform(num_layers=3, num_kv_heads=2, head_dim=128, dtype="float32")
# Three groups of unequal shape and number of layers, keys and values of unequal width, a layer without its own.
MIXED = KVSpec(
    layers=(
        LayerSpec(WINDOW, 2, 256, 512),
        LayerSpec(FULL, 4, 512, 256),
        LayerSpec(WINDOW, 2, 256, 512),
        LayerSpec(WINDOW, 2, 256, 512),
        LayerSpec(FULL, 4, 512, 256, shares_kv_with=1),
        LayerSpec(FULL, 4, 512, 256),
    ),
    dtype="bfloat16",
)


def make(spec: KVSpec, num_blocks: int, block_size: int = 4, **options: Any) -> tuple[Cache, VirtualStorage]:
    options = {"max_model_len": 64, "max_num_seqs": 6, "max_blocks": num_blocks, **options}
    of_cache = {
        "prefix_caching": options.pop("prefix_caching", True),
        "run_blocks": options.pop("run_blocks", 1),
    }
    storage = VirtualStorage(spec, num_blocks, block_size, **options)
    return Cache(spec, num_blocks=num_blocks, block_size=block_size, **of_cache), storage


def rows(storage: VirtualStorage, sequences: list[Any]) -> list[int]:
    found = [storage.row_of(sequence.id) for sequence in sequences]
    assert len(set(found)) == len(found)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("spec", "prefix_caching"), [(UNIFORM, True), (UNIFORM, False), (MIXED, True), (MIXED, False)]
)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.ci) for seed in (1, 2))])
def test_rows_hold_what_a_recompute_would_write(spec: KVSpec, prefix_caching: bool, seed: int) -> None:
    """Prefix hits, partial blocks copied, blocks replaced at commit, forks, rewinds, evictions, rows adopted."""
    rng = random.Random(seed)
    cache, storage = make(spec, 40 * len(spec.groups), prefix_caching=prefix_caching)
    storage.fill(NAN)
    work = Sequences(cache, storage)
    prompts = [[rng.randrange(3) for _ in range(rng.randrange(5, 30))] for _ in range(3)]
    for _ in range(120):
        choice = rng.random()
        if choice < 0.3 and len(work.open) < 6:
            prompt = rng.choice(prompts)
            work.open.append(cache.open([*prompt[: rng.randrange(2, len(prompt))], rng.randrange(4)]))
        elif choice < 0.4 and work.open:
            work.close(rng.choice(work.open))
        elif choice < 0.5 and work.open and len(work.open) < 6:
            parent = rng.choice(work.open)
            if parent.num_computed_tokens == parent.num_tokens:
                parent.append([rng.randrange(4)])
            work.open.append(cache.fork(parent))
        elif choice < 0.55 and work.open:
            sequence = rng.choice(work.open)
            cache.rewind(sequence, rng.randrange(1, sequence.num_tokens + 1))
            sequence.append([rng.randrange(4)])
        elif work.open:
            some = rng.sample(work.open, rng.randrange(1, len(work.open) + 1))
            for sequence in some:
                if sequence.num_computed_tokens == sequence.num_tokens:
                    sequence.append([rng.randrange(4) for _ in range(rng.randrange(1, 4))])
            some = [sequence for sequence in some if sequence.num_tokens < 50]
            num_new = [rng.randrange(1, s.num_tokens - s.num_computed_tokens + 1) for s in some]
            if some and work.step(some, num_new, lookahead=rng.randrange(3)):
                work.check_rows(some, rows(storage, some))
        storage.check()
        cache.check()
    assert cache.stats()["copied_blocks"] > 0
    assert not prefix_caching or cache.stats()["hit_tokens"] > 0
    storage.close()


def test_sequences_that_grow_in_turn_cost_two_mappings_a_layer_buffer() -> None:
    seen = {}
    for run_blocks in (1, 8):
        cache, storage = make(UNIFORM, 48, run_blocks=run_blocks)
        work = Sequences(cache, storage)
        some = [cache.open([index]) for index in range(4)]
        for _ in range(31):
            assert work.step(some, [1] * 4)
            for sequence in some:
                sequence.append([5])
        work.check_rows(some, rows(storage, some))
        layer_buffers = sum(size > 0 for size in storage._ranges[0].piece_bytes)
        seen[run_blocks] = (storage.num_mappings - 2) / layer_buffers  # less the heap's and the range's own
        storage.close()
    assert seen[8] <= 2 * 4
    assert seen[1] >= 8 * 4  # eight blocks each, all apart


def test_the_cache_s_runs_make_huge_pages_of_the_storage_s_pieces() -> None:
    spec = KVSpec.uniform(num_layers=1, num_kv_heads=8, head_dim=128)
    storage = VirtualStorage(spec, 96, 32, max_model_len=1025, max_num_seqs=2)
    assert (storage.run_blocks, storage.row_tokens) == (32, 2048)
    cache = Cache(spec, num_blocks=96, block_size=32, run_blocks=storage.run_blocks)
    short, long = cache.open([1]), cache.open(np.arange(1025))
    storage.prepare(cache.reserve([short, long], [1, 1025]), np.array([short.id, long.id]))
    table = long.block_table(0)
    assert table[:32].tolist() == list(range(32, 64))
    row = storage.row_of(long.id)
    assert row is not None
    led = storage._ranges[0].block_ids(row * 64, row * 64 + 33)
    assert led.tolist() == table.tolist()
    assert ((np.arange(33) - table) % 32 == 0).all()
    assert storage.bytes_committed == 34 * storage.block_bytes
    assert storage._heap._files.is_huge[0][1] == storage._heap._files.is_huge[1][1]
    storage.close()


def test_a_prefix_is_shared_by_mapping_it_twice() -> None:
    cache, storage = make(UNIFORM, 16)
    work = Sequences(cache, storage)
    a = cache.open(list(range(20)))
    assert work.step([a], [20])
    committed = storage.bytes_committed
    b = cache.open([*range(16), 99, 98])
    assert b.num_cached_tokens == 16
    assert work.step([b], [2])
    work.check_rows([a, b], rows(storage, [a, b]))
    assert storage.bytes_committed == committed + storage.block_bytes
    # One byte, two addresses.
    row_a, row_b = rows(storage, [a, b])
    view = storage.view(1)
    view.k[row_a, 0, 3, 5] = 1234.0
    assert float(view.k[row_b, 0, 3, 5]) == 1234.0
    assert float(view.k[row_b, 0, 16, 5]) != float(view.k[row_a, 0, 16, 5])
    storage.close()


def test_a_row_that_was_left_is_adopted_still_mapped() -> None:
    calls = FaultyCalls()
    cache, storage = make(UNIFORM, 32, backend=MemfdBackend(calls))
    work = Sequences(cache, storage)
    a = cache.open(list(range(22)))
    work.open.append(a)
    assert work.step([a], [22])
    row = storage.row_of(a.id)
    work.close(a)
    b = cache.open([*range(20), 77, 78])
    calls.arm(10**9)  # counts calls
    assert work.step([b], [b.num_tokens - b.num_cached_tokens])
    assert storage.row_of(b.id) == row
    assert (
        calls.count == 6 * 3
    )  # the sixth block alone: memory, a mapping and advice in each of six layer buffers
    work.check_rows([b], [row])  # type: ignore[list-item]
    storage.close()


def test_the_plain_tensor_of_a_row_serves_an_unmodified_kernel() -> None:
    """torch's own attention on a view of a row, no table and no copy, against the paged reference."""
    cache, storage = make(UNIFORM, 16)
    storage.fill(NAN)
    sequence = cache.open(list(range(30)))
    plan = cache.reserve([sequence], [30])
    ((block_tables, slot_mapping),) = storage.prepare(plan, np.array([sequence.id]))
    rng = torch.Generator().manual_seed(1)
    k, v, query = (torch.randn(30, heads, 128, generator=rng) for heads in (2, 2, 4))
    view = storage.view(2)
    reference_attention.write(view, k, v, torch.from_numpy(slot_mapping))
    row = storage.row_of(sequence.id)
    keys, values = view.k[row, :, :30], view.v[row, :, :30]
    assert keys.transpose(0, 1).is_contiguous()
    assert keys.data_ptr() == view.k.data_ptr() + row * view.k.stride(0) * 4  # type: ignore[operator]
    got = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None], keys[None], values[None], is_causal=True, enable_gqa=True
    )
    attention = attention_batch(plan.query_start, plan.context_lengths, block_tables, view.block_size)
    want = reference_attention.run(view, query, attention, AttentionOptions(scale=128**-0.5))
    torch.testing.assert_close(got[0].transpose(0, 1), want)
    storage.close()


def test_opening_a_long_sequence_commits_only_its_tokens() -> None:
    spec = KVSpec.uniform(num_layers=4, num_kv_heads=8, head_dim=128)
    storage = VirtualStorage(spec, 2048, virtual_block_size(spec), max_model_len=40960, max_num_seqs=256)
    assert (storage.block_size, storage.block_bytes) == (32, 8 * 65536)
    cache = Cache(spec, num_blocks=storage.num_blocks, block_size=32)
    assert storage.bytes_committed == 0
    sequence = cache.open(list(range(100)))
    storage.prepare(cache.reserve([sequence], [100]), np.array([sequence.id]))
    assert storage.bytes_committed == 4 * storage.block_bytes
    assert storage.view(0).k.shape == (256, 8, 40960, 128)
    storage.close()


def test_memory_goes_back_when_blocks_are_given_up() -> None:
    cache, storage = make(MIXED, 99, prefix_caching=False)
    work = Sequences(cache, storage)
    sequences = [cache.open([7 * i + j for j in range(30)]) for i in range(4)]
    work.open += sequences
    assert work.step(sequences, [30] * 4)
    full = storage.bytes_committed
    for sequence in sequences[1:]:
        work.close(sequence)
    storage.forget(np.array(work.closed))
    kept = {int(u) for group in range(len(MIXED.groups)) for u in sequences[0].block_table(group) if u >= 0}
    storage.give_back([block_id for block_id in range(99) if block_id not in kept])
    assert storage.bytes_committed < full * 0.3
    work.check_rows(sequences[:1], rows(storage, sequences[:1]))
    storage.check()
    # They may be used again.
    again = cache.open([5] * 30)
    sequences[0].append([1])
    assert work.step([again, sequences[0]], [30, 1])
    work.check_rows([again, sequences[0]], rows(storage, [again, sequences[0]]))
    cache.close(again)
    cache.close(sequences[0])
    storage.forget(np.array([again.id, sequences[0].id]))
    storage.give_back(np.arange(99))
    assert storage.bytes_committed == 0
    with pytest.raises(ArgumentError, match="blocks of 0 to 98"):
        storage.give_back([99])
    storage.close()


def test_what_is_given_back_leaves_the_process() -> None:
    def pss_bytes() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))

    cache, storage = make(UNIFORM, 110, 64, prefix_caching=False, max_model_len=3500)
    sequences = [cache.open(list(range(3400))) for _ in range(2)]
    ids = np.array([sequence.id for sequence in sequences])
    before = pss_bytes()
    storage.prepare(cache.reserve(sequences, [3400, 3400]), ids)
    full, busy = storage.bytes_committed, pss_bytes()
    assert full == 108 * storage.block_bytes
    assert busy - before >= 0.95 * full
    for sequence in sequences:
        cache.close(sequence)
    storage.forget(ids)
    storage.give_back(np.arange(110))
    assert storage.bytes_committed == 0
    assert busy - pss_bytes() >= 0.95 * full
    storage.close()


def test_resize() -> None:
    cache, storage = make(UNIFORM, 8, max_blocks=24)
    sequence = cache.open(list(range(20)))
    work = Sequences(cache, storage)
    assert work.step([sequence], [20])
    storage.resize(24)
    assert storage.num_blocks == 24
    storage.resize(8)
    work.check_rows([sequence], rows(storage, [sequence]))
    with pytest.raises(CapacityError, match="cannot grow the KV storage to 25 blocks"):
        storage.resize(25)
    with pytest.raises(ArgumentError, match="at least 1 block"):
        storage.resize(0)
    storage.close()


def test_blocks_behind_a_window_are_unmapped() -> None:
    spec = KVSpec(layers=(LayerSpec(WINDOW, 2, 128, 128),), dtype="float32")
    cache, storage = make(spec, 16)
    work = Sequences(cache, storage)
    sequence = cache.open([1])
    for token in range(40):
        assert work.step([sequence], [1])
        sequence.append([token])
    block_ids = (
        storage._ranges[0].block_ids()[: storage.row_tokens // 4]
        if storage.row_of(sequence.id) == 0
        else None
    )
    assert block_ids is not None
    assert (block_ids[:6] == -1).all()
    assert (block_ids[8:10] >= 0).all()
    storage.close()


@pytest.mark.parametrize("every", [1, 2, 3, 5, 8, 13, 21, 34])
def test_a_failing_prepare_leaves_the_rows_of_others_alone(every: int) -> None:
    calls = FaultyCalls()
    cache, storage = make(MIXED, 60, backend=MemfdBackend(calls))
    work = Sequences(cache, storage)
    a = cache.open(list(range(18)))
    assert work.step([a], [18])
    row, mappings = storage.row_of(a.id), storage.num_mappings
    b = cache.open([*range(16), *range(50, 62)])
    a.append([5])
    new = [1, b.num_tokens - b.num_computed_tokens]
    plan = cache.reserve([a, b], new)
    calls.arm(every)
    failed = False
    try:
        storage.prepare(plan, np.array([a.id, b.id]))
    except CapacityError:
        failed = True
    calls.arm(0)
    assert failed or every > 1
    if failed:
        assert storage.row_of(b.id) is None
        assert storage.num_mappings == mappings
    storage.check()
    work.check_rows([a], [row])  # type: ignore[list-item]
    assert work.step([a, b], new)
    work.check_rows([a, b], rows(storage, [a, b]))
    storage.close()


def test_parked_rows_make_way_when_mappings_run_out() -> None:
    budget = MappingBudget(60, "memory mappings")
    cache, storage = make(UNIFORM, 40, prefix_caching=False, backend=MemfdBackend(budget=budget))
    work = Sequences(cache, storage)
    rng = random.Random(0)
    for _ in range(12):
        sequence = cache.open([rng.randrange(9) for _ in range(rng.randrange(8, 40))])
        work.open.append(sequence)
        assert work.step([sequence], [sequence.num_tokens])
        work.check_rows([sequence], rows(storage, [sequence]))
        assert budget.used <= 60
        if len(work.open) == 2:
            work.close(work.open[0])
    storage.close()


def test_too_many_sequences_are_refused_and_nothing_is_kept() -> None:
    cache, storage = make(UNIFORM, 16, max_num_seqs=2)
    sequences = [cache.open([i]) for i in range(3)]
    plan = cache.reserve(sequences, [1, 1, 1])
    with pytest.raises(CapacityError, match="at most 2 sequences at once, got 3"):
        storage.prepare(plan, np.array([s.id for s in sequences]))
    assert [storage.row_of(s.id) for s in sequences] == [None] * 3
    storage.close()


@pytest.mark.parametrize(
    ("spec", "piece_bytes", "tokens"),
    [
        (KVSpec.uniform(num_layers=1, num_kv_heads=8, head_dim=128), 65536, 32),
        (KVSpec.uniform(num_layers=1, num_kv_heads=8, head_dim=128), 4096, 2),
        (KVSpec.uniform(num_layers=1, num_kv_heads=8, head_dim=128), 1 << 20, 512),
        (KVSpec.uniform(num_layers=1, num_kv_heads=8, head_dim=128), 2 << 20, 1024),
        (KVSpec.uniform(num_layers=1, num_kv_heads=3, head_dim=96), 65536, 64),  # 576 bytes: 9 pages
        (KVSpec.uniform(num_layers=1, num_kv_heads=3, head_dim=96), 4096, 64),
        (KVSpec.uniform(num_layers=1, num_kv_heads=5, head_dim=80, dtype="float32"), 65536, 64),  # 25 pages
        (KVSpec.uniform(num_layers=1, num_kv_heads=1, head_dim=33), 65536, 2048),  # 66 bytes: 33 pages
        (MIXED, 65536, 8),  # of the narrow layers, 32
    ],
)
def test_the_block_size_of_a_piece(spec: KVSpec, piece_bytes: int, tokens: int) -> None:
    assert virtual_block_size(spec, piece_bytes) == tokens
    storage = VirtualStorage(spec, 4, tokens, max_model_len=300, max_num_seqs=2, max_blocks=4)
    storage.close()


@pytest.mark.parametrize("piece_bytes", [0, 1024, 6000, 4 << 20])
def test_piece_sizes_that_cannot_be_are_refused(piece_bytes: int) -> None:
    with pytest.raises(ArgumentError, match=r"a piece size of 4096 bytes to 2MiB, .* got"):
        virtual_block_size(UNIFORM, piece_bytes)


def test_shapes_and_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"block size in multiples of 4, .* got 6"):
        VirtualStorage(UNIFORM, 4, 6, max_model_len=10, max_num_seqs=1)
    with pytest.raises(ArgumentError, match="within 3 tokens, got a shape that needs 4"):
        virtual_block_size(UNIFORM, max_tokens=3)
    with pytest.raises(ArgumentError, match="max_num_seqs of at least 1"):
        VirtualStorage(UNIFORM, 4, 4, max_model_len=10, max_num_seqs=0)
    with pytest.raises(ArgumentError, match="max_blocks of at least num_blocks=4"):
        VirtualStorage(UNIFORM, 4, 4, max_model_len=10, max_num_seqs=1, max_blocks=3)
    with pytest.raises(CapacityError, match="lower max_model_len or max_num_seqs"):
        VirtualStorage(UNIFORM, 4, 4, max_model_len=2**31, max_num_seqs=2**16)


def test_a_machine_that_cannot_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_module, "unsupported_reason", lambda: "no memfd")
    with pytest.raises(BackendError, match="does not work on this machine: no memfd; use storage paged"):
        VirtualStorage(UNIFORM, 4, 4, max_model_len=10, max_num_seqs=1)


def test_the_policy_on_a_device_of_two_mebibyte_pages() -> None:
    """Bookkeeping only: what a sequence of 3000 tokens, and one that shares its prompt, cost a slow device."""
    machine = SimulatedBackend(2 << 20, costs_us={"map": 37.5, "unmap": 26.0, "commit": 193.0})
    spec = KVSpec.uniform(num_layers=4, num_kv_heads=8, head_dim=128)
    options = {"max_model_len": 40960, "max_num_seqs": 4, "max_blocks": 64, "backend": machine}
    with pytest.raises(ArgumentError, match="block size in multiples of 1024"):
        VirtualStorage(spec, 64, 512, **options)
    storage = VirtualStorage(spec, 64, 1024, **options)
    cache = Cache(spec, num_blocks=64, block_size=1024)
    a = cache.open(np.arange(3000))
    storage.prepare(cache.reserve([a], [3000]), np.array([a.id]))
    assert (machine.calls["map"], machine.num_mapped_pages) == (3 * 8, 3 * 8)  # of 4 layers keys and values
    cache.commit(a, 3000)
    before = machine.time_us
    b = cache.open(np.append(np.arange(2900), 1))
    storage.prepare(cache.reserve([b], [1]), np.array([b.id]))
    assert storage.bytes_committed == 4 * 8 * (2 << 20)
    assert machine.calls["copy"] == 8  # the third block is shared in part
    # Three mappings in each layer buffer, one of which leads to new memory.
    assert machine.time_us - before == 8 * (3 * 37.5 + 193.0)
    storage.close()
    assert machine.num_mapped_pages == 0
