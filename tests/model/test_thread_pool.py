"""The processors on which the native kernels' threads may run."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch
from support.forked import in_child

_native = pytest.importorskip("quire._native")

from quire.devices.cpu.packed_weights import NativeWeight  # noqa: E402

ALLOWED = os.sched_getaffinity(0)


@pytest.fixture
def workers() -> Iterator[list[int]]:
    """Thread ids of the pool's workers, as many as there are processors besides one."""
    if len(ALLOWED) < 2:
        pytest.skip("one processor")
    before = _native.num_threads()
    _native.set_num_threads(1)
    others = set(os.listdir("/proc/self/task"))
    _native.set_num_threads(len(ALLOWED))
    yield [int(task) for task in set(os.listdir("/proc/self/task")) - others]
    _native.set_num_threads(before)


def multiply() -> None:
    """A product that is not done on one thread alone."""
    NativeWeight(torch.randn(1024, 512)).multiply(torch.randn(16, 512), None)


def test_each_worker_has_a_processor_that_is_not_the_callers(workers: list[int]) -> None:
    places = []

    def call() -> None:
        for processor in sorted(ALLOWED)[:2]:
            os.sched_setaffinity(0, {processor})  # there it goes, and may then go anywhere
            os.sched_setaffinity(0, ALLOWED)
            multiply()
            places.append([os.sched_getaffinity(worker) for worker in workers])

    caller = threading.Thread(target=call)
    caller.start()
    caller.join()
    for masks in places:
        assert all(len(mask) == 1 for mask in masks)
        assert len(set.union(*masks)) == len(ALLOWED) - 1
    # The caller's own affinity is left alone.
    assert os.sched_getaffinity(0) == ALLOWED


def test_a_caller_that_is_kept_to_one_processor_keeps_the_workers_where_they_may_run(
    workers: list[int],
) -> None:
    os.sched_setaffinity(0, {min(ALLOWED)})
    try:
        multiply()
    finally:
        os.sched_setaffinity(0, ALLOWED)
    assert all(os.sched_getaffinity(worker) for worker in workers)


def test_a_child_of_fork_has_workers_of_its_own_whatever_the_parent_was_doing(workers: list[int]) -> None:
    x, weight = torch.randn(64, 512), NativeWeight(torch.randn(4096, 512))
    expected = weight.multiply(x, None)
    stop = threading.Event()

    def go_on() -> None:
        while not stop.is_set():
            weight.multiply(x, None)

    def answer() -> tuple[bool, int, int]:
        same = torch.equal(weight.multiply(x, None), expected)
        num_tasks = len(os.listdir("/proc/self/task"))
        _native.set_num_threads(1)
        return same and torch.equal(weight.multiply(x, None), expected), num_tasks, _native.num_threads()

    busy = threading.Thread(target=go_on)
    busy.start()
    try:
        for _ in range(10):  # most of them while the parent's job is under way, its owner's lock held
            assert in_child(answer) == (True, 1 + len(workers), 1)
    finally:
        stop.set()
        busy.join()
    assert torch.equal(weight.multiply(x, None), expected)
