"""Bytes of a mapped file that move to huge pages: unchanged for every reader at all times, whatever call fails."""

from __future__ import annotations

import mmap
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.memory.heap import HUGE_PAGE_BYTES
from quire.weights import huge_pages
from quire.weights.huge_pages import HugePageMove

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="maps as Linux does"),
    pytest.mark.skipif(
        sys.platform == "linux" and not huge_pages.has_huge_pages(), reason="no huge pages here"
    ),
]

_NUM_PAGES = 7


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of some huge pages and a rest."""
    path = tmp_path / "bytes"
    generator = np.random.default_rng(0)
    path.write_bytes(generator.bytes(_NUM_PAGES * HUGE_PAGE_BYTES + 3 * mmap.PAGESIZE))
    return path


def _map(path: Path) -> np.ndarray:
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8)


def _whole_pages(pages: np.ndarray) -> tuple[int, int]:
    """The aligned huge pages within: the first's address, and their bytes."""
    start = huge_pages._round_up(pages.ctypes.data)
    return start, (pages.ctypes.data + pages.size - start) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES


def _mappings() -> list[tuple[int, int, str, bool]]:
    """Of this process: start, end, permissions, whether a file is mapped."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        start, end = (int(text, 16) for text in fields[0].split("-"))
        found.append((start, end, fields[1], len(fields) == 6 and fields[5].startswith("/")))
    return found


def _mapped_bytes() -> int:
    """Of address space; a thread's stack, which the C library keeps for the next one, is always among them."""
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    return sum(end - start for start, end, _, _ in _mappings())


def test_the_bytes_move_and_no_reader_sees_another(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_PIECE_BYTES", 2 * HUGE_PAGE_BYTES)
    expected, pages = path.read_bytes(), _map(path)
    stop, wrong = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            if pages.tobytes() != expected:
                wrong.append(1)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    move = HugePageMove(pages)
    move.join()
    stop.set()
    for reader in readers:
        reader.join()
    start, num_bytes = _whole_pages(pages)
    assert not wrong
    assert move.num_moved_bytes == num_bytes >= (_NUM_PAGES - 1) * HUGE_PAGE_BYTES
    assert pages.tobytes() == expected
    moved = [entry for entry in _mappings() if entry[0] < start + num_bytes and entry[1] > start]
    assert all(permissions.startswith("r--") and not is_file for _, _, permissions, is_file in moved)


def test_all_of_it_is_given_back_with_the_pages(path: Path) -> None:
    before = _mapped_bytes()
    pages = _map(path)
    size = _mapped_bytes()
    HugePageMove(pages).join()
    assert _mapped_bytes() < size + HUGE_PAGE_BYTES  # Python's own memory may grow a little
    del pages
    assert _mapped_bytes() < before + HUGE_PAGE_BYTES


def test_it_ends_when_the_pages_are_gone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_PIECE_BYTES", HUGE_PAGE_BYTES)
    once, go = threading.Event(), threading.Event()
    move_one = huge_pages._move

    def wait(address: int, num_bytes: int) -> bool:
        once.set()
        go.wait(10)
        return move_one(address, num_bytes)

    monkeypatch.setattr(huge_pages, "_move", wait)
    before, pages = _mapped_bytes(), _map(path)
    move = HugePageMove(pages)
    once.wait(10)
    del pages
    go.set()
    move.join()
    assert move.num_moved_bytes == HUGE_PAGE_BYTES
    assert _mapped_bytes() < before + HUGE_PAGE_BYTES


@pytest.mark.parametrize("name", ["mmap", "madvise", "mprotect", "mremap"])
@pytest.mark.parametrize("at", [1, 2, 4])
def test_whatever_fails_the_bytes_stay(
    path: Path, monkeypatch: pytest.MonkeyPatch, name: str, at: int
) -> None:
    monkeypatch.setattr(huge_pages, "_PIECE_BYTES", HUGE_PAGE_BYTES)
    calls = _Failing(huge_pages._libc, name, at, huge_pages._FAILED if name == "mmap" else -1)
    monkeypatch.setattr(huge_pages, "_libc", calls)
    pages = _map(path)
    before = _mapped_bytes()
    move = HugePageMove(pages)
    move.join()
    assert move.num_moved_bytes == (at - 1) * HUGE_PAGE_BYTES
    assert pages.tobytes() == path.read_bytes()
    assert _mapped_bytes() < before + HUGE_PAGE_BYTES


class _Failing:
    """The C library, whose n-th call of one function answers that it failed."""

    def __init__(self, libc: Any, name: str, at: int, answer: Any) -> None:
        self._libc, self._name, self._left, self._answer = libc, name, at, answer

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            self._left -= 1
            if self._left == 0:
                return lambda *arguments: self._answer
        return getattr(self._libc, name)


def test_nothing_begins_where_the_system_has_none(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enabled = tmp_path / "enabled"
    enabled.write_text("always madvise [never]\n")
    monkeypatch.setattr(huge_pages, "_ENABLED", enabled)
    pages = _map(path)
    move = HugePageMove(pages)
    move.join()
    assert move.num_moved_bytes == 0
    assert pages.tobytes() == path.read_bytes()
