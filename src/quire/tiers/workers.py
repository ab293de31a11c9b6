"""A few threads and one bounded queue of jobs; with no threads, each job runs in the call that submits it.

Invariants
    W1  the bytes of the jobs that wait or run never exceed `max_bytes`: a job beyond that is refused.
    W2  with one thread jobs end in the order of submission, except those submitted with `first`.
    W3  an error of a job is logged, and the next job runs.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from quire.tiers.thread_priority import give_way

__all__ = ["Workers"]

_log = logging.getLogger("quire")
Job = Callable[[], None]


class Workers:
    """See the module's text. num_threads 0: jobs run inline; a job submitted by a running job runs after it.

    nice: of the threads, 0 .. 19, or the process's own if that is higher; with 5, Linux gives a thread about a quarter
    of a processor that a step needs whole. spread: if there are at most as many processors as threads, each thread
    stays on one. Otherwise threads that pass Python's lock to each other share a processor and wait for each other
    (a load of 235 MB by two threads: 22 of 80 ms).
    """

    def __init__(
        self,
        name: str,
        num_threads: int,
        max_bytes: int | None = None,
        *,
        nice: int = 0,
        spread: bool = False,
    ) -> None:
        self._max_bytes = max_bytes
        self._nice = nice
        self._jobs: deque[tuple[Job, int]] = deque()
        self._urgent: deque[tuple[Job, int]] = deque()  # submitted with `first`, in order
        self._changed = threading.Condition()
        self._num_bytes = 0
        self._num_submitted = 0
        self._num_ended = 0
        self._closed = False
        self._inline_runs = False
        self._threads = [
            threading.Thread(
                target=self._work, args=(index if spread else None,), name=f"{name}-{index}", daemon=True
            )
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_bytes(self) -> int:
        """Bytes of the jobs that wait or run."""
        return self._num_bytes

    def submit(self, job: Job, num_bytes: int = 0, *, first: bool = False) -> bool:
        """Queues a job that keeps `num_bytes` alive; first: before the others. False: no room, or closed."""
        with self._changed:
            if self._closed or (
                self._max_bytes is not None and self._num_bytes + num_bytes > self._max_bytes
            ):
                return False
            self._num_submitted += 1
            self._num_bytes += num_bytes
            (self._urgent if first else self._jobs).append((job, num_bytes))
            self._changed.notify_all()
            if self._threads or self._inline_runs:
                return True
            self._inline_runs = True
        self._drain()
        return True

    def wait(self, timeout: float | None) -> bool:
        """Waits for as many jobs to end as have been submitted so far; True if within `timeout` seconds."""
        with self._changed:
            target = self._num_submitted
            return self._changed.wait_for(lambda: self._num_ended >= target, timeout)

    def close(self, timeout: float | None) -> tuple[bool, int]:
        """Refuses new jobs, finishes the others, joins the threads: (all ended in time, number of jobs dropped)."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not (self._jobs or self._urgent), timeout)
            given_up = [*self._urgent, *self._jobs]
            num_given_up = len(given_up)
            self._num_bytes -= sum(size for _, size in given_up)
            self._num_ended += num_given_up
            self._urgent.clear()
            self._jobs.clear()
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not num_given_up and not any(thread.is_alive() for thread in self._threads), num_given_up

    def _work(self, place: int | None) -> None:
        if self._nice:
            give_way(self._nice)
        if place is not None:
            self._stay(place)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._urgent or self._closed)
                if not (self._jobs or self._urgent):
                    return
                job, num_bytes = (self._urgent or self._jobs).popleft()
            self._run(job, num_bytes)
            del job  # it keeps its bytes alive, perhaps for long

    def _stay(self, place: int) -> None:
        """Binds the calling thread, number `place`, to one processor."""
        with suppress(OSError, AttributeError):  # not on this system, or not permitted
            processors = sorted(os.sched_getaffinity(0))
            if 1 < len(processors) <= len(self._threads):
                os.sched_setaffinity(0, {processors[place % len(processors)]})

    def _drain(self) -> None:
        while True:
            with self._changed:
                if not (self._jobs or self._urgent):
                    self._inline_runs = False
                    return
                job, num_bytes = (self._urgent or self._jobs).popleft()
            self._run(job, num_bytes)

    def _run(self, job: Job, num_bytes: int) -> None:
        try:
            job()
        except Exception:
            _log.exception("a job of a tier failed")
        finally:
            with self._changed:
                self._num_bytes -= num_bytes
                self._num_ended += 1
                self._changed.notify_all()
