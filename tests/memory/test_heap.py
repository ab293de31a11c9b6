"""The heap takes memory at the first write and gives it back; measured at the operating system."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from quire.errors import ArgumentError, CapacityError
from quire.memory import Heap

PAGE = mmap.PAGESIZE
MIB = 1 << 20


def resident_bytes() -> int:
    """Memory of this process, by another way than the heap's own."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_reserving_takes_no_memory_and_touching_takes_whole_pages() -> None:
    heap = Heap(1 << 40)
    assert heap.max_bytes == 1 << 40
    assert heap.committed_bytes(0, 1 << 30) == 0
    heap.tensor(torch.uint8)[5 * PAGE : 7 * PAGE + 1] = 1
    assert heap.committed_bytes(0, 1 << 30) == 3 * PAGE
    assert heap.committed_bytes(6 * PAGE, 7 * PAGE) == PAGE
    assert heap.committed_bytes(6 * PAGE + 1, 7 * PAGE + 1) == 2 * PAGE


def test_memory_goes_back_to_the_operating_system() -> None:
    heap = Heap(64 * MIB)
    heap.tensor(torch.uint8).fill_(1)
    full = resident_bytes()
    assert heap.committed_bytes() == 64 * MIB
    heap.release(16 * MIB, 64 * MIB)
    assert heap.committed_bytes() == 16 * MIB
    # Other threads of the process may take a little meanwhile.
    assert full - resident_bytes() == pytest.approx(48 * MIB, abs=4 * MIB)
    heap.close()
    assert full - resident_bytes() == pytest.approx(64 * MIB, abs=4 * MIB)


@pytest.mark.parametrize(
    ("start", "stop", "given_back"),
    [
        (0, 4, range(0, 4)),
        (0.5, 3.5, range(1, 3)),
        (1.5, 2.5, range(0)),
        (2, 2, range(0)),
        (0, 0.9, range(0)),
    ],
)
def test_release_spares_every_page_that_is_not_wholly_inside(
    start: float, stop: float, given_back: range
) -> None:
    heap = Heap(4 * PAGE)
    data = heap.tensor(torch.uint8)
    data.fill_(7)
    heap.release(int(start * PAGE), int(stop * PAGE))
    assert heap.committed_bytes() == (4 - len(given_back)) * PAGE
    for page in range(4):
        expected = 0 if page in given_back else 7
        assert bool((data[page * PAGE : (page + 1) * PAGE] == expected).all())


def test_released_pages_can_be_used_again() -> None:
    heap = Heap(2 * PAGE)
    data = heap.tensor(torch.float32)
    data.fill_(float("nan"))
    heap.release(0, 2 * PAGE)
    assert bool((data == 0).all())
    data[3] = 2.5
    assert data[3] == 2.5


def test_bytes_in_neighbouring_heaps_do_not_count() -> None:
    """The kernel merges neighbouring mappings; the measurement must not."""
    heaps = [Heap(8 * PAGE) for _ in range(3)]
    heaps[0].tensor(torch.uint8).fill_(1)
    heaps[2].tensor(torch.uint8).fill_(1)
    assert heaps[1].committed_bytes() == 0


def test_huge_pages_are_asked_for_within_the_range_only() -> None:
    heap = Heap(16 * MIB)
    heap.prefer_huge_pages(MIB, 9 * MIB)
    heap.tensor(torch.uint8)[0:1] = 1
    assert heap.committed_bytes() == PAGE
    heap.tensor(torch.uint8)[9 * MIB : 9 * MIB + 1] = 1
    assert heap.committed_bytes() == 2 * PAGE
    heap.tensor(torch.uint8)[MIB : 9 * MIB] = 1
    assert heap.committed_bytes() == 8 * MIB + 2 * PAGE
    heap.release(0, heap.max_bytes)
    assert heap.committed_bytes() == 0


def test_sizes_are_rounded_up_to_pages() -> None:
    assert Heap(PAGE + 1).max_bytes == 2 * PAGE


@pytest.mark.parametrize("size", [0, -5])
def test_refuses_an_empty_heap(size: int) -> None:
    with pytest.raises(ArgumentError, match=f"positive size for a heap, got {size} bytes"):
        Heap(size)


@pytest.mark.parametrize(("start", "stop"), [(-1, 5), (5, 4), (0, PAGE + 1)])
def test_release_refuses_a_range_outside_and_changes_nothing(start: int, stop: int) -> None:
    heap = Heap(PAGE)
    heap.tensor(torch.uint8).fill_(3)
    with pytest.raises(ArgumentError, match="inside the heap"):
        heap.release(start, stop)
    assert heap.committed_bytes() == PAGE
    assert bool((heap.tensor(torch.uint8) == 3).all())


def test_closing_twice_is_harmless_and_a_tensor_keeps_the_range() -> None:
    heap = Heap(PAGE)
    data = heap.tensor(torch.uint8)
    data.fill_(1)
    heap.close()
    heap.close()
    assert bool((data == 0).all())
    for use in (lambda: heap.tensor(torch.uint8), heap.committed_bytes, lambda: heap.release(0, PAGE)):
        with pytest.raises(ArgumentError, match="closed"):
            use()


def test_a_refused_reservation_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(CapacityError, match=r"cannot reserve 8192 bytes .*Cannot allocate memory.*ulimit -v"):
        Heap(8192)


@pytest.mark.ci
def test_under_a_real_address_space_limit() -> None:
    """More than exists is refused; what fits still works afterwards."""
    script = """
        import resource
        import torch
        from quire.errors import CapacityError
        from quire.memory import Heap, PagedStorage
        from quire.spec import KVSpec

        now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + (1 << 28), now + (1 << 28)))
        try:
            Heap(1 << 32)
        except CapacityError as error:
            assert "cannot reserve 4294967296 bytes" in str(error), error
        else:
            raise SystemExit("reserved beyond the limit")
        # Room to grow is half of what the limit leaves at most; where that is less than was asked, what was asked.
        spec = KVSpec.uniform(num_layers=2, num_kv_heads=2, head_dim=64)
        storage = PagedStorage(spec, num_blocks=100, block_size=16)
        assert 100 <= storage.max_blocks <= (1 << 27) // storage.block_bytes
        storage.fill(1.0)
        small = 400 * storage.block_bytes
        now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + small + (4 << 20), resource.getrlimit(resource.RLIMIT_AS)[1]))
        tight = PagedStorage(spec, num_blocks=400, block_size=16)
        assert tight.max_blocks == 400
        tight.fill(1.0)
        print("fine")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "fine", done.stderr
