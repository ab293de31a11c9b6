"""Threads and their queue: order, limit, priority, and an end without leftovers."""

from __future__ import annotations

import os
import threading

import pytest

from quire.tiers.workers import Workers


def test_one_thread_keeps_the_order_and_lets_the_urgent_go_first() -> None:
    workers = Workers("test", 1)
    ended: list[str] = []
    begin = threading.Event()
    workers.submit(lambda: begin.wait(30) and None)
    for name in "abc":
        workers.submit(lambda name=name: ended.append(name))
    for name in "xy":
        workers.submit(lambda name=name: ended.append(name), first=True)
    begin.set()
    assert workers.wait(30)
    assert ended == ["x", "y", "a", "b", "c"]
    assert workers.close(30) == (True, 0)


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_a_job_that_raises_stops_nothing(num_threads: int, caplog: pytest.LogCaptureFixture) -> None:
    workers = Workers("test", num_threads, max_bytes=10)
    ended: list[int] = []

    def fail() -> None:
        raise RuntimeError("no good")

    assert workers.submit(fail, 10)
    assert workers.wait(30)
    assert workers.submit(lambda: ended.append(1), 10)
    assert workers.close(30) == (True, 0)
    assert ended == [1]
    assert workers.num_bytes == 0
    assert "no good" in caplog.text


def test_the_bound_counts_what_runs_as_well() -> None:
    workers = Workers("test", 1, max_bytes=10)
    begin, running = threading.Event(), threading.Event()

    def job() -> None:
        running.set()
        assert begin.wait(30)

    assert not workers.submit(job, 11)
    assert workers.submit(job, 6)
    assert running.wait(30)
    assert not workers.submit(job, 5)
    assert workers.submit(job, 4)
    assert workers.num_bytes == 10
    assert not workers.wait(0.01)
    begin.set()
    assert workers.wait(30)
    assert workers.submit(job, 10)
    assert workers.close(30) == (True, 0)
    assert not workers.submit(job)


def test_inline_runs_a_job_s_jobs_after_it_however_many() -> None:
    workers = Workers("test", 0)
    ended: list[int] = []

    def job(left: int) -> None:
        if left:
            workers.submit(lambda: job(left - 1))
        ended.append(left)

    workers.submit(lambda: job(5000))  # deeper than Python's stack, were it recursion
    assert ended == list(range(5000, -1, -1))
    assert workers.wait(0)
    assert workers.close(0) == (True, 0)


def test_close_gives_up_what_waits_when_the_time_is_over() -> None:
    workers = Workers("test", 1)
    begin, running = threading.Event(), threading.Event()

    def job() -> None:
        running.set()
        assert begin.wait(30)

    for _ in range(3):
        workers.submit(job, 1)
    assert running.wait(30)
    assert workers.close(0.01) == (False, 2)
    begin.set()
    for thread in workers._threads:
        thread.join(30)
    assert workers.num_bytes == 0


@pytest.mark.parametrize("refuses_all", [False, True])
def test_who_may_not_set_its_niceness_works_all_the_same(
    refuses_all: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ordinary user's process under `nice -n 10` may not go back to 5, and a sandbox may refuse all."""
    asked: list[int] = []

    def refuse(which: int, who: int, nice: int) -> None:
        asked.append(nice)
        raise PermissionError

    monkeypatch.setattr(os, "getpriority", lambda which, who: 0 if refuses_all else 10)
    monkeypatch.setattr(os, "setpriority", refuse)
    workers = Workers("test", 1, nice=5)
    ended: list[int] = []
    workers.submit(lambda: ended.append(1))
    assert workers.close(30) == (True, 0)
    assert ended == [1]
    assert asked == ([5] if refuses_all else [])


def test_niceness_is_the_threads_alone() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    workers = Workers("test", 1, nice=19)
    found: list[int] = []
    workers.submit(lambda: found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
    assert workers.close(30) == (True, 0)
    assert found == [19]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system keeps no thread to a processor")
@pytest.mark.parametrize("spread", [False, True])
def test_as_many_threads_as_processors_stay_on_one_each(spread: bool) -> None:
    processors = os.sched_getaffinity(0)
    workers = Workers("test", len(processors), spread=spread)
    all_there = threading.Barrier(len(processors))
    kept_to: list[set[int]] = []

    def job() -> None:
        all_there.wait(30)
        kept_to.append(os.sched_getaffinity(0))

    for _ in processors:
        workers.submit(job)
    assert workers.close(30) == (True, 0)
    expected = [{one} for one in sorted(processors)] if spread else [processors] * len(processors)
    assert sorted(kept_to, key=min) == expected
    assert os.sched_getaffinity(0) == processors  # nobody else's
