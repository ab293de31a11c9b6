"""Contiguous and growing storages: places of slots, copies of a step, memory given back to the system."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest
import torch

from quire import KVSpec
from quire.baselines.contiguous import ContiguousStorage
from quire.baselines.growing import GrowingStorage
from quire.engine.open_storage import OpenStorage
from quire.errors import ArgumentError
from quire.simulate.compared_storage import ComparedStorage
from quire.spec import LayerSpec, Span

FULL = Span()
# Odd head counts, widths that are no power of two, K and V of different widths, a layer that shares another's KV.
MIXED = KVSpec(
    (
        LayerSpec(FULL, 3, 96, 64),
        LayerSpec(FULL, 1, 16, 16),
        LayerSpec(FULL, 1, 16, 16, 1),
        LayerSpec(FULL, 5, 24, 40),
    ),
    "float16",
)
UNIFORM = KVSpec.uniform(num_layers=64, num_kv_heads=2, head_dim=64)


def opened(name: str, spec: KVSpec, kv_memory: str, max_model_len: int = 1000, **options: Any) -> OpenStorage:
    options = {"kv_memory": kv_memory, "max_num_seqs": 64, **options}
    return ComparedStorage.parse(name, options).open(spec, max_model_len)


def step(one: OpenStorage, sequences: list[Any], counts: list[int]) -> list[Any]:
    """Reserve, prepare and commit; the tables."""
    plan = one.cache.reserve(sequences, counts)
    assert plan is not None
    tables = one.storage.prepare(plan, np.array([s.id for s in sequences]))
    for sequence, length in zip(sequences, plan.context_lengths.tolist(), strict=True):
        one.cache.commit(sequence, length)
    return tables


def written(view: Any, slots: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    blocks, offsets = torch.from_numpy(slots // view.block_size), torch.from_numpy(slots % view.block_size)
    return view.k[blocks, :, offsets], view.v[blocks, :, offsets]


@pytest.mark.parametrize("name", ["contiguous", "growing"])
def test_every_token_of_every_layer_has_bytes_of_its_own(name: str) -> None:
    """Three sequences that grow side by side past their buffers: all that was written is read back."""
    one = opened(name, MIXED, "4MiB", reservation="exact", growth="together:16")
    storage, layers = one.storage, [0, 1, 3]
    sequences = [one.cache.open(np.arange(n), max_num_tokens=400) for n in (1, 30, 77)]
    random = torch.Generator().manual_seed(1)
    expected: dict[tuple[int, int], list[torch.Tensor]] = {}
    for _ in range(60):
        counts = [s.num_tokens - s.num_computed_tokens for s in sequences]
        tables = step(one, sequences, counts)
        for layer in layers:
            view, shape = storage.view(layer), MIXED.layers[layer]
            slots = tables[storage.table_of(layer)][1]
            for tensor, width, kind in ((view.k, shape.k_head_dim, 0), (view.v, shape.v_head_dim, 1)):
                new = torch.randn(len(slots), shape.num_kv_heads, width, generator=random).half()
                blocks = torch.from_numpy(slots // view.block_size)
                tensor[blocks, :, torch.from_numpy(slots % view.block_size)] = new
                expected.setdefault((layer, kind), [torch.empty(0)] * len(sequences))
                for index, part in enumerate(new.split(counts)):
                    past = expected[layer, kind][index]
                    expected[layer, kind][index] = torch.cat([past, part]) if past.numel() else part
        for sequence in sequences:
            sequence.append(np.arange(3))
    # Once more, so that the tables are there to be read through.
    tables = step(one, sequences, [3] * 3)
    for layer in layers:
        view, table = storage.view(layer), tables[storage.table_of(layer)][0]
        for kind in (0, 1):
            for index, past in enumerate(expected[layer, kind]):
                slots = int(table[index, 0]) * view.block_size + np.arange(len(past))
                assert torch.equal(written(view, slots)[kind], past)
    assert storage.view(2).k.data_ptr() == storage.view(1).k.data_ptr()
    one.cache.check()
    storage.close()


def test_a_step_that_fits_copies_no_byte() -> None:
    one = opened("growing", UNIFORM, "256MiB")
    sequence = one.cache.open(np.arange(100))
    step(one, [sequence], [100])
    copied: list[int] = []
    for _ in range(400):
        before = one.storage.copied_bytes
        sequence.append([1])
        step(one, [sequence], [1])
        copied.append(one.storage.copied_bytes - before)
    # Buffers taken for 100 tokens hold 228 and more: the first 128 steps fit; then layer j moves every 129 + j steps.
    token_bytes = 2 * 2 * 64 * 2
    assert copied[:128] == [0] * 128
    for at, count in enumerate(copied, start=1):
        moved = [j for j in range(64) if at % (129 + j) == 0]
        assert count == len(moved) * (100 + at - 1) * token_bytes
    one.storage.close()


@pytest.mark.ci
def test_spread_growth_peaks_far_below_together() -> None:
    """The old and the new buffer of a layer lie side by side for a step: of few layers, or of all 64."""
    peaks, committed = {}, {}
    for growth in ("spread", "together:256"):
        one = opened("growing", UNIFORM, "512MiB", 5000, growth=growth)
        sequence = one.cache.open(np.arange(3000))
        highest = 0
        for at in range(300):
            if at:
                sequence.append([1])
            tables = step(one, [sequence], [3000 if at == 0 else 1])
            for layer in range(64):
                view, slots = one.storage.view(layer), torch.from_numpy(tables[layer][1])
                for tensor in (view.k, view.v):
                    tensor[slots // view.block_size, :, slots % view.block_size] = 1.0
            if at % 4 == 0 or any(sequence.num_tokens == length for length in (3073, 3129, 3130)):
                highest = max(highest, one.storage.bytes_committed)
        use = one.cache.memory_use()
        assert use.used == 3299 * UNIFORM.bytes_per_token
        peaks[growth], committed[growth] = use.peak / use.used, highest / use.used
        assert highest <= use.peak
        one.storage.close()
    assert peaks["spread"] < 1.15
    assert peaks["together:256"] > 1.8
    assert committed["spread"] < 1.15
    assert committed["together:256"] > 1.8


def test_what_a_sequence_leaves_goes_back_to_the_system() -> None:
    one = opened("growing", UNIFORM, "256MiB")
    sequences = [one.cache.open(np.arange(500)) for _ in range(4)]
    tables = step(one, sequences, [500] * 4)
    for layer in range(64):
        view, slots = one.storage.view(layer), torch.from_numpy(tables[layer][1])
        view.k[slots // view.block_size, :, slots % view.block_size] = 1.0
        view.v[slots // view.block_size, :, slots % view.block_size] = 1.0
    token_bytes = UNIFORM.bytes_per_token
    assert one.storage.bytes_committed >= 2000 * token_bytes
    for sequence in sequences[1:]:
        one.cache.close(sequence)
    sequences[0].append([1])
    step(one, sequences[:1], [1])
    assert 500 * token_bytes <= one.storage.bytes_committed <= 600 * token_bytes
    one.storage.close()
    assert one.storage._heap._bytes is None


def test_address_space_costs_no_memory() -> None:
    contiguous = ContiguousStorage(UNIFORM, 100_000, 40_960)
    growing = GrowingStorage(UNIFORM, 100_000, 40_960)
    assert contiguous.bytes_committed == 0
    assert growing._heap.committed_bytes() == 0
    assert contiguous.block_bytes == UNIFORM.bytes_per_token
    assert growing.block_bytes == mmap.PAGESIZE
    contiguous.close()
    growing.close()


def test_arguments_out_of_range_are_refused() -> None:
    for make in (
        lambda: ContiguousStorage(MIXED, 0, 10),
        lambda: ContiguousStorage(MIXED, 2**31, 10),
        lambda: ContiguousStorage(MIXED, 10, 0),
        lambda: GrowingStorage(MIXED, 0, 10),
        lambda: GrowingStorage(MIXED, 10, 2**31),
    ):
        with pytest.raises(ArgumentError, match="expected"):
            make()
    storage = GrowingStorage(MIXED, 10, 10)
    with pytest.raises(ArgumentError, match="a layer of 0 to 3, got 4"):
        storage.view(4)
    storage.close()
