"""Blocks of a placement heap: mappings and their cost, and failing calls that change nothing."""

from __future__ import annotations

import errno
import gc
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from support.faulty_calls import FaultyCalls
from support.process_maps import mappings, num_entered
from support.simulated_heap import SimulatedBackend

from quire.errors import ArgumentError, BackendError, CapacityError, InvariantError
from quire.memory.placement import (
    AddressRange,
    MappingBudget,
    MemfdBackend,
    PlacementHeap,
    unsupported_reason,
)
from quire.memory.placement.system_calls import SystemCalls

if (_reason := unsupported_reason()) is not None:
    pytest.skip(f"no placement heaps here: {_reason}", allow_module_level=True)

PAGE = 4096


def elements(address_range: AddressRange, layer_buffer: int) -> torch.Tensor:
    """[num_positions, float32 elements of a piece]; touch mapped positions only."""
    return address_range.tensor(layer_buffer, torch.float32).view(address_range.num_positions, -1)


def test_a_block_is_one_piece_in_every_layer_buffer() -> None:
    heap = PlacementHeap([PAGE, 2 * PAGE], max_blocks=8, blocks_per_heap=4)
    range_ = heap.reserve(100)
    block_ids = heap.allocate(6)
    heap.map([(range_, [7, 0, 1, 2, 3, 4], block_ids)])
    assert range_.block_ids(0, 8).tolist() == [1, 2, 3, 4, 5, -1, -1, 0]
    for layer_buffer in (0, 1):
        pieces = elements(range_, layer_buffer)
        for position in (0, 1, 2, 3, 4, 7):
            assert bool((pieces[position] == 0).all())
            pieces[position] = layer_buffer * 100 + position
    other = heap.reserve(6)
    heap.map([(other, np.arange(6), block_ids)])  # every block a second time, in another order
    for layer_buffer in (0, 1):
        for position, old in enumerate([7, 0, 1, 2, 3, 4]):
            assert bool((elements(other, layer_buffer)[position] == layer_buffer * 100 + old).all())
    assert heap.references(block_ids).tolist() == [3] * 6
    heap.check()
    heap.close()


def test_pages_are_entered_at_once_or_as_they_are_touched() -> None:
    heap = PlacementHeap([16 * PAGE], max_blocks=8)
    first, second = heap.reserve(8), heap.reserve(8)
    block_ids = heap.allocate(8)
    heap.map([(first, np.arange(8), block_ids)])
    assert num_entered(first.address, first.address + 128 * PAGE) == 128
    elements(first, 0)[:] = torch.arange(8.0)[:, None]
    heap.map([(second, np.arange(8), block_ids)], populate=False)
    assert num_entered(second.address, second.address + 128 * PAGE) == 0
    assert torch.equal(elements(second, 0), elements(first, 0))
    assert num_entered(second.address, second.address + 128 * PAGE) == 128
    heap.close()


def test_a_tensor_sees_what_is_mapped_later_and_stays_contiguous() -> None:
    heap = PlacementHeap([PAGE], max_blocks=8)
    range_ = heap.reserve(1 << 20)  # 4 GiB of addresses
    whole = range_.tensor(0, torch.bfloat16)
    assert whole.numel() == (1 << 20) * PAGE // 2
    assert heap.committed_bytes == 0
    heap.map([(range_, [5, 6], heap.allocate(2))])
    part = whole[5 * 2048 : 7 * 2048]
    assert part.is_contiguous()
    part.fill_(3.0)
    assert float(part.float().sum()) == 3.0 * 4096
    assert heap.committed_bytes == 2 * PAGE
    heap.close()


def test_neighbours_become_one_mapping_and_are_counted_as_the_system_counts() -> None:
    heap = PlacementHeap([PAGE, PAGE], max_blocks=64, blocks_per_heap=16)
    range_ = heap.reserve(64)
    assert range_.num_mappings == 1
    block_ids = heap.allocate(40)
    rng = np.random.default_rng(1)
    for _ in range(40):
        positions = rng.choice(64, 5, replace=False)
        if rng.random() < 0.6:
            first = int(rng.integers(0, 36))
            heap.map([(range_, np.sort(positions), block_ids[first : first + 5])])
        else:
            heap.unmap(range_, positions)
        heap.check()
        found = mappings(range_.address, range_.address + range_.num_bytes)
        assert len(found) <= range_.num_mappings
        for layer_buffer in (0, 1):  # what the system has is what the entries say
            start = range_.address + range_.offsets[layer_buffer]
            for position, block_id in enumerate(range_.block_ids().tolist()):
                address = start + position * PAGE
                (there,) = [each for each in found if each.start <= address < each.stop]
                assert there.permissions == ("rw-s" if block_id >= 0 else "---p")
    heap.map([(range_, np.arange(16), block_ids[:16])])
    heap.unmap(range_, np.arange(16, 64))
    assert range_.num_mappings == 1 + 2 * 2
    heap.close()


def test_a_block_lives_as_long_as_somebody_holds_or_maps_it() -> None:
    heap = PlacementHeap([PAGE], max_blocks=4)
    a, b = heap.reserve(4), heap.reserve(4)
    block_id = heap.allocate(1)
    heap.map([(a, [0], block_id)])
    heap.map([(b, [3], block_id)])
    elements(a, 0)[0] = 9.0
    heap.free(block_id)
    heap.unmap(a, [0])
    heap.trim()
    assert bool((elements(b, 0)[3] == 9.0).all())
    assert heap.num_used == 1
    heap.unmap(b, [3])
    assert heap.num_used == 0
    heap.trim()
    assert (heap.committed_bytes, heap.num_heaps) == (0, 0)
    with pytest.raises(ArgumentError, match="blocks that are held"):
        heap.free(block_id)
    with pytest.raises(ArgumentError, match="blocks in use"):
        heap.map([(a, [0], block_id)])
    heap.close()


def test_trim_gives_back_the_memory_of_free_blocks_wherever_they_lie() -> None:
    heap = PlacementHeap([PAGE, 16 * PAGE], max_blocks=32, blocks_per_heap=8)
    range_ = heap.reserve(32)
    block_ids = heap.allocate(32)
    heap.map([(range_, np.arange(32), block_ids)])
    heap.free(block_ids)
    for layer_buffer in (0, 1):
        elements(range_, layer_buffer).fill_(1.0)
    assert heap.committed_bytes == 32 * 17 * PAGE
    heap.unmap(range_, np.setdiff1d(np.arange(32), [3, 9]))
    heap.trim()
    assert heap.committed_bytes == 2 * 17 * PAGE
    assert heap.num_heaps == 2
    assert bool((elements(range_, 1)[9] == 1.0).all())
    again = heap.allocate(4)
    heap.map([(range_, np.arange(20, 24), again)])
    assert bool((elements(range_, 1)[20:24] == 0).all())
    heap.close()


def test_many_heaps_behind_one_range() -> None:
    heap = PlacementHeap([PAGE], max_blocks=20, blocks_per_heap=4)
    range_ = heap.reserve(20)
    heap.map([(range_, np.arange(20), heap.allocate(20))])
    assert heap.num_heaps == 5
    assert range_.num_mappings == 1 + 6
    whole = range_.tensor(0, torch.float32)
    whole.copy_(torch.arange(whole.numel()))
    assert bool((whole == torch.arange(whole.numel())).all())
    with pytest.raises(CapacityError, match="expected 1 free blocks of 4096 bytes, got 0 of 20"):
        heap.allocate(1)
    heap.close()


def test_allocate_goes_on_behind_a_block() -> None:
    heap = PlacementHeap([PAGE], max_blocks=16, blocks_per_heap=8)
    block_ids = heap.allocate(8)
    heap.free(block_ids[[1, 4, 5, 6]])
    assert heap.allocate(2, after=3).tolist() == [4, 5]
    assert heap.allocate(2, after=5).tolist() == [6, 1]
    assert heap.allocate(1).tolist() == [8]
    heap.close()


def test_claimed_blocks_are_the_ones_asked_for() -> None:
    heap = PlacementHeap([PAGE], max_blocks=16, blocks_per_heap=4)
    heap.claim([13, 2])
    assert heap.num_heaps == 2
    assert heap.references([2, 13, 3]).tolist() == [1, 1, 0]
    for wrong in ([3, 13], [5, 5]):
        with pytest.raises(ArgumentError, match="distinct free blocks"):
            heap.claim(wrong)
    with pytest.raises(ArgumentError, match="blocks of 0 to 15, got"):
        heap.claim([16])
    assert heap.num_used == 2
    heap.close()


def test_what_a_step_may_see_waits_for_it() -> None:
    heap = PlacementHeap([PAGE], max_blocks=4)
    range_ = heap.reserve(4)
    block_ids = heap.allocate(2)
    heap.map([(range_, [0, 1], block_ids)])
    elements(range_, 0)[:2] = 5.0
    heap.free(block_ids, step=3)
    heap.unmap(range_, [0, 1], step=3)
    heap.complete(2)
    assert bool((elements(range_, 0)[:2] == 5.0).all())
    assert heap.references(block_ids).tolist() == [2, 2]
    assert not set(heap.allocate(2).tolist()) & set(block_ids.tolist())
    with pytest.raises(ArgumentError, match="do not wait to be unmapped"):
        heap.map([(range_, [0], [2])])
    heap.complete(3)
    assert heap.references(block_ids).tolist() == [0, 0]
    assert range_.num_mapped == 0
    heap.map([(range_, [0], [2])])
    heap.free([2], step=3)  # a step that has ended
    assert heap.references(2).tolist() == [1]
    heap.check()
    heap.close()


def test_layer_buffers_a_range_does_not_use_or_uses_in_part() -> None:
    heap = PlacementHeap([4 * PAGE, PAGE, 2 * PAGE], max_blocks=8)
    range_ = heap.reserve(8, [2 * PAGE, 0, 2 * PAGE])
    heap.map([(range_, np.arange(8), heap.allocate(8))])
    assert heap.committed_bytes == 8 * 4 * PAGE
    first, last = elements(range_, 0), elements(range_, 2)
    assert first.shape == (8, 2 * PAGE // 4)
    first.copy_(torch.arange(8.0)[:, None].expand_as(first))
    last.copy_(-torch.arange(8.0)[:, None].expand_as(last))
    assert first[:, 77].tolist() == list(range(8))
    # The first layer buffer's pieces do not touch in the heap; the last one's do.
    assert range_.num_mappings == 1 + 9 + 2
    with pytest.raises(ArgumentError, match="a layer buffer that the range uses"):
        range_.tensor(1, torch.float32)
    heap.close()


def test_copies_go_from_block_to_block() -> None:
    heap = PlacementHeap([PAGE, PAGE], max_blocks=8, blocks_per_heap=2)
    range_ = heap.reserve(8)
    block_ids = heap.allocate(5)
    heap.map([(range_, [0], block_ids[:1])])
    for layer_buffer in (0, 1):
        elements(range_, layer_buffer)[0] = torch.arange(1024.0) + layer_buffer
    heap.copy(int(block_ids[0]), int(block_ids[4]), [400, 0])
    heap.map([(range_, [1], block_ids[4:])])
    assert elements(range_, 0)[1].tolist() == [*range(100), *[0] * 924]
    assert not elements(range_, 1)[1].any()
    heap.close()


@pytest.mark.parametrize("size", [0, 1024, 5000, 4 << 20])
def test_piece_sizes_that_cannot_be_are_refused(size: int) -> None:
    with pytest.raises(ArgumentError, match=r"expected pieces of 4096 to 2097152 bytes, .* got"):
        PlacementHeap([PAGE, size])


def test_wrong_positions_and_ranges_are_refused() -> None:
    heap, other = PlacementHeap([PAGE], max_blocks=4), PlacementHeap([PAGE], max_blocks=4)
    range_ = heap.reserve(4)
    block_ids = heap.allocate(2)
    for positions in ([0, 0], [3, 4], [-1, 0]):
        with pytest.raises(ArgumentError, match="distinct positions of 0 to 3"):
            heap.map([(range_, positions, block_ids)])
    with pytest.raises(ArgumentError, match="a block for each of 1 positions, got 2"):
        heap.map([(range_, [0], block_ids)])
    with pytest.raises(ArgumentError, match="open range of this heap"):
        other.map([(range_, [0, 1], other.allocate(2))])
    with pytest.raises(ArgumentError, match="at least 1 position"):
        heap.reserve(0)
    with pytest.raises(ArgumentError, match="whole pages of 4096 bytes up to 4096"):
        heap.reserve(4, [100])
    with pytest.raises(CapacityError, match="address space"):
        heap.reserve(1 << 40)
    heap.release(range_)
    heap.release(range_)
    with pytest.raises(ArgumentError, match="open range"):
        heap.map([(range_, [0, 1], block_ids)])
    heap.check()


def test_the_budget_of_mappings_is_kept() -> None:
    budget = MappingBudget(12, "memory mappings")
    heap = PlacementHeap([PAGE], max_blocks=32, backend=MemfdBackend(budget=budget))
    range_ = heap.reserve(32)
    block_ids = heap.allocate(32)
    heap.map([(range_, [1, 3, 5, 7], block_ids[[1, 3, 5, 7]])])
    assert budget.used == heap.num_mappings == 10
    with pytest.raises(CapacityError, match="expected room for 8 more memory mappings: 10 of 12 are in use"):
        heap.map([(range_, [20, 22, 24, 26], block_ids[[20, 22, 24, 26]])])
    assert range_.block_ids().tolist() == [-1, 1, -1, 3, -1, 5, -1, 7, *[-1] * 24]
    heap.check()
    heap.map([(range_, [2, 4, 6], block_ids[[2, 4, 6]])])  # the gaps: fewer mappings than before
    assert budget.used == 2 + 2
    heap.close()
    del range_
    gc.collect()
    assert budget.used == 0


def test_two_mebibyte_pieces_lie_on_huge_pages_where_the_kernel_can() -> None:
    heap = PlacementHeap([2 << 20], max_blocks=4)
    range_ = heap.reserve(4)
    heap.map([(range_, [0, 1], heap.allocate(2))])
    assert range_.address % (2 << 20) == 0
    pieces = elements(range_, 0)
    assert not pieces[:2].any()
    pieces[1] = 2.0
    assert heap.committed_bytes == 4 << 20
    assert float(pieces[1].sum()) == 2.0 * (1 << 19)
    heap.close()


def _huge_bytes(start: int, num_bytes: int) -> int:
    """How much of these addresses the system translates by huge pages."""
    assert mappings(start, start + num_bytes)
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if head := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(head[1], 16) < start + num_bytes and int(head[2], 16) > start
        elif inside and line.startswith("ShmemPmdMapped"):
            found += int(line.split()[1]) << 10
    return found


PIECE, FRAME = 64 << 10, 32  # blocks of a huge page


def _gives_huge_pages() -> bool:
    backend = MemfdBackend()
    return backend.commit_huge(backend.make_heap(2 << 20), 0)


def untimed(calls: SystemCalls | None = None) -> MemfdBackend:
    """One that asks for huge pages however long the last one took."""
    return MemfdBackend(calls, clock=lambda: 0.0)


needs_huge_pages = pytest.mark.skipif(not _gives_huge_pages(), reason="this kernel collapses no memfd")


@needs_huge_pages
def test_runs_of_small_pieces_lie_on_huge_pages_however_they_come_to_be_mapped() -> None:
    heap = PlacementHeap([PIECE, PIECE], max_blocks=100, backend=untimed())
    assert (heap.frame_blocks, heap.blocks_per_heap) == (FRAME, 128)
    range_ = heap.reserve(3 * FRAME)
    layer_buffers = [range_.address + offset for offset in range_.offsets]
    block_ids = heap.allocate(3 * FRAME)
    first, second = np.arange(FRAME), np.arange(FRAME, 2 * FRAME)
    heap.map([(range_, second, block_ids[second])])  # whole at once
    assert [_huge_bytes(layer_buffer, 3 * FRAME * PIECE) for layer_buffer in layer_buffers] == [2 << 20] * 2
    elements(range_, 1)[second] = 3.0

    heap.commit(block_ids[first], heap.piece_bytes)
    for position in [*range(20), *range(FRAME - 1, 19, -1)]:
        heap.map([(range_, [position], [block_ids[position]])])
    assert [_huge_bytes(layer_buffer, 3 * FRAME * PIECE) for layer_buffer in layer_buffers] == [4 << 20] * 2

    heap.map([(range_, [5], block_ids[[70]])])  # another block, as when a block is copied
    assert [_huge_bytes(layer_buffer, 3 * FRAME * PIECE) for layer_buffer in layer_buffers] == [2 << 20] * 2
    heap.map([(range_, [5], block_ids[[5]])])
    assert [_huge_bytes(layer_buffer, 3 * FRAME * PIECE) for layer_buffer in layer_buffers] == [4 << 20] * 2
    assert range_.num_mappings == 1 + 2 * 2
    assert bool((elements(range_, 1)[second] == 3.0).all())

    other = heap.reserve(3 * FRAME)  # the same blocks where addresses do not agree
    heap.map([(other, second + 1, block_ids[second])])
    assert _huge_bytes(other.address, other.num_bytes) == 0
    assert heap.committed_bytes == 2 * (2 * FRAME + 1) * PIECE
    heap.check()
    heap.close()


@needs_huge_pages
def test_a_huge_page_gives_back_single_blocks_and_is_made_anew_when_it_is_empty() -> None:
    heap = PlacementHeap([PIECE], max_blocks=FRAME, backend=untimed())
    range_ = heap.reserve(FRAME)
    block_ids = heap.allocate(FRAME)
    heap.map([(range_, np.arange(FRAME), block_ids)])
    elements(range_, 0)[:] = 7.0
    heap.unmap(range_, [3, 4])
    heap.free(block_ids)
    heap.trim()
    assert heap.committed_bytes == (FRAME - 2) * PIECE
    assert bool((elements(range_, 0)[5:] == 7.0).all())
    heap.map([(range_, [3, 4], heap.allocate(2))])  # small pages serve
    assert not elements(range_, 0)[3:5].any()
    assert _huge_bytes(range_.address, range_.num_bytes) == 0
    heap.unmap(range_, np.arange(FRAME))
    heap.free(block_ids[3:5])
    heap.trim()
    assert heap.committed_bytes == 0
    heap.map([(range_, np.arange(FRAME), heap.allocate(FRAME))])
    assert _huge_bytes(range_.address, range_.num_bytes) == 2 << 20
    heap.close()


@pytest.mark.parametrize("name", ["collapse", "forget"])
def test_without_huge_pages_small_ones_serve(name: str) -> None:
    calls = SystemCalls()

    def refuse(address: int, num_bytes: int) -> None:
        raise OSError(errno.EINVAL, "no such advice")

    setattr(calls, name, refuse)
    heap = PlacementHeap([PIECE], max_blocks=FRAME, backend=MemfdBackend(calls))
    range_ = heap.reserve(FRAME)
    heap.map([(range_, np.arange(FRAME), heap.allocate(FRAME))])
    elements(range_, 0)[:] = 1.0
    assert heap.committed_bytes == FRAME * PIECE
    heap.close()


@pytest.mark.parametrize("works", [True, False])
def test_huge_pages_that_take_long_are_bounded(works: bool) -> None:
    now, took_s = 100.0, 0.0
    calls = SystemCalls()

    def collapse(address: int, num_bytes: int) -> None:
        nonlocal now
        now += took_s
        if not works:
            raise OSError(errno.ENOMEM, "no huge page to be had")

    setattr(calls, "collapse", collapse)  # noqa: B010
    backend = MemfdBackend(calls, clock=lambda: now)
    file = backend.make_heap(2 << 20)

    def num_tried(most: int) -> int:
        """How many are made, or refused by the system, before none is asked for."""
        for count in range(most):
            before = now
            assert backend.commit_huge(file, 0) is (works and now > before)
            if now == before:
                return count
        return most

    took_s = 1e-3
    assert num_tried(1000) == 1000
    took_s = 41e-3
    assert num_tried(10) == 3  # 0.04 s above the usual: a tenth of a second at once
    now += 0.2
    assert num_tried(1) == 0
    now += 0.2  # a twentieth of the time
    assert num_tried(10) == 1
    now += 1000
    assert num_tried(10) == 3


@pytest.mark.parametrize("every", range(1, 30))
def test_a_failing_call_leaves_huge_pages_as_they_were(every: int) -> None:
    calls = FaultyCalls()
    heap = PlacementHeap([PIECE, PIECE], max_blocks=2 * FRAME, backend=untimed(calls))
    range_ = heap.reserve(2 * FRAME)
    block_ids = heap.allocate(2 * FRAME)
    heap.map([(range_, np.arange(FRAME), block_ids[:FRAME])])
    for layer_buffer in (0, 1):
        elements(range_, layer_buffer)[:FRAME] = torch.arange(FRAME)[:, None].float()
    huge = _huge_bytes(range_.address, range_.num_bytes)
    for attempt in (
        lambda: heap.map([(range_, np.arange(4, 2 * FRAME), np.r_[block_ids[40:], block_ids[4:40]])]),
        lambda: heap.map([(range_, [5, 9, 40], block_ids[[40, 41, 42]])]),
    ):
        before = _state(heap, [range_])
        calls.arm(every, once=True)
        try:
            attempt()
        except CapacityError:
            calls.arm(0)
            assert _state(heap, [range_]) == before
            assert _huge_bytes(range_.address, range_.num_bytes) == huge
        calls.arm(0)
        heap.map(
            [
                (range_, np.arange(FRAME), block_ids[:FRAME]),
                (range_, np.arange(FRAME, 2 * FRAME), [-1] * FRAME),
            ]
        )
        assert _huge_bytes(range_.address, range_.num_bytes) == huge
        assert elements(range_, 1)[:FRAME, 7].tolist() == list(range(FRAME))
        heap.check()
    heap.close()


def test_addresses_go_with_the_last_tensor_and_files_with_the_heap() -> None:
    num_files = len(os.listdir("/proc/self/fd"))
    heap = PlacementHeap([PAGE], max_blocks=4)
    range_ = heap.reserve(4)
    heap.map([(range_, [0], heap.allocate(1))])
    tensor = range_.tensor(0, torch.uint8)
    start, stop = range_.address, range_.address + range_.num_bytes
    heap.release(range_)
    del range_
    gc.collect()
    assert {mapping.permissions for mapping in mappings(start, stop)} == {"---p"}
    del tensor
    gc.collect()
    assert "rw-s" not in {mapping.permissions for mapping in mappings(start, stop)}
    del heap  # without close
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == num_files


def test_a_mirror_ring_shows_any_window_as_one_contiguous_tensor() -> None:
    heap = PlacementHeap([PAGE], max_blocks=4)
    ring = heap.reserve(8)
    block_ids = heap.allocate(4)
    heap.map([(ring, np.arange(8), np.tile(block_ids, 2))])
    assert ring.num_mappings == 1 + 3
    size = 4 * PAGE // 4
    twice = ring.tensor(0, torch.float32)
    written = 0
    for stop in (size, size + 1, 2 * size - 1, 2 * size + 77):
        while written < stop:
            twice[written % size] = written
            written += 1
        start = (stop - size) % size
        window = twice[start : start + size]
        assert window.is_contiguous()
        assert torch.equal(window, torch.arange(stop - size, stop, dtype=torch.float32))
    heap.close()


def test_a_child_process_does_not_have_the_memory() -> None:
    heap = PlacementHeap([PAGE], max_blocks=4)
    range_ = heap.reserve(4)
    heap.map([(range_, [0], heap.allocate(1))])
    tensor = range_.tensor(0, torch.uint8)
    child = os.fork()
    if child == 0:
        os._exit(
            0
            if not any(m.permissions == "rw-s" for m in mappings(range_.address, range_.address + PAGE))
            else 1
        )
    assert os.waitpid(child, 0)[1] == 0
    assert not tensor[:PAGE].any()
    heap.close()


# Faults


def _state(heap: PlacementHeap, ranges: list[AddressRange]) -> tuple[object, ...]:
    """Everything a failing call must leave alone, the system's own view and the bytes included."""
    seen = []
    for range_ in ranges:
        found = [
            (m.start, m.stop, m.permissions, m.offset if m.inode else 0, m.inode)
            for m in mappings(range_.address, range_.address + range_.num_bytes)
        ]
        mapped = np.flatnonzero(range_.block_ids() >= 0)
        values = [elements(range_, layer_buffer)[mapped].sum(1).tolist() for layer_buffer in (0, 1)]
        seen.append((range_.block_ids().tolist(), range_.num_mappings, found, values))
    return (seen, heap.references(np.arange(heap.max_blocks)).tolist(), heap.num_heaps, heap.num_mappings)


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("every", range(1, 24))
def test_a_failing_call_leaves_everything_as_it_was(every: int, once: bool) -> None:
    calls = FaultyCalls()
    heap = PlacementHeap([PAGE, PAGE], max_blocks=32, blocks_per_heap=8, backend=MemfdBackend(calls))
    a, b = heap.reserve(16), heap.reserve(16)
    block_ids = heap.allocate(12)
    heap.map([(a, np.arange(8), block_ids[:8]), (b, [2, 3, 5], block_ids[[0, 9, 4]])])
    for layer_buffer in (0, 1):
        for range_ in (a, b):
            for position in np.flatnonzero(range_.block_ids() >= 0).tolist():
                elements(range_, layer_buffer)[position] = float(range_.block_ids()[position])
    attempts = (
        lambda: heap.map(
            [(b, [0, 2, 3, 9, 10], block_ids[[11, 8, 1, 2, 3]]), (a, [1, 12], block_ids[[6, 10]])]
        ),
        lambda: heap.unmap(a, [1, 2, 6, 7]),
        lambda: heap.allocate(9),
        lambda: heap.claim([22, 28]),
        lambda: heap.reserve(4),
        lambda: heap.release(b),
    )
    num_failed = 0
    for attempt in attempts:
        before = _state(heap, [a, b])
        calls.arm(every, once=once)
        try:
            attempt()
        except CapacityError as error:
            num_failed += "was made to fail" in str(error)
            calls.arm(0)
            assert _state(heap, [a, b]) == before
        calls.arm(0)
        heap.check()
    if every == 1:
        assert num_failed == len(attempts)
    heap.close()


def test_memory_that_is_not_there_is_an_error_and_not_a_crash() -> None:
    calls = FaultyCalls()
    heap = PlacementHeap([PAGE], max_blocks=32, backend=MemfdBackend(calls))
    range_ = heap.reserve(4)
    block_ids = heap.allocate(4)
    calls.arm(1)
    with pytest.raises(
        CapacityError, match=r"gives no memory for the KV cache: .* was made to fail; close sequences"
    ):
        heap.map([(range_, [0], block_ids[:1])])
    calls.arm(0)
    assert range_.num_mapped == 0
    heap.map([(range_, [0], block_ids[:1])])
    heap.close()


@pytest.mark.parametrize("every", range(1, 14))
def test_a_probe_tells_what_does_not_work(every: int) -> None:
    calls = FaultyCalls()
    calls.arm(every, once=True)
    reason = unsupported_reason(calls)
    assert (reason is None) == (calls.num_failed == 0)
    if reason is not None:
        assert "failed: " in reason


# The simulated machine


def test_policies_run_on_a_machine_of_any_page_size_with_prices() -> None:
    page = 2 << 20
    machine = SimulatedBackend(
        page, max_bytes=6 * page, costs_us={"map": 1.5, "unmap": 26.0}, page_costs_us={"map": 36.0}
    )
    heap = PlacementHeap([page, page], max_blocks=8, blocks_per_heap=4, backend=machine)
    range_ = heap.reserve(8)
    block_ids = heap.allocate(4)
    heap.map([(range_, [0, 1, 2], block_ids[:3])])
    assert machine.calls["map"] == 6  # a device maps piece by piece
    assert machine.time_us == 6 * 37.5
    assert range_.num_mappings == 1 + 2 * 4
    assert machine.mapped_at(range_.address + page) == (machine.mapped_at(range_.address)[0], page)  # type: ignore[index]
    with pytest.raises(CapacityError, match="6 pages of 2097152 bytes are taken, no room for 1 more"):
        heap.map([(range_, [3], block_ids[3:])])
    assert machine.num_mapped_pages == 6
    heap.check()
    heap.unmap(range_, [1])
    heap.free(block_ids)
    heap.trim()
    assert heap.committed_bytes == 4 * page
    heap.release(range_)
    heap.trim()
    assert (machine.num_mapped_pages, heap.num_heaps) == (0, 0)
    with pytest.raises(BackendError, match="simulated"):
        heap.reserve(1).tensor(0, torch.float32)


def test_a_simulated_machine_refuses_what_a_real_one_would_punish() -> None:
    machine = SimulatedBackend(PAGE, merges=True)
    address = machine.reserve(4 * PAGE, PAGE)
    memory = machine.make_heap(4 * PAGE)
    machine.commit(memory, 0, 2 * PAGE)
    for wrong in (
        lambda: machine.map(address + 1, PAGE, memory, 0, populate=True),
        lambda: machine.map(address, PAGE, memory, 2 * PAGE, populate=True),
        lambda: machine.map(address + 4 * PAGE, PAGE, memory, 0, populate=True),
        lambda: machine.commit(memory, 4 * PAGE, PAGE),
        lambda: machine.unmap(address - PAGE, PAGE),
        lambda: machine.release(address + PAGE, PAGE),
    ):
        with pytest.raises(InvariantError, match="simulated memory"):
            wrong()
    machine.map(address, 2 * PAGE, memory, 0, populate=True)
    for wrong in (lambda: machine.give_back(memory, PAGE, PAGE), lambda: machine.drop_heap(memory)):
        with pytest.raises(InvariantError, match="mapped"):
            wrong()
