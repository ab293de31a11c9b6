"""Measures one storage under a workload, step by step: running requests, use of memory, cost of allocation.

All figures come from the real cache and storage, not from formulas. A step's figures are taken after it was computed
and its ended requests were closed; a step after which no request is open counts only for time.

Cost: `MemoryUse` once a step, O(blocks of open sequences).
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from quire.cache.memory_use import MemoryUse
from quire.cache.protocol import KVCache
from quire.errors import CapacityError
from quire.memory.storage import Storage
from quire.simulate.cost_line import CostLine
from quire.step import Batch, StepRefusedError

__all__ = ["Clock", "Figures", "Meter", "PreparingRunner", "SimulatedClock", "SimulatedRunner"]


class PreparingRunner(Protocol):
    """A runner that measures the storage's time to prepare its steps."""

    prepare_seconds: float

    def run(self, batch: Batch[Any], /) -> torch.Tensor: ...


class Clock:
    """Seconds since the clock was made."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() - self._began

    def wait_until(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds - self()))


class SimulatedClock(Clock):
    """A clock that only its users move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait_until(self, seconds: float) -> None:
        self.now = max(self.now, seconds)


class SimulatedRunner:
    """A runner without a model: the storage, if there is one, prepares every step, the clock moves along the cost line,
    every token is 0."""

    def __init__(self, storage: Storage | None, cost: CostLine, clock: SimulatedClock) -> None:
        self._storage = storage
        self._cost = cost
        self._clock = clock
        self.prepare_seconds = 0.0

    def run(self, step: Batch[Any], /) -> torch.Tensor:
        if self._storage is not None:
            self._prepare(self._storage, step)
        num_context_tokens = int(step.plan.context_lengths.sum())
        num_decodes = int(np.count_nonzero(step.num_new_tokens == 1))
        self._clock.now += self._cost.seconds(len(step.input_ids), num_context_tokens, num_decodes)
        return torch.zeros((len(step.logit_rows), 2))

    def _prepare(self, storage: Storage, step: Batch[Any]) -> None:
        began = time.perf_counter()
        storage.forget(step.closed_ids)
        try:
            storage.prepare(step.plan, step.sequence_ids)
        except CapacityError as error:  # as in the runner of a model: no request fails, some wait
            raise StepRefusedError from error
        self.prepare_seconds += time.perf_counter() - began


@dataclass(frozen=True)
class Figures:
    """One storage's column of the comparison; bytes, microseconds, shares of the reserved bytes."""

    running_mean: float
    running_max: int
    reserved_bytes_mean: float
    used_bytes_mean: float
    waste_share: float
    waste_internal_share: float
    waste_external_share: float
    prefix_bytes_saved: int
    alloc_us_p50: float
    alloc_us_p99: float
    peak_bytes: int
    preemptions: int
    requests_done: int
    tokens_per_second: float | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Meter:
    """Collects a run's figures, one `step` after another. It replaces the cache's `reserve` by a timed one."""

    cache: KVCache
    runner: PreparingRunner
    running: list[int] = field(default_factory=list)
    uses: list[MemoryUse] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    alloc_seconds: list[float] = field(default_factory=list)
    _allocated: float = 0.0
    _reserve_seconds: float = 0.0

    def __post_init__(self) -> None:
        reserve = self.cache.reserve

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return reserve(*args, **kwargs)
            finally:
                self._reserve_seconds += time.perf_counter() - began

        self.cache.reserve = timed

    def step(self, num_running: int, now: float) -> None:
        """Record a step in which `num_running` requests ran."""
        allocated = self._reserve_seconds + self.runner.prepare_seconds
        self.alloc_seconds.append(allocated - self._allocated)
        self._allocated = allocated
        self.running.append(num_running)
        use = self.cache.memory_use()
        if use.reserved:
            self.uses.append(use)
            self.times.append(now)

    def figures(
        self, *, num_cached_tokens: int, preemptions: int, requests_done: int, tokens_per_second: float | None
    ) -> Figures:
        reserved, used = self._mean("reserved"), self._mean("used")
        times = np.array(self.alloc_seconds or [0.0]) * 1e6
        return Figures(
            running_mean=float(np.mean(self.running or [0])),
            running_max=max(self.running, default=0),
            reserved_bytes_mean=reserved,
            used_bytes_mean=used,
            waste_share=1 - used / reserved if reserved else 0.0,
            waste_internal_share=self._mean("internal") / reserved if reserved else 0.0,
            waste_external_share=self._mean("external") / reserved if reserved else 0.0,
            prefix_bytes_saved=num_cached_tokens * self.cache.spec.bytes_per_token,
            alloc_us_p50=float(np.percentile(times, 50)),
            alloc_us_p99=float(np.percentile(times, 99)),
            peak_bytes=max((use.peak for use in self.uses), default=0),
            preemptions=preemptions,
            requests_done=requests_done,
            tokens_per_second=tokens_per_second,
        )

    def _mean(self, name: str) -> float:
        return float(np.mean([getattr(use, name) for use in self.uses])) if self.uses else 0.0
