"""Blocks of the paged storage: their places, their bytes, and the memory that shrinking gives back."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from quire.errors import ArgumentError, CapacityError
from quire.memory import Heap, KVView, PagedStorage
from quire.memory import device_memory as device_module
from quire.spec import KVSpec, LayerSpec, Span

FULL, WINDOW = Span(), Span("window", 8)
UNIFORM = KVSpec.uniform(num_layers=3, num_kv_heads=2, head_dim=16, dtype="float32")
# Two groups of unequal shape, K and V of unequal width, one layer that reads another's KV.
MIXED = KVSpec(
    layers=(
        LayerSpec(WINDOW, 2, 16, 24),
        LayerSpec(FULL, 1, 32, 8),
        LayerSpec(WINDOW, 2, 16, 24),
        LayerSpec(FULL, 1, 32, 8),
        LayerSpec(WINDOW, 2, 16, 24),
        LayerSpec(FULL, 1, 32, 8, shares_kv_with=3),
    ),
    dtype="bfloat16",
)
# A group of two narrow layers beside groups of one wide one: all layers of a block in one slot.
UNEQUAL = KVSpec(
    layers=tuple(
        LayerSpec(WINDOW, 4, 16, 16) if wide else LayerSpec(FULL, 1, 48, 16)
        for wide in (True, True, False, True, True, False)
    ),
    dtype="bfloat16",
)


def block_parts(storage: PagedStorage, group: int, block_id: int) -> list[torch.Tensor]:
    """Every tensor that holds bytes of the block: K and V of each layer of its group."""
    views = [storage.view(layer) for layer in storage.spec.groups[group].layers]
    return [part for view in views for part in (view.k[block_id], view.v[block_id])]


@pytest.mark.parametrize(("spec", "size"), list(product([UNIFORM, MIXED, UNEQUAL], [1, 3, 16])))
def test_views_have_the_layers_shape(spec: KVSpec, size: int) -> None:
    storage = PagedStorage(spec, 5, size)
    for index, layer in enumerate(spec.layers):
        view = storage.view(index)
        assert view.k.shape == (5, layer.num_kv_heads, size, layer.k_head_dim)
        assert view.v.shape == (5, layer.num_kv_heads, size, layer.v_head_dim)
        assert (view.num_blocks, view.block_size, view.num_kv_heads) == (5, size, layer.num_kv_heads)
        assert (view.k_head_dim, view.v_head_dim) == (layer.k_head_dim, layer.v_head_dim)
        assert view.dtype == getattr(torch, spec.dtype)


def test_a_block_is_as_large_as_any_groups_where_their_numbers_of_layers_differ() -> None:
    assert [len(group.layers) for group in UNEQUAL.groups] == [2, 1, 1, 1, 1]
    storage = PagedStorage(UNEQUAL, 8, 16)
    assert storage.block_bytes == 16 * 4 * (16 + 16) * 2
    assert storage.block_bytes == UNEQUAL.block_bytes(16)


@pytest.mark.parametrize(("spec", "size"), list(product([UNIFORM, MIXED, UNEQUAL], [1, 3, 16])))
def test_no_two_blocks_overlap(spec: KVSpec, size: int) -> None:
    """Blocks are given to groups in turn; each is filled with a number of its own, and all keep it."""
    storage = PagedStorage(spec, 12, size)
    owner = {block_id: block_id % len(spec.groups) for block_id in range(12)}
    for block_id, group in owner.items():
        for index, part in enumerate(block_parts(storage, group, block_id)):
            assert bool((part == 0).all())
            part.fill_(block_id * 8 + index + 1)
    for block_id, group in owner.items():
        for index, part in enumerate(block_parts(storage, group, block_id)):
            assert bool((part == block_id * 8 + index + 1).all())


def test_packed_keeps_a_heads_k_and_v_in_one_stream() -> None:
    view = PagedStorage(MIXED, 4, 8).view(0)
    assert view.k[1, 1].is_contiguous()
    assert view.v[1, 1].data_ptr() == view.k[1, 1].data_ptr() + view.k[1, 1].numel() * 2
    assert view.k[1, 1].data_ptr() == view.v[1, 0].data_ptr() + view.v[1, 0].numel() * 2


def test_a_layer_that_shares_kv_has_its_owners_view() -> None:
    storage = PagedStorage(MIXED, 4, 8)
    owner, reader = storage.view(3), storage.view(5)
    owner.k.fill_(2)
    owner.v.fill_(3)
    assert reader.k.data_ptr() == owner.k.data_ptr()
    assert bool((reader.k == 2).all())
    assert bool((reader.v == 3).all())


def test_block_bytes_are_the_specs() -> None:
    for spec, size in product([UNIFORM, MIXED], [1, 16]):
        assert PagedStorage(spec, 2, size).block_bytes == spec.block_bytes(size)


@pytest.mark.parametrize("group", [0, 1])
def test_copy_moves_the_first_tokens_of_one_group(group: int) -> None:
    storage = PagedStorage(MIXED, 6, 8)
    rng = torch.Generator().manual_seed(1)
    for block_id in range(6):
        for part in block_parts(storage, group, block_id):
            part.copy_(torch.randn(part.shape, generator=rng))
    before = [[part.clone() for part in block_parts(storage, group, block_id)] for block_id in range(6)]
    storage.copy(np.array([[0, 4, 5], [3, 1, 8], [2, 5, 0]], np.int32), group)
    for block_id, source, num_tokens in ((4, 0, 5), (1, 3, 8), (5, 2, 0), (0, 0, 0), (2, 2, 0), (3, 3, 0)):
        for part, old, given in zip(
            block_parts(storage, group, block_id), before[block_id], before[source], strict=True
        ):
            torch.testing.assert_close(part[:, :num_tokens], given[:, :num_tokens], rtol=0, atol=0)
            torch.testing.assert_close(part[:, num_tokens:], old[:, num_tokens:], rtol=0, atol=0)


def test_copy_takes_torch_and_empty_rows() -> None:
    storage = PagedStorage(UNIFORM, 3, 4)
    storage.view(0).k[0] = 1
    storage.copy(torch.zeros(0, 3, dtype=torch.int32))
    storage.copy(torch.tensor([[0, 2, 4]], dtype=torch.int32))
    assert bool((storage.view(0).k[2] == 1).all())


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[0, 3, 4]], "3 blocks of 4 tokens"),
        ([[0, 1, 4], [3, 1, 4]], "3 blocks"),
        ([[-1, 1, 4]], "3 blocks"),
        ([[0, 1, 5]], "4 tokens"),
        ([[0, 1]], r"\[m, 3\]"),
    ],
)
def test_copy_refuses_rows_outside_and_changes_nothing(rows: list, message: str) -> None:
    storage = PagedStorage(UNIFORM, 3, 4)
    storage.view(0).k[0] = 1
    with pytest.raises(ArgumentError, match=message):
        storage.copy(np.array(rows))
    assert bool((storage.view(0).k[1:] == 0).all())


def test_resize_keeps_bytes_and_addresses_and_gives_memory_back() -> None:
    storage = PagedStorage(UNIFORM, 400, 16)
    assert storage.bytes_committed == 0
    storage.fill(1.0)
    full = storage.bytes_committed
    assert full == 400 * storage.block_bytes
    address = storage.view(2).v.data_ptr()
    storage.resize(100)
    assert storage.num_blocks == 100
    assert storage.bytes_committed == 100 * storage.block_bytes
    assert bool((storage.view(2).v == 1).all())
    storage.resize(1000)
    view = storage.view(2)
    assert view.v.data_ptr() == address
    assert view.num_blocks == 1000
    assert bool((view.v[:100] == 1).all())
    assert bool((view.v[100:] == 0).all())


def test_a_boundary_inside_a_page_spares_the_blocks_below_it() -> None:
    storage = PagedStorage(UNIFORM, 99, 1)  # a block is 256 bytes of a slot
    storage.fill(1.0)
    storage.resize(17)
    assert bool((storage.view(1).k == 1).all())
    assert storage.bytes_committed == 3 * 2 * 4096


def test_never_commits_more_than_its_blocks_with_huge_pages() -> None:
    spec = KVSpec.uniform(num_layers=2, num_kv_heads=4, head_dim=64)
    storage = PagedStorage(spec, 4001, 16)  # 62.5 MiB a slot
    for layer in range(2):
        storage.view(layer).k[:, 0, 0, 0] = 1
    assert storage.bytes_committed <= 4001 * storage.block_bytes + 2 * 4096
    storage.resize(1)
    assert storage.bytes_committed <= storage.block_bytes + 2 * 4096


def test_growing_past_the_reservation_is_refused_and_changes_nothing() -> None:
    storage = PagedStorage(UNIFORM, 3, 4, max_blocks=5)
    storage.fill(1.0)
    storage.resize(5)
    with pytest.raises(CapacityError, match="to 6 blocks: memory was reserved for 5"):
        storage.resize(6)
    with pytest.raises(ArgumentError, match="at least 1 block, got 0"):
        storage.resize(0)
    assert storage.num_blocks == 5
    assert bool((storage.view(0).k[:3] == 1).all())


def test_a_failing_release_leaves_the_number_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = PagedStorage(UNIFORM, 64, 16)
    storage.fill(1.0)

    def fail(self: Heap, start: int, stop: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(Heap, "release", fail)
    with pytest.raises(OSError, match="Invalid argument"):
        storage.resize(8)
    assert storage.num_blocks == 64
    assert bool((storage.view(0).k == 1).all())


def test_falls_back_to_what_was_asked_where_room_to_grow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real, sizes = Heap, []

    def limited(max_bytes: int) -> Heap:
        sizes.append(max_bytes)
        if len(sizes) == 1:
            raise CapacityError("no room")
        return real(max_bytes)

    monkeypatch.setattr(device_module, "Heap", limited)
    storage = PagedStorage(UNIFORM, 7, 4)
    assert storage.max_blocks == 7
    assert sizes[1] < sizes[0]
    sizes.clear()
    with pytest.raises(CapacityError, match="no room"):
        PagedStorage(UNIFORM, 7, 4, max_blocks=9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 0}, "block size of 1 to 512, got 0"),
        ({"block_size": 513}, "block size of 1 to 512, got 513"),
        ({"num_blocks": 0}, "at least 1 block, got 0"),
        ({"max_blocks": 3}, "at least num_blocks=4, got 3"),
    ],
)
def test_refuses(changes: dict, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        PagedStorage(**{"spec": UNIFORM, "num_blocks": 4, "block_size": 16, **changes})


def test_refuses_a_layer_that_does_not_exist() -> None:
    storage = PagedStorage(UNIFORM, 2, 4)
    for layer in (-1, 3):
        with pytest.raises(ArgumentError, match=f"layer of 0 to 2, got {layer}"):
            storage.view(layer)


def test_close_gives_everything_back() -> None:
    storage = PagedStorage(UNIFORM, 64, 16)
    storage.fill(1.0)
    view = storage.view(0)
    storage.close()
    assert bool((view.k == 0).all())


def test_a_view_refuses_tensors_that_do_not_agree() -> None:
    good = torch.zeros(4, 2, 8, 16)
    for k, v in (
        (good, torch.zeros(3, 2, 8, 16)),
        (good[0], good[0]),
        (good, good.bfloat16()),
        (good.transpose(2, 3).contiguous().transpose(2, 3), good),
    ):
        with pytest.raises(ArgumentError, match="expected k and v"):
            KVView(k, v, 8)
    with pytest.raises(ArgumentError, match=r"num_kv_heads, 4, head_dim"):
        KVView(good, good, 4)


def test_blocks_given_back_wherever_they_lie_return_their_pages_and_spare_their_neighbours() -> None:
    storage = PagedStorage(UNIFORM, 400, 16)
    storage.fill(1.0)
    block_ids = np.random.default_rng(0).permutation(400)[:150]
    storage.give_back(block_ids)
    assert storage.bytes_committed == 250 * storage.block_bytes
    kept = np.setdiff1d(np.arange(400), block_ids)
    for layer in range(len(UNIFORM.layers)):
        assert bool((storage.view(layer).k[kept] == 1).all())
        assert bool((storage.view(layer).v[torch.from_numpy(block_ids)] == 0).all())
    storage.give_back([])
    with pytest.raises(ArgumentError, match="blocks of 0 to 399, got 3 to 400"):
        storage.give_back([3, 400])


def test_memory_committed_ahead_is_that_of_the_blocks_and_their_bytes_stay() -> None:
    storage = PagedStorage(UNIFORM, 64, 16)
    storage.view(0).k[3] = 7
    assert storage.commit_ahead(0, 32)
    committed = storage.bytes_committed
    assert 32 * storage.block_bytes <= committed <= 64 * storage.block_bytes
    assert bool((storage.view(0).k[3] == 7).all())
    assert storage.commit_ahead(32, 64)
    assert storage.bytes_committed == 64 * storage.block_bytes
    for first, stop in ((0, 65), (-1, 3), (5, 5)):
        assert not storage.commit_ahead(first, stop)


@pytest.mark.parametrize("how", ["resize", "give_back", "close"])
def test_nothing_is_committed_ahead_once_memory_was_given_back(how: str) -> None:
    storage = PagedStorage(UNIFORM, 64, 16)
    storage.fill(1.0)
    if how == "resize":
        storage.resize(128)
        assert storage.commit_ahead(64, 128)  # growing gives nothing back
        storage.resize(32)
    elif how == "give_back":
        storage.give_back(np.arange(32))
    else:
        storage.close()
    assert not storage.commit_ahead(0, 32)
    if how != "close":
        assert storage.bytes_committed <= 96 * storage.block_bytes
