"""Memory of values is reused, and never while it is still visible."""

from __future__ import annotations

import gc

import numpy as np

from quire.tiers.disk.read_buffers import MAX_WAITING_BYTES, ReadBuffers


def address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


def test_memory_comes_back_when_its_last_view_is_gone() -> None:
    buffers = ReadBuffers()
    first = buffers.acquire(4096)
    where = address(first)
    payload = np.frombuffer(first[100:], np.uint8)[10:20]
    first[:] = bytes(range(256)) * 16
    del first
    gc.collect()
    second = buffers.acquire(4096)
    assert address(second) != where  # a slice of a view of it is still there
    second[:] = bytes(4096)
    assert payload.tolist() == [*range(110, 120)]
    del payload
    gc.collect()
    assert address(buffers.acquire(8192)) != where
    assert address(buffers.acquire(4096)) == where


def test_what_waits_is_bounded() -> None:
    buffers, size = ReadBuffers(), 1 << 20
    held = [buffers.acquire(size) for _ in range(2 * MAX_WAITING_BYTES // size)]
    assert len({address(view) for view in held}) == len(held)
    held.clear()
    gc.collect()
    buffers.acquire(4096)
    assert (
        buffers._num_bytes
        == MAX_WAITING_BYTES
        == sum(len(all_of) * of for of, all_of in buffers._waiting.items())
    )
