"""`DriverPages`: pages of a card's memory behind addresses, and the fences that release waits for.

The common part of a card's ranges (`driver_range`) and rows (`driver_placement`); `driver_memory` is the whole.

A step on the card may still run when the host has gone on. So memory that it may use is unmapped *behind a fence*: an
event recorded when the memory was given up, after all steps launched until then.

Invariants
    G1  an address is unmapped only after the fence of its release has passed.
    G2  a handle is free, or belongs to one page of one range; handles created are handles destroyed, free and in use.
    G3  a call that fails leaves mappings, handles in use and bytes as before.
    G4  a page of a range has zeros when it gets its memory.

Threads: one lock for all of a card; any thread may call. A thread that captures a graph must capture in mode
"thread_local", as others may create handles meanwhile.

Cost: a page about 40 us to map and open (published; to be measured), 20 us to unmap.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch

from quire.devices.cuda.driver_ahead import MapAhead
from quire.devices.cuda.driver_calls import CudaDriver, StreamFence
from quire.devices.cuda.driver_handles import HandlePool
from quire.errors import BackendError, CapacityError, DeviceLostError

__all__ = ["DriverPages", "DriverReservation", "page_runs"]

_ATTEMPTS = 4  # of an undo: a call that failed may succeed the next time


class DriverPages:
    """The pages of `torch_device`.

    stream: the stream on which the device's attention runs; torch's current one if not given.

    *raises:* BackendError: no driver, or a card without virtual memory (`driver_calls.virtual_memory_reason`).
    """

    def __init__(
        self,
        torch_device: torch.device,
        *,
        driver: CudaDriver | None = None,
        stream: Callable[[], int] | None = None,
    ) -> None:
        self.torch_device = torch_device
        self.driver = driver or CudaDriver(torch_device.index or 0)
        self.page_bytes = self.driver.granularity
        self.lock = threading.RLock()
        self.pool = HandlePool(self.driver, self.page_bytes, self._reclaim)
        self.ahead = MapAhead()
        self.behind = MapAhead("quire-unmap-behind")
        self.collects_soon = True  # tests that look at memory in between say False
        self.stream = stream or self._torch_stream
        self._side_stream: int | None = None
        self._waiting: deque[tuple[StreamFence, Callable[[], None]]] = deque()
        self._abandoned: deque[Callable[[], None]] = deque()  # by finalizers, which may run within any call

    # Fences

    def record_fence(self) -> StreamFence:
        """A fence behind every step launched so far."""
        return self.driver.fence(self.stream())

    def defer(self, fence: StreamFence, act: Callable[[], None]) -> None:
        """Call `act` after the fence has passed: now, or soon, by a thread of its own. It may be called again if it
        fails."""
        self._waiting.append((fence, act))
        self.collect()
        if self._waiting and self.collects_soon:
            self.behind.want(self._collect_behind)

    def _collect_behind(self) -> None:
        """Wait for the last fence without the lock, and do the deferred work: an idle engine gives memory back too."""
        with self.lock:
            fence = self._waiting[-1][0] if self._waiting else None
        if fence is not None:
            fence.wait_outside()
            with self.lock:
                self.collect()

    def collect(self) -> None:
        """Do the deferred work whose fences have passed. A refusal of the driver is tried again by a later call.

        *raises:* DeviceLostError.
        """
        with contextlib.suppress(CapacityError, BackendError):
            while self._abandoned:
                self._abandoned[0]()
                self._abandoned.popleft()
            while self._waiting and self._waiting[0][0].is_passed():
                self._waiting[0][1]()
                self._waiting.popleft()

    def wait(self) -> None:
        """Wait until all deferred work can be done, and do it."""
        if self._waiting:
            self._waiting[-1][0].wait()
        self.collect()
        for _ in range(_ATTEMPTS):
            if not self._waiting:
                return
            self.collect()

    def _reclaim(self) -> bool:
        """Wait for handles that a running step still uses; returns whether there were any."""
        num_free = self.pool.num_free
        self.wait()
        return self.pool.num_free > num_free

    def abandon(self, act: Callable[[], None]) -> None:
        """Have the next `collect` call `act`; for finalizers."""
        self._abandoned.append(act)

    # Mapping

    def map_pages(self, pages: Sequence[tuple[int, int]], *, clear: bool) -> None:
        """Map handles at the addresses of pages, (address, handle) in ascending order, and open them for access.

        clear: set their bytes to zero. All or nothing.
        """
        done: list[int] = []
        try:
            for address, handle in pages:
                self.driver.map(address, self.page_bytes, handle)
                done.append(address)
            for first, num_bytes in page_runs([address for address, _ in pages], self.page_bytes):
                self.driver.allow(first, num_bytes)
                if clear:
                    self.driver.clear(first, num_bytes, self._side())
            if clear:
                self.driver.synchronize(self._side())
        except DeviceLostError:
            raise
        except BaseException:
            for address in done:
                self.insist(lambda address=address: self.driver.unmap(address, self.page_bytes))
            raise

    def insist(self, call: Callable[[], None]) -> None:
        """Make a call that undoes something, again if it fails. *raises:* DeviceLostError: it never succeeds."""
        for left in reversed(range(_ATTEMPTS)):
            try:
                return call()
            except (CapacityError, BackendError) as error:
                if not left:
                    raise DeviceLostError(
                        f"expected the driver to undo a change of mappings, got {_ATTEMPTS} refusals: {error}; start "
                        "the process anew"
                    ) from error

    def _side(self) -> int:
        if self._side_stream is None:
            self._side_stream = self.driver.make_stream()
        return self._side_stream

    def _torch_stream(self) -> int:
        if self.torch_device.type != "cuda":
            return 0
        return int(torch.cuda.current_stream(self.torch_device).cuda_stream)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Copy bytes within the card, in the order of the steps."""
        self.driver.copy(target, source, num_bytes, self.stream())


class DriverReservation:
    """Reserved addresses of a card. The last reference to it gives them back, in a later call of the memory."""

    def __init__(self, memory: DriverPages, num_bytes: int) -> None:
        self.address = memory.driver.reserve(num_bytes, memory.page_bytes)
        free = weakref.finalize(
            self, _abandon_addresses, weakref.ref(memory), self.address, num_bytes, os.getpid()
        )
        free.atexit = False  # the end of the process frees all, and a tensor may still exist


def _abandon_addresses(of: weakref.ref[DriverPages], address: int, num_bytes: int, process_id: int) -> None:
    memory = of()
    if memory is not None and os.getpid() == process_id:
        memory.abandon(lambda: memory.driver.free_addresses(address, num_bytes))


def page_runs(addresses: Iterable[int], page_bytes: int) -> list[tuple[int, int]]:
    """Runs of neighbours among ascending pages: the first address and the bytes of each run."""
    runs: list[tuple[int, int]] = []
    for address in addresses:
        if runs and runs[-1][0] + runs[-1][1] == address:
            runs[-1] = runs[-1][0], runs[-1][1] + page_bytes
        else:
            runs.append((address, page_bytes))
    return runs
